"""NVSHMEM for real: several PEs on one GPU (time-sliced or under MPS) and one PE a GPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.gpu.nvshmem_ranks import functions, heaps, no_stop, restarts
from tests.gpu.nvshmem_trips import conform, hops, one_dies, trips
from tests.ranks import collect_ranks, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("nvshmem") is None, reason="needs nvshmem4py"),
]
#: (PEs, GPUs)
PLACES = [(2, 1), (4, 1)] + ([(2, 2)] if torch.cuda.device_count() > 1 else [])
everywhere = pytest.mark.parametrize(("n_pes", "n_gpus"), PLACES)


def settings(n_gpus: int) -> dict[str, str]:
    return {"TEST_GPUS": str(n_gpus), "NCCL_NVLS_ENABLE": "0"}


def run(fn: Callable[[], Any], n_pes: int, n_gpus: int) -> list[Any]:
    return run_ranks(fn, n_pes, timeout=90.0, env=settings(n_gpus))


@everywhere
def test_heap_comes_and_goes(n_pes: int, n_gpus: int) -> None:
    print(run(heaps, n_pes, n_gpus)[0])


@everywhere
def test_start_again(n_pes: int, n_gpus: int) -> None:
    print(run(restarts, n_pes, n_gpus)[0])


@everywhere
def test_device_functions(n_pes: int, n_gpus: int) -> None:
    for names in run(functions, n_pes, n_gpus):
        assert sorted(set(names)) == ["ask", "pull", "push"]


@everywhere
def test_dispatch_and_combine(n_pes: int, n_gpus: int) -> None:
    print("\n".join(run(trips, n_pes, n_gpus)[0]))


@pytest.mark.parametrize(("n_pes", "n_gpus"), [place for place in PLACES if place[0] == 4 or place[1] == 2])
def test_two_hops(n_pes: int, n_gpus: int) -> None:
    print("\n".join(run(hops, n_pes, n_gpus)[0]))


@pytest.mark.parametrize("kind", ["stores", "puts", "hops"])
@everywhere
def test_conformance(n_pes: int, n_gpus: int, kind: str) -> None:
    done = run_ranks(conform, n_pes, kind, timeout=240.0, env=settings(n_gpus))
    assert len(done[0]) >= (4 if kind == "hops" else 16) and done == [done[0]] * n_pes
    print(kind, done[0])


@everywhere
def test_a_pe_dies(n_pes: int, n_gpus: int) -> None:
    *survivors, dead = collect_ranks(one_dies, n_pes, timeout=60.0, env=settings(n_gpus))
    assert dead.code == 9
    for exit in survivors:
        assert exit.code == 0, (exit.error, exit.stderr[-2000:])
        assert f"rank {n_pes - 1} did not come to dispatch 2 of channel 0 (tag 7) within 1500 ms" in exit.result
    print([f"{exit.seconds:.1f} s" for exit in survivors])


@everywhere
def test_leaving_without_stop(n_pes: int, n_gpus: int) -> None:
    exits = collect_ranks(no_stop, n_pes, timeout=60.0, env=settings(n_gpus))
    assert [(exit.code, exit.result) for exit in exits] == [(0, 4096)] * n_pes, [
        (exit.code, exit.error, exit.stderr[-1500:]) for exit in exits
    ]
    print([exit.stderr[-300:] for exit in exits])
