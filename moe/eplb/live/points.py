"""Named moments of a cycle, at which tests make a rank fail."""

from __future__ import annotations

from collections.abc import Callable

#: called with the name of a moment that is about to come; raising there is an error of that moment
Probe = Callable[[str], None]

PLANNING = ("sum", "plan", "share", "validate", "schedule")  # in the worker thread
PREPARING = ("load", "send", "receive", "checksum", "tables")  # in the worker thread, before a rank is ready
DECIDING = ("vote", "decide")  # in the main thread, at a boundary
COMMITTING = ("commit-before", "commit-copy", "commit-copied", "commit-derive", "commit-tables", "commit-placed", "commit-after")
POINTS = (*PLANNING, *PREPARING, *DECIDING, *COMMITTING)


def unwatched(point: str) -> None:
    """Nothing happens."""
