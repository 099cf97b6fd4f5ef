"""Start, memory and end of the runtime over real ranks, with a stand-in for nvshmem4py: what one rank lacks, all hear of."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from rorqual.comm.heap.nvshmem import NvshmemHeap
from rorqual.comm.nvshmem import launch, library, runtime
from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.group import Group
from tests.ranks import run_ranks

DEVICE = torch.device("cuda", 0)


class FakeCore:
    """As much of nvshmem.core as is used; peers are never mapped."""

    class InitStatus:
        pass

    def __init__(self, *, fails: bool = False, room: int = 1 << 20) -> None:
        self.calls: list[Any] = []
        self.fails, self.room = fails, room
        self.interop = SimpleNamespace(
            torch=SimpleNamespace(tensor=self._tensor, free_tensor=lambda t: self.calls.append(("free", t.numel())))
        )

    def get_unique_id(self, empty: bool = False) -> Any:
        data = np.zeros(1, dtype=np.dtype([("version", np.int32), ("internal", np.int8, (124,))]))
        if not empty:
            data["internal"] = np.arange(124) % 100
        return SimpleNamespace(_data=data)

    def init(self, *, device: Any, uid: Any, rank: int, nranks: int, initializer_method: str) -> None:
        if self.fails:
            raise OSError("no such transport")
        self.calls.append(("init", device, uid._data["internal"][0].tolist(), rank, nranks, initializer_method))

    def init_status(self) -> Any:
        return SimpleNamespace(name="STATUS_LIMITED_MPG")

    def finalize(self) -> None:
        self.calls.append(("finalize",))

    def _tensor(self, shape: tuple[int], dtype: Any, except_on_del: bool) -> torch.Tensor:
        if shape[0] > self.room:
            raise RuntimeError("heap is full")
        self.calls.append(("malloc", shape[0]))
        return torch.full(shape, 7, dtype=dtype)


def install(core: FakeCore, version: library.Version = (3, 4, 5), problem: str = "") -> None:
    """Let the runtime find ``core``, and do without a GPU."""

    def load(cuda: str | None) -> Any:
        if problem:
            raise ValueError(problem)
        files = library.Library(root=Path("r"), host=Path("h.so.3"), bitcode=Path("d.bc"), version=(3, 4, 5))
        return files, core, SimpleNamespace(cumodule_init=lambda handle: 0, ptr=lambda address, pe: 0), version

    runtime.load = load
    runtime._place = lambda device: f"place {device}"
    runtime.bindings_version = lambda: "0.4.1"
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.cuda.mem_get_info = lambda device=None: (5 << 20, 0)  # type: ignore[assignment]
    torch.tensor, make = lambda *a, device=None, **k: make(*a, **k), torch.tensor  # type: ignore[assignment]


def join() -> Grid:
    return Grid.create(GridSpec(dp=int(os.environ["WORLD_SIZE"])), torch.device("cpu"), 30.0)


def from_start_to_end() -> list[Any]:
    core = FakeCore()
    install(core)
    grid = join()
    me = grid.ep.index
    heap = NvshmemHeap(grid.ep, DEVICE)
    found = runtime.running()
    assert found is not None and runtime.start(grid.ep, DEVICE) is found
    assert found.describe() == (
        "NVSHMEM host 3.4.5, device bitcode 3.4.5, nvshmem4py 0.4.1, 2 PEs, several PEs on one GPU, time-sliced "
        "(no MPS, or its thread percentages exceed 100)"
    )
    with pytest.raises(ValueError, match=r"NVSHMEM runs over ranks \[0, 1\] on cuda:0 in this process and cannot be started a second time"):
        runtime.start(Group.solo(), DEVICE)
    peers = heap.allocate(4096)
    assert peers.own.sum() == 0 and peers.pointers.tolist() == [0 if r != me else peers.own.data_ptr() for r in range(2)] and heap.unmapped
    with pytest.raises(ValueError, match="must have the same size everywhere, found 64 on rank 0, 128 on rank 1 bytes"):
        heap.symmetric(64 << me)
    with pytest.raises(MemoryError, match=r"no room for 2097152 symmetric bytes on ranks \[0, 1\] \(5 MiB are free here\)"):
        heap.symmetric(2 << 20)
    core.room = 1 << 30 if me else 1 << 20
    with pytest.raises(MemoryError, match=r"on ranks \[0\]"):
        heap.symmetric(4 << 20)
    peers.own.fill_(3)
    heap.close()
    heap.close()
    again = NvshmemHeap(grid.ep, DEVICE)
    assert again.allocate(4096).own.data_ptr() == peers.own.data_ptr() and int(peers.own.sum()) == 0
    again.close()
    runtime.stop()
    runtime.stop()
    assert runtime.running() is None and launch._modules is None
    grid.close()
    return [call[0] for call in core.calls] + [core.calls[0], os.environ["NVSHMEM_DISABLE_NVLS"], os.environ["NVSHMEM_REMOTE_TRANSPORT"]]


def test_from_start_to_end() -> None:
    ends = run_ranks(from_start_to_end, 2, env={"NVSHMEM_DISABLE_NVLS": "0"})
    for rank, (*names, init, nvls, transport) in enumerate(ends):
        mallocs = names.count("malloc")
        assert names == ["init", *["malloc"] * mallocs, *["free"] * (names.count("free")), "finalize"]
        assert init == ("init", "place cuda:0", list(np.arange(124) % 100), rank, 2, "uid") and nvls == "1" and transport == "none"
        assert names.count("free") == 1, "the memory of the heaps that were closed"


def one_lacks_it() -> str:
    me = int(os.environ["RANK"])
    install(FakeCore(), problem="NVSHMEM is not installed: try pip" if me == 1 else "")
    grid = join()
    with pytest.raises(ValueError) as told:
        NvshmemHeap(grid.ep, DEVICE)
    assert runtime.running() is None
    grid.close()
    return str(told.value)


def test_one_rank_lacks_it() -> None:
    assert run_ranks(one_lacks_it, 2) == [
        "NVSHMEM cannot be used on ranks [1]; their own messages say why",
        "NVSHMEM is not installed: try pip",
    ]


def one_does_not_start() -> str:
    me = int(os.environ["RANK"])
    install(FakeCore(fails=me == 0))
    grid = join()
    with pytest.raises(RuntimeError) as told:
        NvshmemHeap(grid.ep, DEVICE)
    grid.close()
    return str(told.value)


def test_one_rank_does_not_start() -> None:
    first, second = run_ranks(one_does_not_start, 2)
    assert first == "NVSHMEM does not start on rank 0 (cuda:0): OSError: no such transport"
    assert second == "NVSHMEM did not start on ranks [0]; their own messages say why"


def two_versions() -> str:
    me = int(os.environ["RANK"])
    install(FakeCore(), version=(3, 4 + me, 5))
    grid = join()
    with pytest.raises(ValueError) as told:
        NvshmemHeap(grid.ep, DEVICE)
    grid.close()
    return str(told.value)


def test_two_versions() -> None:
    assert run_ranks(two_versions, 2) == ["the ranks load different versions of NVSHMEM: 3.4.5 on rank 0, 3.5.5 on rank 1"] * 2


def test_no_cuda_device() -> None:
    with pytest.raises(ValueError, match="NVSHMEM needs a CUDA device, found cpu"):
        NvshmemHeap(Group.solo(), torch.device("cpu"))


def a_rank_is_missing() -> str:
    install(FakeCore())
    grid = Grid.create(GridSpec(dp=2), torch.device("cpu"), 3.0)
    NvshmemHeap(grid.ep, DEVICE).allocate(64)
    if grid.rank == 1:
        os._exit(9)
    runtime.stop()
    return "came back"


def test_stop_does_not_wait_for_a_rank_that_is_gone() -> None:
    from tests.ranks import collect_ranks

    exits = collect_ranks(a_rank_is_missing, 2, timeout=40.0)
    assert exits[1].code == 9 and exits[0].code == 1 and exits[0].seconds < 30 and "missing rank 1" in exits[0].stderr, exits[0].stderr
