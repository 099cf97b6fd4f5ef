"""What is the same for all policies of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..cost import CostModel

#: policies by name, with what they are
POLICIES = {
    "none": "experts in order, no replicas",
    "eplb": "the published EPLB algorithm, from nothing every interval; steps wait for its moves",
    "static": "one plan of rorqual from the first window, kept",
    "incremental": "rorqual's re-plan from what is placed, every interval; steps wait for its moves",
    "live": "the same plans, moved beside the steps and switched layer by layer",
}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When policies plan, and what moving costs."""

    interval: int = 100  # steps between plans
    window: int = 100  # steps before a plan whose counts it sees
    budget_bytes: int | None = None  # that all ranks together may receive for one re-plan (incremental, live); None: no limit
    bytes_per_step: int = 256 << 20  # that a rank receives beside one step (live): the default of the engine
    drag: float = 0.1  # part of the time of a live transfer by which it delays the steps
    rest_seconds: float = 0.0  # of a step outside of the experts: attention, dispatch, sampling
    plan_seconds: float = 0.0  # that steps wait for a plan, where they wait for its moves
    target: float = 1.02  # imbalance at which a re-plan is content
    objective: str = "tokens"  # of rorqual's plans: tokens, activated, seconds, slack
    n_groups: int = 1  # groups of experts, for the hierarchical mode of the published algorithm
    water: bool = False  # replicas are chosen by the load of the step (water filling) instead of evenly
    cost: CostModel = field(default_factory=CostModel)  # of experts and of moves

    def __post_init__(self) -> None:
        """ValueError: a value that makes no simulation."""
        if self.interval < 1 or self.window < 1:
            raise ValueError(f"simulate: interval and window must be at least one step, found {self.interval} and {self.window}")
        if self.n_groups < 1:
            raise ValueError(f"simulate: n_groups must be 1 (no groups) or more, found {self.n_groups}")
        if self.bytes_per_step < 1 or not 0 <= self.drag <= 1:
            raise ValueError(
                f"simulate: needs bytes_per_step above 0 and drag from 0 to 1, found {self.bytes_per_step} and {self.drag}; "
                "drag 0 is a transfer that no step feels, drag 1 one that they wait for"
            )
        if not (0 <= self.rest_seconds < float("inf") and 0 <= self.plan_seconds < float("inf")):
            raise ValueError(
                f"simulate: seconds must be finite and not negative, found rest {self.rest_seconds} and plan {self.plan_seconds}"
            )
