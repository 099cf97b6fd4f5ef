"""The kernels over peer memory on GPUs: all ranks in one process, and ranks that are processes."""

from __future__ import annotations

import pytest
import torch

from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.ops import PeerOps
from tests.comm.kernels.peer_problem import World, close, make_tokens, whole_trip
from tests.gpu import symm_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WORLDS = [
    pytest.param(2, 1, id="2 processes on one GPU"),
    pytest.param(2, 2, id="2 GPUs", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")),
]


@pytest.mark.parametrize(
    ("payload", "more"),
    [
        ("fp8", {"hidden": 7168}),
        ("fp8", {"dtype": "float32", "hidden": 200}),  # a last block of less than 128
        ("fp8_ue8m0", {"hidden": 1024}),
        ("bf16", {"dtype": "float32"}),
        ("native", {"dtype": "float16", "hidden": 33}),
        ("native", {"deterministic": True, "top_k": 6}),
    ],
)
def test_a_whole_trip_of_virtual_ranks(payload, more):
    given = {"n_ranks": 3, "n_slots": 36, "hidden": 512, "top_k": 8, "max_tokens": 40, "dtype": "bfloat16"}
    spec = EPSpec(payload=payload, **{**given, **more})
    world = World(spec=spec, ops=PeerOps.load("triton"), device=torch.device("cuda"), programs=8)
    for seed, kind in enumerate(("random", "with_none", "all_to_one", "repeated")):
        tokens = [make_tokens(spec, r, (40, 0, 13)[(r + seed) % 3], kind, seed, world.device) for r in range(3)]
        whole = seed % 2 == 1 or spec.deterministic
        for result, t in zip(whole_trip(world, tokens, channel=seed % 2, indexed=whole), tokens, strict=True):
            close(world, result, t)
        world.poison()


def test_all_ranks_may_send_before_one_receives():
    """One stream for all ranks: a send must never wait for a receive."""
    spec = EPSpec(n_ranks=4, n_slots=32, hidden=256, top_k=4, max_tokens=300, dtype="bfloat16", payload="fp8")
    world = World(spec=spec, ops=PeerOps.load("triton"), device=torch.device("cuda"), programs=132)
    tokens = [make_tokens(spec, r, 300, "random", 0, world.device, n_valid=(300, 1, 0, 77)[r]) for r in range(4)]
    for result, t in zip(whole_trip(world, tokens), tokens, strict=True):
        close(world, result, t)


@pytest.mark.parametrize(("n_ranks", "n_gpus"), WORLDS)
def test_a_whole_trip_of_processes(n_ranks, n_gpus):
    symm_ranks.spawn(symm_ranks.whole_trips, n_ranks, n_gpus)


@pytest.mark.parametrize(("n_ranks", "n_gpus"), WORLDS)
def test_graphs_and_eager_calls_in_any_order_and_delays_change_no_bit(n_ranks, n_gpus):
    """Processes that share a GPU take turns of milliseconds, so they do less of it."""
    symm_ranks.spawn(symm_ranks.stress, n_ranks, n_gpus, *((1000, 100) if n_gpus > 1 else (60, 10)))


@pytest.mark.parametrize(("n_ranks", "n_gpus"), WORLDS)
def test_a_rank_that_dies_is_named_after_one_deadline(n_ranks, n_gpus):
    symm_ranks.spawn(symm_ranks.killed, n_ranks, n_gpus, 300, 60)
