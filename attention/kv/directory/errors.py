"""What a directory call may end with, other than its result."""

from __future__ import annotations


class DirectoryError(RuntimeError):
    """The store does not work any more: damaged, full disk, removed. Go on without sharing.

    What the member owns and holds stays its own for as long as its process lives: others cannot take it.
    """


class DirectoryBusy(DirectoryError):
    """The store's write lock was not free before the call's deadline; nothing was changed."""


class DirectoryFull(DirectoryError):
    """Fewer pages are free or can be evicted than were asked for; nothing was changed."""


class MemberLost(DirectoryError):
    """This member is no longer in the store: its pages may belong to others. Stop using them and open again."""
