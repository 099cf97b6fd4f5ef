"""Symmetric memory of GPUs: two processes on one GPU, and one each on two. The twins run over it, so no kernel can hide a fault."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.heap.symm import ONE_GPU, SymmHeap
from rorqual.comm.ops import PeerOps
from rorqual.comm.peer import PeerDispatcher
from rorqual.comm.wire import workspace_bytes
from rorqual.parallel.grid import Grid, GridSpec
from tests.comm.routing import KINDS, exact, make_tokens, run_experts
from tests.ranks import collect_ranks, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SPEC = EPSpec(n_ranks=2, n_slots=8, hidden=136, top_k=3, max_tokens=40, timeout_ms=20_000)
SHARED = {ONE_GPU: "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def place(shared: bool) -> torch.device:
    return torch.device("cuda", 0 if shared else int(os.environ["RANK"]))


def trip(dispatcher: PeerDispatcher, rank: int, kind: str, seed: int) -> None:
    """One dispatch and combine against fp64."""
    spec, device = dispatcher.spec, dispatcher.device
    x, ids, weights = (t.to(device) for t in make_tokens(rank, 11 + rank, spec, kind, seed))
    routed = dispatcher.dispatch(x, ids, weights)
    counts = torch.tensor(routed.host_counts())
    n = int(counts.sum())
    y = torch.zeros_like(routed.x)
    y[:n] = run_experts(routed.x[:n], counts, spec, rank)
    out = dispatcher.combine(y, routed)
    assert (out.double() - exact(x, ids, weights)).abs().max().item() < 2e-6, kind
    dispatcher.health(wait=True)


def over_memory(shared: bool, ops: str) -> list[int]:
    """Trips of every routing; memory is taken at setup and given back at close."""
    rank, device = int(os.environ["RANK"]), place(shared)
    grid = Grid.create(GridSpec(dp=2), device, 60.0)
    for deterministic in (False, True):
        spec = replace(SPEC, deterministic=deterministic)
        dispatcher = PeerDispatcher(grid.ep, spec, SymmHeap(grid.ep, device), ops=PeerOps.load(ops))
        assert dispatcher.heap.allocated_bytes == workspace_bytes(spec)
        for seed, kind in enumerate(KINDS):
            trip(dispatcher, rank, kind, seed)
        sent = dispatcher.bytes_sent()
        assert sent[rank] == 0 and sent[1 - rank] > 0
        dispatcher.close()
    large = replace(SPEC, max_tokens=240_000)  # a GiB: 80 of them on each rank would not fit, if they stayed
    for _ in range(80):
        PeerDispatcher(grid.ep, large, SymmHeap(grid.ep, device), ops=PeerOps.load("torch")).close()
    grid.close()
    return [rank]


@pytest.mark.parametrize("ops", ["torch", "triton"])
def test_two_ranks_on_one_gpu(ops: str) -> None:
    assert run_ranks(over_memory, 2, True, ops, timeout=90.0, env=SHARED) == [[0], [1]]


@pytest.mark.parametrize("ops", ["torch", "triton"])
def test_two_gpus(ops: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    assert run_ranks(over_memory, 2, False, ops, timeout=90.0) == [[0], [1]]


def refused(shared: bool) -> None:
    grid = Grid.create(GridSpec(dp=2), place(shared), 60.0)
    SymmHeap(grid.ep, place(shared))


def test_one_gpu_needs_its_switch() -> None:
    exits = collect_ranks(refused, 2, True, timeout=60.0, env={ONE_GPU: "0"})
    assert all(f"are on the same GPU; for tests, set {ONE_GPU}=1" in e.error for e in exits), [e.error for e in exits]
