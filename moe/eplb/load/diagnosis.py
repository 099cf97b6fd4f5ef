"""Whether balancing would help, before it is switched on: is the imbalance real, does it last, and what would cure it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..metrics import Balance, balance
from ..plan import rank_loads
from ..topology import Ints, Topology
from ..trace import LoadTrace
from .persistence import Persistence, persistence
from .views import busy

Floats = npt.NDArray[np.float64]

#: excess of the largest rank over the mean from which balancing is worth a look
_WORTH = 0.05


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Balance of one placement under one trace, and what it says. Steps without tokens are left out."""

    steps: int  # steps with tokens
    idle_steps: int  # steps without, left out
    ranks: Balance  # of ranks, over layers and steps
    experts: Balance  # of experts, over layers and steps
    total: Balance  # of ranks, for the whole trace together: what a placement can cure
    chance: float  # imbalance of ranks per step if all experts were equally popular: what no placement can cure
    persistence: Persistence | None  # None: too few steps
    needs_replicas: Ints  # [layers] experts whose load is more than a rank's mean load: no arrangement without replicas balances them
    verdict: tuple[str, ...]  # sentences


def diagnose(trace: LoadTrace, topology: Topology, slot_to_expert: Ints | None = None, *, seed: int = 0) -> Diagnosis:
    """Look at a trace under a placement [layers, slots]; None: slot s holds expert s, without replicas.

    Raises:
        ValueError: nothing was routed, or the placement does not fit.
    """
    whole, trace = trace, busy(trace)
    if trace.n_steps == 0:
        raise ValueError(f"diagnosis: none of the {whole.n_steps} steps routed anything")
    layers, experts = len(trace.layer_ids), trace.n_experts
    if slot_to_expert is None:
        if topology.n_slots != experts:
            raise ValueError(f"diagnosis: {topology.n_slots} slots and {experts} experts: give the placement, or as many slots as experts")
        slot_to_expert = np.tile(np.arange(experts), (layers, 1))
    loads = np.stack([rank_loads(slot_to_expert, counts.astype(np.float64), topology) for counts in trace.counts])
    total = trace.total.astype(np.float64)
    usable = topology.n_ranks - len(topology.failed)
    mean_rank = total.sum(1, keepdims=True) / usable
    ranks, together = balance(loads, topology), balance(loads.sum(0), topology)
    try:
        lasting = persistence(trace)
    except ValueError:
        lasting = None
    chance = _chance(trace, topology, slot_to_expert, np.random.default_rng(seed))
    replicas = (total > mean_rank).sum(1)
    return Diagnosis(
        steps=trace.n_steps,
        idle_steps=whole.n_steps - trace.n_steps,
        ranks=ranks,
        experts=balance(trace.counts),
        total=together,
        chance=chance,
        persistence=lasting,
        needs_replicas=replicas,
        verdict=_verdict(ranks, together, chance, lasting, replicas),
    )


def _chance(trace: LoadTrace, topology: Topology, slot_to_expert: Ints, rng: np.random.Generator) -> float:
    """Mean imbalance of ranks per step of equally popular experts, with the trace's numbers of choices; at most 64 steps are drawn."""
    n_experts = trace.n_experts
    steps = np.unique(np.linspace(0, trace.n_steps - 1, 64).astype(int))
    even = np.full(n_experts, 1.0 / n_experts)
    found = []
    for step in steps:
        choices = trace.counts[step].sum(1)
        drawn = rng.multinomial(choices, even).astype(np.float64)
        found.append(rank_loads(slot_to_expert, drawn, topology))
    return balance(np.stack(found), topology).imbalance


def _verdict(ranks: Balance, total: Balance, chance: float, lasting: Persistence | None, replicas: Ints) -> tuple[str, ...]:
    """What the numbers say, in sentences."""
    said = [f"The busiest rank has {ranks.imbalance:.3f} times the mean of a step; with equally popular experts it would be {chance:.3f}."]
    if ranks.imbalance - chance < _WORTH:
        return (*said, "This is what chance makes: balancing cannot help.")
    if total.imbalance - 1.0 < _WORTH:
        said.append(f"Over the whole trace it is {total.imbalance:.3f}: experts are hot in turns, which no fixed placement cures.")
    if lasting is not None:
        overlap = float(lasting.mean_overlap[0])
        lasts = overlap > (1.0 + lasting.chance) / 2
        said.append(
            f"Of the {lasting.hot} hottest experts of a layer {overlap:.0%} are hot again {lasting.window} steps later "
            f"(chance: {lasting.chance:.0%}): {'they last, so a placement made now helps later' if lasts else 'they change quickly'}."
        )
    if int(replicas.sum()):
        said.append(
            f"{int((replicas > 0).sum())} layers have experts above a rank's mean load ({int(replicas.max())} at most): "
            "they need replicas, moving experts alone is not enough."
        )
    else:
        said.append("No expert alone exceeds a rank's mean load: moving experts helps without replicas.")
    return tuple(said)
