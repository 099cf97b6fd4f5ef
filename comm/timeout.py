"""The error of a wait for another rank that ended without its flag, made from the words that the wait left."""

from __future__ import annotations

from collections.abc import Sequence

from .state import Failure, Status
from .wire import DISPATCH


class FlagMissed(RuntimeError):
    """Raised by twins at once; the words are in ``PeerState.status``. ``PeerDispatcher`` turns it into ``DispatchTimeout``."""


class DispatchTimeout(RuntimeError):
    """A rank did not take part in a dispatch or combine. Rank numbers are global."""

    def __init__(self, message: str, *, rank: int, missing: int, phase: str, epoch: int, seen: int, tag: int, channel: int) -> None:
        super().__init__(message)
        self.rank = rank  # that waited
        self.missing = missing  # that was waited for
        self.phase = phase  # "dispatch" or "combine"
        self.epoch = epoch  # that was waited for
        self.seen = seen  # last one that the missing rank reached
        self.tag = tag  # what the caller named the call, such as its layer
        self.channel = channel


def failure(words: Sequence[int], ranks: Sequence[int], index: int, timeout_ms: int) -> DispatchTimeout | None:
    """The error that ``words`` of a ``PeerState.status`` mean on rank ``ranks[index]``; None while nothing failed."""
    code = words[Status.FAILED]
    if code <= Failure.NONE:  # below: it is being written just now
        return None
    phase = "dispatch" if words[Status.PHASE] == DISPATCH else "combine"
    missing, me = ranks[words[Status.MISSING]], ranks[index]
    epoch, seen, tag, channel = (words[field] for field in (Status.EPOCH, Status.SEEN, Status.TAG, Status.CHANNEL))
    where = f"{phase} {epoch} of channel {channel} (tag {tag})"
    if code == Failure.COUNT:
        what = (
            f"rank {missing} announced {words[Status.COUNT]} tokens in {where}, which cannot be: its memory or this rank's was overwritten"
        )
    elif code == Failure.LEFT_OUT:
        what = f"the others went on without this rank: {where} was waited for, but rank {missing} is at {seen}; it was too slow for them"
    else:
        what = f"rank {missing} did not come to {where} within {timeout_ms} ms; the last that came from it is {seen}"
    return DispatchTimeout(
        f"rank {me}: {what}", rank=me, missing=missing, phase=phase, epoch=epoch, seen=seen, tag=tag, channel=channel
    )  # fmt: skip
