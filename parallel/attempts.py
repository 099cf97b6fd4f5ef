"""Names for the keys of one grid in the job's store, so that those of another, or of an attempt that failed, are not read."""

from __future__ import annotations

import os

_made: list[str] = []  # prefixes of the grids that this process made, or declined to make


def next_prefix() -> str:
    """Of the store keys of the next grid that this process makes, or declines to make."""
    _made.append(_prefix(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), len(_made)))
    return _made[-1]


def earlier_prefixes(attempt: str) -> list[str]:
    """Of the same grid in the attempts before ``attempt``, torchrun's count of restarts."""
    return [_prefix(earlier, len(_made) - 1) for earlier in range(int(attempt))]


def met_nobody() -> bool:
    """Whether this process has neither made a grid yet nor declined to."""
    return not _made


def _prefix(attempt: int | str, generation: int) -> str:
    return f"rorqual/{attempt}/{generation}"
