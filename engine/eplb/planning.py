"""What the first expert rank does with the summed load: measure it, and plan. Runs in the worker's thread, beside the steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...moe.eplb.assess import assess
from ...moe.eplb.cost import CostModel
from ...moe.eplb.metrics import balance
from ...moe.eplb.plan import Floats, Plan, rank_loads
from ...moe.eplb.topology import Ints, Topology
from ..eplb_settings import EPLBSettings

log = logging.getLogger("rorqual")


@dataclass(frozen=True, kw_only=True)
class Look:
    """The load of the ranks as one look found it, under the placement of that time. Tokens are choices of one step."""

    steps: int  # steps that the window covers
    avg_tokens: float  # of a rank, summed over the layers
    max_tokens: float  # of the busiest rank of each layer, summed over the layers
    balancedness: float  # avg_tokens / max_tokens, as vLLM has it
    imbalance: float  # mean over layers of largest over mean
    worst: float  # of the worst layer
    predicted: float | None = None  # ``imbalance`` that the last plan had promised; None: it left all as it was, or there was none

    def summary(self) -> str:
        """For a log line."""
        said = "" if self.predicted is None else f", {self.predicted:.3f} was promised"
        return (
            f"avg {self.avg_tokens:.1f} and max {self.max_tokens:.1f} tokens a rank and step over {self.steps} steps, "
            f"balancedness {self.balancedness:.3f}, largest over mean {self.imbalance:.3f} (worst layer {self.worst:.3f}){said}"
        )


def take_look(load: Floats, slots: Ints, topology: Topology, steps: int, predicted: float | None = None) -> Look:
    """Measure load [layers, experts] of ``steps`` steps under the map ``slots`` [layers, slots].

    Raises:
        ValueError: nothing was routed.
    """
    loads = rank_loads(slots, load, topology)
    found = balance(loads, topology)
    per = 1.0 / max(steps, 1)
    return Look(
        steps=steps,
        avg_tokens=float(loads.mean(1).sum()) * per,
        max_tokens=float(loads.max(1).sum()) * per,
        balancedness=found.means_over_maxima,
        imbalance=found.imbalance,
        worst=found.worst,
        predicted=predicted,
    )


class Planner:
    """Called with the load that all ranks summed and the map that is in force; keeps what it saw for reports."""

    def __init__(self, settings: EPLBSettings, topology: Topology, cost: CostModel, *, window_steps: Callable[[], int]) -> None:
        """``window_steps``: steps that the load covers."""
        self._settings, self._topology, self._cost = settings, topology, cost
        self._window_steps = window_steps
        self._random = np.random.default_rng(settings.seed)
        self._promised: float | None = None
        self.looks = 0
        self.last: Look | None = None

    def __call__(self, load: Floats, previous: Ints) -> Plan:
        """The next placement; all layers are kept where nothing pays."""
        load = np.asarray(load, dtype=np.float64)
        steps = max(1, self._window_steps())
        if not load.any():
            return self._stay(load, previous, steps, "no token was routed in the window")
        self.last = take_look(load, previous, self._topology, steps, self._promised)
        if self._settings.log_balancedness and self.looks % self._settings.log_balancedness_interval == 0:
            log.info("EPLB: %s", self.last.summary())
        self.looks += 1
        plan = self._at_random(load, previous, steps) if self._settings.policy == "random" else self._best(load, previous, steps)
        self._promised = None if plan.kept.all() else float(plan.imbalance.mean())
        return plan

    def _best(self, load: Floats, previous: Ints, steps: int) -> Plan:
        from ...moe.eplb.api import make_plan

        settings = self._settings
        return make_plan(
            load, self._topology, previous=previous, objective=settings.objective, steps=steps, horizon_steps=settings.horizon,
            target=settings.target, cost=self._cost,
        )  # fmt: skip

    def _at_random(self, load: Floats, previous: Ints, steps: int) -> Plan:
        """A valid placement that has nothing to do with the load: in some layers a few slots change, or all of them."""
        slots, random = previous.copy(), self._random
        for layer in np.flatnonzero(random.random(len(slots)) < 0.5):
            row, every = slots[layer], random.random() < 0.1
            chosen = np.arange(len(row)) if every else random.choice(len(row), min(len(row), 4), replace=False)
            held = row[chosen]
            for place in np.flatnonzero(random.random(len(held)) < 0.5):  # where another copy stays, a slot may get anything, or nothing
                others = np.concatenate([np.delete(row, chosen), np.delete(held, place)])
                if held[place] < 0 or held[place] in others:
                    held[place] = random.integers(-1, load.shape[1])
            row[chosen] = random.permutation(held)
        kept = (slots == previous).all(1).astype(np.int64)
        return assess(
            slots, load, self._topology, cost=self._cost, steps=steps, previous=previous, kept=kept, reason="at random, for a test"
        )

    def _stay(self, load: Floats, previous: Ints, steps: int, reason: str) -> Plan:
        kept = np.ones(len(previous), dtype=np.int64)
        return assess(previous, load, self._topology, cost=self._cost, steps=steps, previous=previous, kept=kept, reason=reason)
