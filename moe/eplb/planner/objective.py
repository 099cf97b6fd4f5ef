"""What a planner makes small: the largest score of a layer's ranks, a score being tokens, activated experts or seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..cost import CostModel
from ..plan import Floats, replica_counts
from ..topology import Ints, Topology

OBJECTIVES = ("tokens", "activated", "seconds")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A rank's score is the larger of its components over its speed, a component being a sum over its slots.

    ``tokens`` is the token load. ``activated`` is the expected number of slots that get a token at all: where experts are bound by
    reading weights, this and not the tokens is the time (METRO, arXiv 2512.09277). ``seconds`` is the larger of both as the cost model
    prices them. Loads are routed choices of one step, and a replica gets a Poisson number of them: exact in the limit of many tokens,
    each with a small chance of this replica.
    """

    kind: str = "tokens"  # one of OBJECTIVES
    cost: CostModel = CostModel()  # prices of "seconds"

    def __post_init__(self) -> None:
        """ValueError: unknown objective."""
        if self.kind not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, found {self.kind!r}")

    def values(self, load: Floats, counts: Ints | Floats) -> Floats:
        """[components, ...] score of one of ``counts`` replicas of experts with ``load`` [...]; not yet over a rank's speed."""
        each = load / counts
        if self.kind == "tokens":
            return each[None]
        if self.kind == "activated":
            return activation(each)[None]
        return np.stack([each * self.cost.token_seconds, activation(each) * self.cost.expert_seconds])

    def mean(self, load: Floats, topology: Topology) -> Floats:
        """[layers] score that all usable ranks would have at best: one replica of each expert, shared out evenly."""
        best: Floats = self.values(load, np.ones(())).sum(-1).max(0) / topology.alive.sum()
        return best

    def scores(self, slot_to_expert: Ints, load: Floats, topology: Topology, split: Floats | None = None) -> Floats:
        """[layers, ranks] score of each rank.

        Args:
            slot_to_expert: [layers, slots], -1: empty.
            load: [layers, experts] routed choices of one step.
            topology: of the slots.
            split: [layers, slots] routed choices that each slot gets; None: an expert's are split evenly over its slots.
        """
        if split is None:
            values = self.values(load, np.maximum(replica_counts(slot_to_expert, load.shape[1]), 1))
            each = np.where(slot_to_expert < 0, 0.0, values[:, np.arange(len(load))[:, None], slot_to_expert])
        else:
            each = self.values(split, np.ones(()))
        found: Floats = np.add.reduceat(each, topology.first_slot[:-1], axis=-1).max(0) / topology.speed
        return found


def activation(tokens: Floats) -> Floats:
    """[...] chance that a replica which expects so many tokens [...] of a step gets one or more: 1 - exp(-tokens)."""
    chance: Floats = -np.expm1(-tokens)
    return chance


def step_seconds(slot_to_expert: Ints, load: Floats, topology: Topology, cost: CostModel, split: Floats | None = None) -> Floats:
    """[layers] predicted seconds of each layer's experts in one step. Arguments as of ``Objective.scores``.

    The cost model's prices are those of a rank of mean speed.
    """
    slowest: Floats = Objective(kind="seconds", cost=cost).scores(slot_to_expert, load, topology, split).max(-1)
    return cost.fixed_seconds + slowest
