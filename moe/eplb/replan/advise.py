"""How many spare slots a load needs, and what they cost in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..api import make_plan
from ..cost import CostModel
from ..plan import Floats
from ..planner.static import checked_load
from ..topology import Topology
from .coverage import losses

_MORE = 4  # slots a rank above the fewest possible that are tried


@dataclass(frozen=True, kw_only=True)
class Option:
    """One number of slots, planned for."""

    slots: int  # of a layer, all ranks together
    spare: int  # above one for each expert
    imbalance: float  # mean over layers: the time of all layers is a sum
    worst: float  # of the worst layer
    bound: float  # mean over layers of what no placement betters
    seconds: float  # predicted, of one step
    rank_bytes: int  # experts of the fullest rank, all layers
    spare_bytes: int  # spare slots of all ranks and layers
    lost: int  # experts of all layers that the worst single rank takes with it
    pareto: bool  # no other option needs as little memory on the fullest rank and is better balanced, or the reverse


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Options by memory, and the one to take."""

    options: tuple[Option, ...]  # fewest slots first
    target: float  # imbalance that was asked for
    chosen: Option | None  # the least memory on the fullest rank that meets the target, and of these the best balanced; None: none meets it

    def text(self) -> str:
        """A table."""
        lines = ["slots  spare  imbalance   worst   bound  ms/step  GB/rank  spare GB  lost with a rank"]
        for one in self.options:
            mark = ("<- " if one is self.chosen else "") + ("*" if one.pareto else "")
            lines.append(
                f"{one.slots:5d} {one.spare:6d} {one.imbalance:10.4f} {one.worst:7.4f} {one.bound:7.4f} {one.seconds * 1e3:8.3f} "
                f"{one.rank_bytes / 1e9:8.2f} {one.spare_bytes / 1e9:9.2f} {one.lost:17d}  {mark}".rstrip()
            )
        best = min(self.options, key=lambda one: one.imbalance)
        lines.append(
            f"* nothing with as little memory is better balanced; <- the least memory for imbalance {self.target}"
            if self.chosen
            else f"none of these reaches imbalance {self.target}: the best is {best.imbalance:.4f} with {best.slots} slots"
        )
        return "\n".join(lines)


def advise(
    load: Floats,
    *,
    n_ranks: int,
    n_nodes: int = 1,
    target: float = 1.02,
    slots: Iterable[int] | None = None,
    coverage: str = "any",
    steps: float = 1.0,
    cost: CostModel | None = None,
) -> Advice:
    """Plan for several numbers of slots and choose the least memory that reaches the target.

    Args:
        load: [layers, experts] routed choices.
        n_ranks, n_nodes: of the machine.
        target: mean imbalance over the layers that is enough.
        slots: numbers of slots to try. None: equal ranks, from the fewest slots that hold all experts to four more on each rank: ranks all
            have the same memory, so a number between gives memory away on some.
        coverage: as for ``make_plan``.
        steps: that the load sums over.
        cost: of experts and tokens.

    Raises:
        ValueError: no number of slots to try, or one that is fewer than experts or ranks.
    """
    load, cost = checked_load(load), cost or CostModel()
    if n_ranks < 1 or not target >= 1:
        raise ValueError(f"advise: needs one rank or more and a target of 1 or more, found n_ranks={n_ranks} and target={target}")
    fewest = -(-load.shape[1] // n_ranks)
    tried = sorted(set(slots)) if slots is not None else [n_ranks * each for each in range(fewest, fewest + _MORE + 1)]
    if not tried:
        raise ValueError("advise: slots names no number to try; leave it out for equal ranks")
    found = [_option(load, Topology.even(n_slots=n, n_ranks=n_ranks, n_nodes=n_nodes), coverage, steps, cost) for n in tried]
    options = tuple(replace(one, pareto=_undominated(one, found)) for one in found)
    enough = [one for one in options if one.imbalance <= target]
    chosen = min(enough, key=lambda one: (one.rank_bytes, one.imbalance, one.slots)) if enough else None
    return Advice(options=options, target=target, chosen=chosen)


def _option(load: Floats, topology: Topology, coverage: str, steps: float, cost: CostModel) -> Option:
    plan = make_plan(load, topology, coverage=coverage, steps=steps, cost=cost)
    return Option(
        slots=topology.n_slots,
        spare=topology.n_slots - plan.n_experts,
        imbalance=float(plan.imbalance.mean()),
        worst=float(plan.imbalance.max()),
        bound=float(plan.bound.mean()),
        seconds=plan.seconds,
        rank_bytes=max(topology.slots) * plan.n_layers * cost.expert_bytes,
        spare_bytes=(topology.n_slots - plan.n_experts) * plan.n_layers * cost.expert_bytes,
        lost=losses(plan.slot_to_expert, plan.n_experts, topology).worst_rank,
        pareto=False,
    )


def _undominated(one: Option, others: list[Option]) -> bool:
    """Whether nothing is at least as good in memory and balance, and better in one of them."""
    mine = (one.rank_bytes, one.imbalance)
    theirs = [(other.rank_bytes, other.imbalance) for other in others]
    return not any(a <= mine[0] and b <= mine[1] and (a, b) != mine for a, b in theirs)
