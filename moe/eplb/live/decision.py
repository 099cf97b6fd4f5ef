"""What all ranks do at a boundary: a pure function of what all of them said at the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from .agreement import Table


class Status(IntEnum):
    """What a rank says of its job."""

    IDLE = 0  # no cycle
    WORKING = 1  # detail: 1 + rank that it waits for, 0 for none
    READY = 2  # detail: a number that must be the same on all
    FAILED = 3  # detail: 1 + rank that it blames, 0 for none
    BROKEN = 4  # a connection failed; detail likewise


class Verdict(IntEnum):
    """What becomes of a phase."""

    WAIT = 0
    GO = 1  # all are ready: commit, or begin the first batch
    STOP = 2  # give up


@dataclass(frozen=True, kw_only=True)
class Vote:
    """The words of one rank."""

    serial: int  # of the phase that it is in; one more at every verdict but WAIT
    status: Status
    detail: int
    last: Verdict  # that ended the phase before

    @property
    def words(self) -> list[int]:
        """As they travel."""
        return [self.serial, int(self.status), self.detail, int(self.last)]

    @classmethod
    def of(cls, words: Sequence[int]) -> Vote:
        """From what travelled."""
        serial, status, detail, last = words[:4]
        return cls(serial=serial, status=Status(status), detail=detail, last=Verdict(last))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Verdict and what a report says of it."""

    verdict: Verdict
    reason: str = ""
    broken: bool = False  # no cycle can begin again


def decide(serial: int, table: Table, *, waited: int, patience: int, ranks: Sequence[int]) -> Decision:
    """The decision about phase ``serial``.

    Args:
        serial: of the phase.
        table: what the ranks said; None: a rank is lost, and nothing is decided without it.
        waited: boundaries since the phase began.
        patience: boundaries that it may take.
        ranks: names of the ranks, for the reason.
    """
    votes = [None if words is None else Vote.of(words) for words in table]
    ahead = [vote for vote in votes if vote is not None and vote.serial == serial + 1]
    if ahead:  # only where a rank is lost: they had heard all, and decided
        return Decision(verdict=ahead[0].last, reason="as decided by others")
    known = [(name, vote) for name, vote in zip(ranks, votes, strict=True) if vote is not None and vote.serial == serial]
    bad = [(name, vote) for name, vote in known if vote.status in (Status.FAILED, Status.BROKEN)]
    if bad:
        said = "; ".join(f"rank {name}{_about(vote, ranks, 'because of')}" for name, vote in bad)
        if len(bad) == len(votes) and not any(vote.detail for _, vote in bad):
            said = "all ranks"
        return Decision(verdict=Verdict.STOP, reason=f"failed on {said}", broken=any(v.status is Status.BROKEN for _, v in bad))
    if len(known) == len(votes) and all(vote.status is Status.READY for _, vote in known):
        if len({vote.detail for _, vote in known}) == 1:
            return Decision(verdict=Verdict.GO)
        said = ", ".join(f"{vote.detail:x} on rank {name}" for name, vote in known)
        return Decision(verdict=Verdict.STOP, reason=f"ranks are about to do different things: {said}")
    if waited >= patience and len(known) == len(votes):
        late = [(name, vote) for name, vote in known if vote.status is not Status.READY]
        said = "; ".join(f"rank {name}{_about(vote, ranks, 'waiting for')}" for name, vote in late)
        return Decision(verdict=Verdict.STOP, reason=f"not ready after {waited} steps (patience {patience}): {said}")
    return Decision(verdict=Verdict.WAIT)


def _about(vote: Vote, ranks: Sequence[int], words: str) -> str:
    return f" ({words} rank {ranks[vote.detail - 1]})" if vote.detail else ""
