"""Policies: when they plan, from what, and whether steps wait for their moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from ..plan import Floats
from ..topology import Ints, Topology
from .published import published_plan
from .rules import POLICIES, Rules


class Policy(ABC):
    """Decides placements; a plan is asked for every interval."""

    name: str
    waits = True  # steps wait for its moves

    def __init__(self, topology: Topology, rules: Rules) -> None:
        self.topology, self.rules = topology, rules

    @abstractmethod
    def plan(self, load: Floats, steps: int, slots: Ints) -> tuple[Ints, str] | None:
        """The placement to move to and the reason, or None for none.

        Args:
            load: [layers, experts] counts of the last ``steps`` steps.
            steps: steps that it sums.
            slots: [layers, slots] what is placed.
        """


class NoPolicy(Policy):
    """Never plans."""

    name = "none"

    def plan(self, load: Floats, steps: int, slots: Ints) -> tuple[Ints, str] | None:  # noqa: D102
        return None


class Published(Policy):
    """The published algorithm."""

    name = "eplb"

    def plan(self, load: Floats, steps: int, slots: Ints) -> tuple[Ints, str] | None:  # noqa: D102
        return published_plan(load, self.topology, n_groups=self.rules.n_groups), "from nothing, at every interval"


class Static(Policy):
    """Ours, once."""

    name = "static"
    made = False

    def plan(self, load: Floats, steps: int, slots: Ints) -> tuple[Ints, str] | None:  # noqa: D102
        from ..api import make_plan

        if self.made:
            return None
        self.made = True
        found = make_plan(load, self.topology, objective=self.rules.objective, steps=float(steps), cost=self.rules.cost)
        return found.slot_to_expert, found.reason


class Incremental(Policy):
    """Ours, from what is placed, when it pays within the interval."""

    name = "incremental"

    def plan(self, load: Floats, steps: int, slots: Ints) -> tuple[Ints, str] | None:  # noqa: D102
        from ..api import make_plan

        # What a byte costs the steps is what the plan must weigh: beside the steps it is a part of the transfer's time.
        share = 1.0 if self.waits else max(self.rules.drag, 1e-9)
        cost = replace(self.rules.cost, copy_bytes_per_second=self.rules.cost.copy_bytes_per_second / share)
        found = make_plan(
            load,
            self.topology,
            previous=slots,
            objective=self.rules.objective,
            steps=float(steps),
            budget_bytes=self.rules.budget_bytes,
            horizon_steps=self.rules.interval,
            target=self.rules.target,
            cost=cost,
        )
        return found.slot_to_expert, found.reason


class Live(Incremental):
    """The same beside the steps."""

    name = "live"
    waits = False


_CLASSES: dict[str, type[Policy]] = {c.name: c for c in (NoPolicy, Published, Static, Incremental, Live)}
assert set(_CLASSES) == set(POLICIES)


def make_policy(name: str, topology: Topology, rules: Rules) -> Policy:
    """The policy of that name.

    Raises:
        ValueError: no such policy; the known are listed.
    """
    if name not in _CLASSES:
        raise ValueError(f"unknown policy {name!r}; known are: {', '.join(POLICIES)}")
    return _CLASSES[name](topology, rules)
