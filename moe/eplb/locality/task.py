"""What a plan for few nodes a token is made from: load and choices of the same layers, on one machine."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import Floats
from ..planner.seats import Seats
from ..planner.static import check_room, checked_load
from ..topology import Ints, Topology
from .communities import blocks
from .nodes import Nodes
from .routing import Routing

TOKENS = 2048  # tokens that the search looks at: with fewer it learns the sample by heart, more take longer


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """Arguments of a plan, checked, and what follows from them."""

    load: Floats  # [layers, experts] float64
    sample: Routing  # choices of the last tokens, at most ``TOKENS``
    nodes: Nodes  # of the topology
    block: Ints  # [layers, experts] number of the block of experts that are placed together at first

    @classmethod
    def of(cls, load: Floats, routing: Routing, topology: Topology, *, weight: float, n_groups: int) -> Task:
        """The task; arguments as of ``plan_local``.

        Raises:
            ValueError: load, routing and topology do not fit each other, or a weight below zero.
        """
        load = checked_load(load)
        _check(load, routing, topology, weight, n_groups)
        nodes = Nodes.of(topology, load.shape[1])
        sample = routing.tokens(max(0, routing.n_tokens - TOKENS))
        return cls(load=load, sample=sample, nodes=nodes, block=blocks(load, routing, n_groups, nodes.n))


def _check(load: Floats, routing: Routing, topology: Topology, weight: float, n_groups: int) -> None:
    """ValueError: they do not fit each other."""
    if weight < 0 or n_groups < 1 or load.shape[1] % n_groups:
        raise ValueError(f"plan: weight {weight} must not be negative, and {n_groups} groups must divide {load.shape[1]} experts")
    if load.shape != (routing.n_layers, routing.n_experts):
        raise ValueError(
            f"plan: load of {load.shape[0]} layers x {load.shape[1]} experts, but routing of {routing.n_layers} x {routing.n_experts};"
            " both must be of the same layers"
        )
    check_room(Seats(topology=topology, n_experts=load.shape[1]))
