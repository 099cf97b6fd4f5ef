"""Groups, dispatchers and the pipeline over NCCL: the same checks as on the CPU, in brief."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from rorqual.comm.base import BaseDispatcher
from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.local import LocalDispatcher
from rorqual.comm.torch_flat import TorchDispatcher
from rorqual.comm.torch_node import TorchNodeDispatcher
from rorqual.comm.torch_static import TorchStaticDispatcher
from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.pipeline import Pipe
from tests.comm.routing import KINDS, exact, make_tokens, whole_trip
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SPEC = EPSpec(n_ranks=1, n_slots=8, hidden=136, top_k=3, max_tokens=40)


def trips(dispatcher: BaseDispatcher, rank: int, device: torch.device) -> None:
    """Every routing: 1e-6 from fp64; the bits of one rank if deterministic."""
    spec = dispatcher.spec
    for number, kind in enumerate(KINDS):
        n = 0 if number % 4 == 3 and rank == 0 else 11 + rank
        x, ids, weights = (t.to(device) for t in make_tokens(rank, n, spec, kind, number))
        out = whole_trip(dispatcher, rank, x, ids, weights)
        alone = whole_trip(LocalDispatcher(replace(spec, n_ranks=1)), 0, x, ids, weights)
        assert out.device == device and out.dtype == x.dtype
        if spec.deterministic:
            assert torch.equal(out, alone), (type(dispatcher).__name__, kind)
        if n and spec.payload == "native" and spec.dtype == "float32":
            assert (out.double() - exact(x, ids, weights)).abs().max().item() < 2e-6, (type(dispatcher).__name__, kind)


def test_local() -> None:
    device = torch.device("cuda", 0)
    for deterministic in (False, True):
        trips(LocalDispatcher(replace(SPEC, deterministic=deterministic)), 0, device)
        trips(LocalDispatcher(replace(SPEC, deterministic=deterministic, payload="fp8", dtype="bfloat16")), 0, device)


def over_nccl() -> list[Any]:
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    world = int(os.environ["WORLD_SIZE"])
    grid = Grid.create(GridSpec(dp=world), device, 60.0)
    group = grid.ep
    assert group.all_reduce(torch.full((5,), 1.0 + rank, device=device)).tolist() == [world * (world + 1) / 2] * 5
    x = torch.full((rank + 1, 3), float(rank), device=device).bfloat16()
    sizes = [r + 1 for r in range(world)]
    assert group.all_gather_uneven(x, sizes)[:, 0].tolist() == [float(r) for r in range(world) for _ in range(r + 1)]
    assert group.broadcast(torch.full((2,), float(rank), device=device), world - 1).tolist() == [world - 1.0] * 2
    assert group.gather_ints([rank]).tolist() == [[r] for r in range(world)] and group.broadcast_bytes(b"plan", 0) == b"plan"
    for deterministic in (False, True):
        for changes in ({}, {"payload": "fp8"}, {"dtype": "bfloat16"}):
            spec = replace(SPEC, n_ranks=world, deterministic=deterministic, **changes)
            node = TorchNodeDispatcher(group, spec, tuple(range(world)), device)
            for dispatcher in (TorchDispatcher(group, spec), node, TorchStaticDispatcher(group, spec)):
                trips(dispatcher, rank, device)
    pipe = Pipe(grid.world)
    if rank % 2 == 0:
        pipe.send_async(torch.full((4, 2), float(rank), device=device), rank + 1)
    else:
        assert pipe.recv((4, 2), torch.float32, rank - 1, device).tolist() == [[rank - 1.0] * 2] * 4
    pipe.drain()
    torch.cuda.synchronize()
    grid.close()
    return [rank]


def test_over_nccl() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    world = torch.cuda.device_count() // 2 * 2
    assert run_ranks(over_nccl, world, timeout=180.0) == [[r] for r in range(world)]
