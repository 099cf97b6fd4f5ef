"""After ranks have failed: a placement on the survivors, and what of it has to come from disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..api import had_by_ranks, held_slots, make_plan
from ..cost import CostModel
from ..plan import Floats, Plan
from ..topology import Ints, Topology


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Where the experts of a plan on the survivors come from: a few from disk, the others from ranks that hold them."""

    failed: tuple[int, ...]  # ranks that hold nothing any more, those that had failed before included
    reloads: Ints  # [n, 3] layer, expert, and the rank that reads it from disk: experts that no survivor holds
    disk_bytes: Ints  # [ranks] that each rank reads from disk
    copied_bytes: Ints  # [ranks] that each rank receives from others, which have held the expert or have read it

    def text(self) -> str:
        """One line for a log."""
        readers = int((self.disk_bytes > 0).sum())
        return (
            f"without ranks {list(self.failed)}: {len(self.reloads)} experts are read from disk ({self.disk_bytes.sum() / 1e9:.3g} GB, "
            f"by {readers} ranks, {self.disk_bytes.max() / 1e9:.3g} GB at most), "
            f"{self.copied_bytes.sum() / 1e9:.3g} GB are copied between ranks"
        )


def recover(
    load: Floats,
    topology: Topology,
    *,
    previous: Plan | Ints,
    failed: Iterable[int],
    objective: str = "tokens",
    steps: float = 1.0,
    budget_bytes: int | None = None,
    horizon_steps: int | None = None,
    target: float = 1.02,
    coverage: str = "any",
    cost: CostModel | None = None,
) -> tuple[Plan, Recovery]:
    """Plan for the ranks that are left, with every expert on one of them.

    With ``budget_bytes=0`` only what is missing moves, which is the fastest way back to work; balance can follow by ``make_plan``.

    Args:
        load: [layers, experts].
        topology: as it was before.
        previous: what the slots held before.
        failed: ranks that have failed now.
        objective, steps, budget_bytes, horizon_steps, target, coverage, cost: as for ``make_plan``.

    Raises:
        ValueError: unknown ranks, or the survivors' slots are fewer than the experts.
    """
    survivors = topology.without(failed)
    plan = make_plan(
        load,
        survivors,
        previous=previous,
        objective=objective,
        steps=steps,
        budget_bytes=budget_bytes,
        horizon_steps=horizon_steps,
        target=target,
        coverage=coverage,
        cost=cost,
    )
    return plan, recovery_of(plan, previous)


def recovery_of(plan: Plan, previous: Plan | Ints) -> Recovery:
    """What a plan on survivors needs from disk, if ranks held ``previous`` before and those that the plan's topology calls failed are lost.

    An expert that comes to several ranks is read once, by that one of them which has the least to read.
    """
    topology, n_experts = plan.topology, plan.n_experts
    before = held_slots(previous, np.empty((plan.n_layers, n_experts)), topology)
    had = had_by_ranks(before, n_experts, topology)[:, :, :n_experts]
    now = had_by_ranks(plan.slot_to_expert, n_experts, topology)[:, :, :n_experts]
    missing = np.argwhere(~had.any(1))  # [n, 2]
    holders = now[missing[:, 0], :, missing[:, 1]]  # [n, ranks]
    reads = np.zeros(topology.n_ranks, dtype=np.int64)
    reader = np.zeros(len(missing), dtype=np.int64)
    for place in np.argsort(holders.sum(1), kind="stable"):  # those without a choice first
        reader[place] = np.where(holders[place], reads, np.iinfo(np.int64).max).argmin()
        reads[reader[place]] += 1
    arrivals = (now & ~had).sum((0, 2))
    return Recovery(
        failed=tuple(sorted(topology.failed)),
        reloads=np.column_stack([missing, reader]).astype(np.int64),
        disk_bytes=reads * plan.expert_bytes,
        copied_bytes=(arrivals - reads) * plan.expert_bytes,
    )
