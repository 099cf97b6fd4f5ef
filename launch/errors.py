"""How a command ends when something was wrong: one clean line for a user's error, a traceback for our own."""

from __future__ import annotations

import os
import sys
import time
import traceback

from ..parallel.debug import debugging

#: what a user can cause and mend; anything else is a bug and keeps its traceback (as does a bug of these types with RORQUAL_DEBUG)
USER_ERRORS = (ValueError, OSError)
#: seconds that ranks other than the first wait before they speak: an error that all share is then told once
PATIENCE_S = 10.0


def rank() -> int:
    """This process' rank under torchrun, 0 without it."""
    return int(os.environ.get("RANK", "0"))


def describe(error: BaseException) -> str:
    """One line for a user: the message without line breaks, with the file where an OSError names one."""
    if isinstance(error, OSError) and error.strerror:
        names = " -> ".join(str(n) for n in (error.filename, error.filename2) if n is not None)
        return f"{names}: {error.strerror}" if names else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def tell(error: BaseException) -> int:
    """Print a user's error to stderr and return the exit code, 2.

    Under torchrun every rank usually meets the same error. Rank 0 speaks at once and its exit ends the others; another
    rank speaks only when it is still there after ``PATIENCE_S``, which means that it failed alone.
    """
    who = ""
    if rank() > 0:
        time.sleep(PATIENCE_S)
        who = f" (rank {rank()})"
    if debugging():
        traceback.print_exception(error)
    print(f"rorqual: error{who}: {describe(error)}", file=sys.stderr, flush=True)
    return 2
