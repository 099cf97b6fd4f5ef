"""The conformance checks of every backend, on two hops over shared memory between real processes."""

from __future__ import annotations

import os

import pytest
import torch

from rorqual.comm.dispatcher import Dispatcher, EPSpec
from rorqual.comm.heap.shm import ShmHeap
from rorqual.comm.node.dispatcher import NodeDispatcher
from rorqual.launch.bench.comm.checks import CORE, Party, applicable, run
from rorqual.parallel.grid import Grid, GridSpec
from tests.ranks import run_ranks


def checks(node_of: tuple[int, ...], core: bool) -> list[str]:
    grid = Grid.create(GridSpec(dp=int(os.environ["WORLD_SIZE"])), torch.device("cpu"), 60.0)
    group = grid.ep

    def make(spec: EPSpec) -> Dispatcher:
        return NodeDispatcher(group, spec, ShmHeap(group), node_of)

    party = Party(
        backend="shm_node", rank=group.index, size=group.size, device=grid.device, make=make,
        gather=lambda values: group.gather_ints(values).tolist(), node_of=node_of,
    )  # fmt: skip
    chosen = {name: check for name, check in applicable(party, False, brief=True).items() if not core or name in CORE}
    done = list(run(party, chosen))
    grid.close()
    return done


@pytest.mark.parametrize(("node_of", "core"), [((0, 1), False), ((0, 1, 0, 1), True), ((0, 0, 0, 1, 1, 1), True)])
def test_two_hops_conform(node_of: tuple[int, ...], core: bool) -> None:
    world = len(node_of)
    done = run_ranks(checks, world, node_of, core, timeout=200.0)
    assert len(done[0]) >= (4 if core else 17) and done == [done[0]] * world
