"""Replays a trace under a policy: every step is played on what is placed, and moves are charged to the steps that pay for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from ..assess import arrivals
from ..plan import Floats, rank_loads
from ..topology import Ints, Topology
from ..trace import LoadTrace
from ..validate import check_complete
from .outcome import Decision, Outcome
from .policies import Policy, make_policy
from .rules import Rules
from .step import Dispatch, even, floor_seconds, in_order, step_cost
from .transfer import Part, Transfer


def simulate(
    trace: LoadTrace,
    topology: Topology,
    policies: Sequence[str] = ("none", "eplb", "static", "incremental", "live"),
    *,
    rules: Rules | None = None,
    start: Ints | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[Outcome]:
    """The trace under each policy.

    All policies begin with the same placement, and see the same counts: those of the last ``rules.window`` steps, every
    ``rules.interval`` steps.

    Args:
        trace: of two steps or more.
        topology: slots, ranks, nodes.
        policies: names of ``POLICIES``.
        rules: when they plan and what moving costs; None: the defaults.
        start: [layers, slots] placement at the first step; None: experts in order, spare slots empty.
        progress: called with 1 after every step of every policy.

    Raises:
        ValueError: an unknown policy, a trace that is too short, or a machine on which the experts or a policy do not fit.
    """
    rules = rules or Rules()
    if trace.n_steps <= rules.interval:
        raise ValueError(
            f"simulate: the trace has {trace.n_steps} steps and the first plan is made after {rules.interval}; record more steps, or "
            "take a shorter interval"
        )
    made = [make_policy(name, topology, rules) for name in policies]
    if start is None:
        start = in_order(len(trace.layer_ids), trace.n_experts, topology)
    if start.shape != (len(trace.layer_ids), topology.n_slots):
        raise ValueError(
            f"simulate: the first placement has shape {start.shape}; the trace's layers and the machine's slots need "
            f"{(len(trace.layer_ids), topology.n_slots)}"
        )
    check_complete(start, trace.n_experts, topology, "simulate: the first placement")
    return [_Replay(trace, topology, policy, rules, start).run(progress) for policy in made]


def floor(trace: LoadTrace, topology: Topology, rules: Rules) -> float:
    """Mean seconds of a step with perfect balance and no moves: no policy is faster."""
    return rules.rest_seconds + float(np.mean([floor_seconds(counts, topology, rules.cost) for counts in trace.counts]))


def dispatch_of(rules: Rules) -> Dispatch:
    """How the tokens of an expert are split over its replicas."""
    return Water() if rules.water else even


class Water:
    """Water filling, with what it needs of a placement kept until the placement changes."""

    def __init__(self) -> None:
        self._slots: Ints | None = None

    def __call__(self, counts: Ints, slots: Ints, topology: Topology) -> Floats:
        """[layers, slots] tokens of every slot."""
        from ..choice.water import WaterFill

        if self._slots is None or not np.array_equal(self._slots, slots):
            self._slots = slots.copy()
            self._filling = WaterFill(slots, counts.shape[1], topology)
        split: Floats = self._filling.fill(counts).split
        return split


def tokens_of(trace: LoadTrace) -> Floats | None:
    """[steps] tokens of the steps: as recorded, or from the counts where the choices of a token are known."""
    if trace.tokens is not None:
        return trace.tokens.astype(np.float64)
    if trace.top_k is None:
        return None
    tokens: Floats = trace.counts.sum(2).max(1) / trace.top_k
    return tokens


class _Replay:
    """One policy's way through a trace."""

    def __init__(self, trace: LoadTrace, topology: Topology, policy: Policy, rules: Rules, start: Ints) -> None:
        self.trace, self.topology, self.policy, self.rules = trace, topology, policy, rules
        self.slots = start.copy()
        self.transfer: Transfer | None = None  # what travels beside the steps
        self.decisions: list[Decision] = []
        self.dispatch = dispatch_of(rules)

    def run(self, progress: Callable[[int], object] | None) -> Outcome:
        """Play all steps."""
        steps, layers = self.trace.n_steps, len(self.trace.layer_ids)
        seconds, moving, moved = np.zeros(steps), np.zeros(steps), np.zeros(steps, dtype=np.int64)
        imbalance, loads = np.ones((steps, layers)), np.zeros((layers, self.topology.n_ranks))
        for step in range(steps):
            if step and step % self.rules.interval == 0:
                moving[step], moved[step] = self._plan(step)
            part = None if self.transfer is None else self.transfer.advance(self.rules.bytes_per_step)
            if part is not None:
                moving[step] = self.rules.drag * part.bytes_of_a_rank / self.rules.cost.copy_bytes_per_second
                moved[step] = part.bytes
            found = step_cost(self.trace.counts[step], self.slots, self.topology, self.rules.cost, self.dispatch)
            seconds[step] = self.rules.rest_seconds + found.seconds + moving[step]
            imbalance[step] = found.imbalance
            loads += found.tokens
            if part is not None:
                self._switch(part)
            if progress is not None:
                progress(1)
        return Outcome(
            policy=self.policy.name,
            topology=self.topology,
            seconds=seconds,
            moving=moving,
            moved_bytes=moved,
            imbalance=imbalance,
            rank_loads=loads,
            slots=self.slots,
            decisions=tuple(self.decisions),
            tokens=tokens_of(self.trace),
            phase=self.trace.phase,
        )

    def _plan(self, step: int) -> tuple[float, int]:
        """Ask the policy; (seconds that the step waits, bytes that arrive in it)."""
        if self.transfer is not None:
            return 0.0, 0  # the last plan is still on its way
        first = max(0, step - self.rules.window)
        began = time.perf_counter()
        load = self.trace.counts[first:step].sum(0).astype(np.float64)
        asked = self.policy.plan(load, step - first, self.slots)
        took = time.perf_counter() - began
        if asked is None:
            return 0.0, 0
        new, reason = asked
        coming = arrivals(self.slots, new, self.trace.n_experts, self.topology)
        experts, size = int(coming.sum()), int(coming.sum()) * self.rules.cost.expert_bytes
        changed = int((new != self.slots).any(1).sum())
        self.decisions.append(Decision(step=step, layers=changed, experts=experts, bytes=size, planned_seconds=took, reason=reason))
        if self.policy.waits:
            self.slots = new
            return self.rules.plan_seconds + self.rules.cost.move_seconds(coming), size
        if changed:
            self.transfer = Transfer(new, coming, order=self._order(new, coming, load), expert_bytes=self.rules.cost.expert_bytes)
        return 0.0, 0

    def _order(self, new: Ints, coming: Ints, load: Floats) -> list[int]:
        """Layers that change, those first that relieve their busiest rank most for what it takes to send them."""
        relief = rank_loads(self.slots, load, self.topology).max(1) - rank_loads(new, load, self.topology).max(1)
        changed = np.flatnonzero((new != self.slots).any(1))
        worth = relief[changed] / np.maximum(coming.max(1)[changed], 0.5)
        order: list[int] = changed[np.argsort(-worth, kind="stable")].tolist()
        return order

    def _switch(self, part: Part) -> None:
        """Layers whose last byte came during the step are used from the next one on."""
        assert self.transfer is not None
        for layer in part.arrived:
            self.slots[layer] = self.transfer.slots[layer]
        if self.transfer.done:
            self.transfer = None
