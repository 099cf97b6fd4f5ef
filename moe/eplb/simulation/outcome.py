"""What a policy made of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..metrics import balance
from ..plan import Floats
from ..topology import Ints, Topology
from ..trace import PHASES


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One plan of a policy."""

    step: int  # before which it was made
    layers: int  # that it changes
    experts: int  # that ranks must receive
    bytes: int  # of them
    planned_seconds: float  # wall time of the planner, on the machine that simulates
    reason: str  # in words


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A trace under one policy. Times include what moving costs."""

    policy: str  # name
    topology: Topology  # the machine
    seconds: Floats  # [steps] of the steps
    moving: Floats  # [steps] part of it that moves and plans took
    moved_bytes: Ints  # [steps] that arrived during each step
    imbalance: Floats  # [steps, layers] largest over mean of the ranks' loads
    rank_loads: Floats  # [layers, ranks] of all steps together
    slots: Ints  # [layers, slots] placement at the end
    decisions: tuple[Decision, ...]  # plans, in order
    tokens: Floats | None  # [steps] tokens of the steps, where the trace tells
    phase: Ints | None  # [steps] index into PHASES, where the trace tells

    @property
    def mean_seconds(self) -> float:
        """Of a step."""
        return float(self.seconds.mean())

    @property
    def tokens_per_second(self) -> float | None:
        """Over the whole trace; None where it does not tell tokens."""
        return None if self.tokens is None else float(self.tokens.sum() / self.seconds.sum())

    def by_phase(self) -> dict[str, float]:
        """Mean seconds of a step of each phase; empty where the trace has none."""
        if self.phase is None:
            return {}
        return {PHASES[p]: float(self.seconds[self.phase == p].mean()) for p in np.unique(self.phase).tolist()}

    def summary(self) -> dict[str, Any]:
        """Figures, for JSON and tables: of the whole trace, and of its second half, when first plans are long made."""
        half = len(self.seconds) // 2
        return {
            "policy": self.policy,
            "step_ms": 1e3 * self.mean_seconds,
            "step_ms_p99": 1e3 * float(np.quantile(self.seconds, 0.99)),
            "step_ms_second_half": 1e3 * float(self.seconds[half:].mean()),
            "step_ms_by_phase": {phase: 1e3 * seconds for phase, seconds in self.by_phase().items()},
            "tokens_per_second": self.tokens_per_second,
            "imbalance": float(self.imbalance.mean()),
            "imbalance_second_half": float(self.imbalance[half:].mean()),
            "moving_share": float(self.moving.sum() / self.seconds.sum()),
            "moved_bytes": int(self.moved_bytes.sum()),
            "moved_experts": sum(d.experts for d in self.decisions),
            "plans": len(self.decisions),
            "plans_that_moved": sum(d.experts > 0 for d in self.decisions),
            "plan_ms_measured": 1e3 * float(np.mean([d.planned_seconds for d in self.decisions])) if self.decisions else None,
            "balance_of_all_steps": balance(self.rank_loads, self.topology).as_dict(),
        }
