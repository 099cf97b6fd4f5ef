"""The cycle that is under way on a rank, and what the rank says of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from .decision import Status
from .mover import Moving
from .planned import Planned
from .report import CycleReport, Outcome
from .worker import Job


@dataclass(kw_only=True)
class Cycle:
    """First one phase of planning, then one for each batch."""

    number: int
    begun: int  # step
    boundary: int  # at which it began
    job: Job  # of the present phase: of a ``Planned``, then of a ``Prepared``
    phase_boundary: int  # at which the present phase began
    planned: Planned | None = None
    moving: Moving | None = None  # None while planning
    batch: int = 0  # of those of ``planned``, the one under way
    layers: set[int] = field(default_factory=set)  # changed so far
    received: int = 0  # experts of this rank, by the statistics, when it began
    given_up: threading.Event = field(default_factory=threading.Event)  # nobody wants the plan any more
    voteless: list[str] = field(default_factory=list)  # why this rank could not vote

    def move(self, moving: Moving) -> None:
        """The next batch is under way."""
        self.moving, self.job = moving, moving.job

    def give_up(self) -> None:
        """The thread does no more for it than others wait for."""
        self.given_up.set()
        if self.moving is not None:
            self.moving.gate.shut()

    @property
    def problems(self) -> list[str]:
        """Of this rank's job, once it is done, and of its vote."""
        if self.voteless or not self.job.done:
            return self.voteless
        if self.job.error is not None:
            return [f"{type(self.job.error).__name__}: {self.job.error}"]
        problems: list[str] = self.job.result.problems
        return problems

    def status(self, waiting_for: int) -> tuple[Status, int]:
        """What this rank says, and its detail; ``waiting_for``: the rank that its thread exchanges with, or -1."""
        if not self.job.done:
            return Status.WORKING, 1 + waiting_for
        found = self.job.result
        if self.problems:
            broken = found is not None and found.broken
            return (Status.BROKEN if broken else Status.FAILED), 1 + (-1 if found is None else found.blamed)
        if self.moving is None:
            return Status.READY, found.digest
        return (Status.FAILED, 0) if found.stopped else (Status.READY, 0)

    def report(self, outcome: Outcome, reason: str, step: int, boundaries: int, *, received: int, expert_bytes: int) -> CycleReport:
        """The cycle is over, before step ``step``, after so many boundaries; this rank ``received`` experts of ``expert_bytes``."""
        planned = self.planned or Planned()
        return CycleReport(
            cycle=self.number, outcome=outcome, reason=reason, begun=self.begun, ended=step, boundaries=boundaries, batches=self.batch,
            of_batches=len(planned.batches), layers=tuple(sorted(self.layers)), received=received,
            received_bytes=received * expert_bytes, before=planned.before, after=planned.after,
        )  # fmt: skip
