"""What became of a cycle, and counters over all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    """How a cycle ended."""

    ENDED = "ended"  # the new placement is in place
    DECLINED = "declined"  # nothing was to be moved
    ABORTED = "aborted"  # given up: what was committed stays, the rest is as before


@dataclass(frozen=True, kw_only=True)
class CycleReport:
    """One cycle. All but the numbers of this rank are the same on all ranks."""

    cycle: int  # from 1
    outcome: Outcome
    reason: str  # for a log
    begun: int  # step before which it began
    ended: int  # step before which it was over
    boundaries: int  # from its beginning to its end
    batches: int  # committed
    of_batches: int  # that were planned
    layers: tuple[int, ...]  # MoE layers that changed
    received: int  # experts that this rank received
    received_bytes: int
    before: float  # predicted imbalance, largest over mean load of a rank, mean over layers; 0: not known
    after: float  # the same once all is in place

    def line(self) -> str:
        """The report in one line."""
        head = f"cycle {self.cycle} of expert balancing {self.outcome.value} before step {self.ended} (begun before {self.begun})"
        if self.outcome is Outcome.DECLINED:
            return f"{head}: {self.reason}"
        done = f"{self.batches} of {self.of_batches} batches, {len(self.layers)} layers, {self.received} experts "
        done += f"({self.received_bytes / 1e6:.1f} MB) received here, imbalance {self.before:.3f} -> {self.after:.3f} predicted"
        return f"{head}: {done}; {self.reason}"


@dataclass(kw_only=True)
class LiveStats:
    """Counters of this rank since the start."""

    cycles: dict[str, int] = field(default_factory=lambda: {outcome.value: 0 for outcome in Outcome})
    batches: int = 0  # committed
    received: int = 0  # experts
    received_bytes: int = 0
    loaded: int = 0  # experts, by recovery
    last_commit: int = -1  # step before which the placement last changed

    def count(self, report: CycleReport) -> None:
        """Count a cycle that is over."""
        self.cycles[report.outcome.value] += 1
