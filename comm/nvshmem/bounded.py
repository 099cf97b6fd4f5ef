"""A deadline around calls into a C library that wait for other ranks and cannot be interrupted."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ...parallel.group import Group

_GRACE_S = 10.0  # the watchdog, which can name who is missing, comes first


@contextmanager
def bounded(group: Group, what: str) -> Iterator[None]:
    """Around a collective call ``what`` of the ranks of ``group``: past the group's deadline this process is ended.

    The watchdog of the grid does it where the call lets other threads run, and says which ranks were missing. Where it
    does not, Python's fault handler, which needs no lock, prints where the process stood and ends it. Call a barrier of
    the group right before, so that an absent rank is found by an exception instead.
    """
    if group.size == 1 or group.deadline_s <= 0:
        yield
        return
    group.progress.enter(group.name, what, group.ranks)
    with suppress(AttributeError, OSError, ValueError):  # no stderr with a descriptor: the watchdog alone has to do
        faulthandler.dump_traceback_later(group.deadline_s + _GRACE_S, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        group.progress.leave()
