"""The checks of every backend over CUDA tensors: two and four processes on one GPU, and one process a GPU."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from rorqual.comm.heap.symm import ONE_GPU
from rorqual.launch.bench.comm.checks import CORE, applicable, run
from rorqual.launch.bench.comm.checks.grids import over_grid
from rorqual.parallel.grid import Grid, GridSpec
from tests.comm.killing import going_on, until_failure
from tests.ranks import collect_ranks, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHARED = {ONE_GPU: "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def all_checks(backend: str, world: int, shared: bool, much: str) -> list[str]:
    """The checks that apply; their names. ``much``: "all", "brief" or "core"."""
    device = torch.device("cuda", 0 if shared else int(os.environ["RANK"]))
    grid = Grid.create(GridSpec(dp=world), device, 60.0)
    party = over_grid(grid, backend)
    checks = applicable(party, backend in ("symm", "nvshmem"), brief=much != "all")
    record: dict[str, Any] = run(party, {name: check for name, check in checks.items() if much != "core" or name in CORE})
    grid.close()
    return list(record)


@pytest.mark.parametrize(("world", "much"), [(2, "brief"), (4, "core")])
def test_ranks_on_one_gpu(world: int, much: str) -> None:
    done = run_ranks(all_checks, world, "symm", world, True, much, timeout=240.0, env=SHARED)
    assert len(done[0]) >= len(CORE) and done == [done[0]] * world


@pytest.mark.parametrize(("backend", "much"), [("symm", "all"), ("torch", "brief"), ("torch_static", "brief")])
def test_one_rank_a_gpu(backend: str, much: str) -> None:
    world = torch.cuda.device_count()
    if world < 2:
        pytest.skip("needs two CUDA devices")
    done = run_ranks(all_checks, world, backend, world, False, much, timeout=240.0)
    assert len(done[0]) >= 17 and done == [done[0]] * world


@pytest.mark.parametrize("shared", [True, False])
def test_a_killed_rank_is_reported_or_done_without(shared: bool) -> None:
    """On one GPU three processes, on two GPUs one each."""
    world = 3 if shared else 2
    if not shared and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    env = SHARED if shared else {}
    for seed, ways in ((1, until_failure), (4, going_on)):
        exits = collect_ranks(ways, world, seed, "symm", world, 3000, shared, timeout=90.0, env=env)
        victim = seed % world
        survivors = [e for e in exits if e.rank != victim]
        assert exits[victim].code == -signal.SIGKILL and all(e.code == 0 for e in survivors), [e.error or e.stderr for e in exits]
        if ways is until_failure:
            assert victim in [e.result[0] for e in survivors] and all(e.result[2] < 10 for e in survivors), [e.result for e in survivors]
        else:
            assert all(e.result == ([rank != victim for rank in range(world)], 8) for e in survivors), [e.result for e in survivors]
