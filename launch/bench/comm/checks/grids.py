"""The ranks of a grid as parties of the checks."""

from __future__ import annotations

from collections.abc import Sequence

from .....comm.dispatcher import Dispatcher, EPSpec
from .....comm.select import make_dispatcher
from .....comm.torch_node import TorchNodeDispatcher
from .....parallel.grid import Grid
from .party import Party


def over_grid(grid: Grid, backend: str, *, node_of: Sequence[int] | None = None) -> Party:
    """This rank among the expert ranks of ``grid``. ``node_of`` pretends nodes, for "torch_node"."""
    group = grid.ep
    nodes = tuple(node_of or grid.node_of)

    def make(spec: EPSpec) -> Dispatcher:
        if backend == "torch_node":
            return TorchNodeDispatcher(group, spec, nodes, grid.device)
        return make_dispatcher(backend, grid, spec)

    def gather(values: list[int]) -> list[list[int]]:
        found: list[list[int]] = group.gather_ints(values).tolist()
        return found

    return Party(backend=backend, rank=group.index, size=group.size, device=grid.device, make=make, gather=gather, node_of=nodes)
