"""An engine for the length of a command: an error on any rank ends all of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..parallel.watchdog import guard
from .errors import USER_ERRORS

if TYPE_CHECKING:
    from ..engine.llm import LLM


def show_log() -> None:
    """Print what the engine logs (layout, load report, KV pool) to stderr, so that stdout holds results only."""
    logger = logging.getLogger("rorqual")
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)


@contextmanager
def open_llm(model: str, settings: dict[str, Any]) -> Iterator[LLM]:
    """An ``LLM``, closed when the block ends well.

    A bug inside becomes the job's first error, and the watchdogs of the other ranks name it. A user's error needs no
    such alarm: every rank meets it, or the exit of the one that did ends the job.
    """
    from ..engine.llm import LLM

    show_log()
    llm = LLM(model, **settings)
    try:
        yield llm
    except USER_ERRORS:
        raise
    except BaseException:
        with guard(llm.engine.grid):
            raise
    llm.close()
