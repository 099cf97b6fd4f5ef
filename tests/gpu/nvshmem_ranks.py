"""What each PE does in the tests of NVSHMEM: memory, device functions, and ways to end."""

from __future__ import annotations

import os
import time

import pytest
import torch

from rorqual.parallel.grid import Grid, GridSpec


def start() -> tuple[Grid, torch.device]:
    """The grid of this rank, over gloo, and its GPU."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank % int(os.environ["TEST_GPUS"]))
    torch.cuda.set_device(device)
    return Grid.create(GridSpec(dp=world), torch.device("cpu"), 45.0), device


def heaps() -> str:
    """Allocate, write into every peer, read what they wrote, close, and use the memory again."""
    from rorqual.comm.heap.nvshmem import NvshmemHeap
    from rorqual.comm.nvshmem.runtime import running, stop

    grid, device = start()
    me, size = grid.ep.index, grid.ep.size
    notes, spaces = [], []
    for turn in range(3):
        begin = time.monotonic()
        unmap = (1,) if turn == 0 else ()
        heap = NvshmemHeap(grid.ep, device, unmap=unmap)
        runtime = running()
        assert runtime is not None
        free, started = torch.cuda.mem_get_info(device)[0], time.monotonic() - begin
        peers = heap.allocate(1 << 20)
        took = (free - torch.cuda.mem_get_info(device)[0]) >> 20
        notes.append(
            f"{runtime.describe()}; started in {started:.2f} s, with memory in {time.monotonic() - begin:.2f} s, which took {took} MiB"
        )
        assert heap.allocated_bytes == 1 << 20 and peers.size == size and peers.rank == me and heap.unmapped == (turn == 0)
        assert int(peers.own.sum(dtype=torch.int64)) == 0, "not zeroed"
        grid.ep.barrier("looked at")
        assert [view is None for view in peers.views] == [turn == 0 and r == 1 and me != 1 for r in range(size)]
        assert [p == 0 for p in peers.pointers.tolist()] == [view is None for view in peers.views]
        for view in peers.views:
            if view is not None:
                view[me * 16 : me * 16 + 16] = 10 * turn + me + 1
        torch.cuda.synchronize()
        grid.ep.barrier("written")
        found = peers.own[: 16 * size].view(size, 16)
        for source in range(size):
            want = 0 if turn == 0 and me == 1 and source != 1 else 10 * turn + source + 1
            assert found[source].tolist() == [want] * 16, (turn, me, source, found[source].tolist())
        more = heap.symmetric(4096)
        assert heap.allocated_bytes == (1 << 20) + 4096 and int(more.sum()) == 0
        with pytest.raises(ValueError, match="symmetric memory must have the same size everywhere, found 16 on rank 0, 32 on rank 1"):
            heap.symmetric(16 if me == 0 else 32)
        spaces.append(peers.own.data_ptr())
        heap.close()
        heap.close()
        assert heap.allocated_bytes == 0 and running() is runtime
        with pytest.raises(RuntimeError, match="heap is closed"):
            heap.symmetric(16)
    assert spaces[0] == spaces[1] == spaces[2], "memory is not used again"
    stop()
    stop()
    assert running() is None
    grid.close()
    return "\n".join(notes)


def restarts() -> str:
    """End the runtime and start it again in the same processes; a kernel loaded before works after it."""
    from rorqual.comm.heap.nvshmem import NvshmemHeap
    from rorqual.comm.nvshmem.launch import launch
    from rorqual.comm.nvshmem.runtime import stop
    from tests.gpu import nvshmem_kernels as kernels

    grid, device = start()
    me, size = grid.ep.index, grid.ep.size
    taken = []
    for turn in range(3):
        heap = NvshmemHeap(grid.ep, device)
        peers = heap.allocate(1 << 16)
        assert int(peers.own.sum(dtype=torch.int64)) == 0
        out = torch.zeros(3, dtype=torch.int64, device=device)
        right = (me + 1) % size
        launch(kernels.ask, (1,), out, peers.own.data_ptr(), right, num_warps=1)
        assert out.tolist() == [me, size, int(peers.pointers[right])], (turn, out.tolist(), peers.pointers.tolist())
        del peers
        heap.close()
        stop()
        taken.append(torch.cuda.mem_get_info(device)[0] >> 20)
    grid.close()
    return f"{taken} MiB free after each"


def functions() -> list[str]:
    """Every declared device function between neighbours, eagerly and in a graph; kernels are refused where they must be."""
    from rorqual.comm.heap.nvshmem import NvshmemHeap
    from rorqual.comm.nvshmem.launch import launch
    from rorqual.comm.nvshmem.runtime import running, stop
    from tests.gpu import nvshmem_kernels as kernels

    grid, device = start()
    me, size = grid.ep.index, grid.ep.size
    out = torch.full((3,), -1, dtype=torch.int64, device=device)
    with pytest.raises(RuntimeError, match="NVSHMEM is not running"):
        launch(kernels.ask, (1,), out, 0, 0, num_warps=1)
    heap = NvshmemHeap(grid.ep, device)
    n = 1 << 16
    peers = heap.allocate(4 * n)
    own = peers.own.data_ptr()
    right, left = (me + 1) % size, (me - 1) % size
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="loaded while a CUDA graph is captured"):
        with torch.cuda.graph(graph):
            launch(kernels.ask, (1,), out, own, right, num_warps=1)
    launch(kernels.ask, (1,), out, own, right, num_warps=1)
    assert out.tolist() == [me, size, int(peers.pointers[right])], (out.tolist(), me, size, peers.pointers.tolist())
    signal, inbox, outbox = own, own + 1024, own + 2 * n
    pattern = peers.own[2 * n : 3 * n]
    got = torch.zeros(n, dtype=torch.uint8, device=device)
    base = torch.arange(n, device=device)
    for step, how in enumerate([0, 1, 2, 3, 0, 1, 2, 3], start=1):
        pattern.copy_(((base * 7 + 31 * me + step) % 251).to(torch.uint8))
        launch(kernels.push, (1,), inbox, outbox, n, signal, step, right, how, num_warps=4)
        launch(kernels.pull, (1,), signal, step, peers.own[1024:], got, N=n, num_warps=8)
        torch.cuda.synchronize()
        assert torch.equal(got, ((base * 7 + 31 * left + step) % 251).to(torch.uint8)), (how, step)
        grid.ep.barrier("step")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(kernels.push, (1,), inbox, outbox, n, signal, 100, right, 2, num_warps=4)
    pattern.fill_(me + 1)
    graph.replay()
    torch.cuda.synchronize()
    grid.ep.barrier("replayed")
    assert peers.own[1024 : 1024 + n].unique().tolist() == [left + 1]
    runtime = running()
    assert runtime is not None
    names = runtime.modules.names
    heap.close()
    stop()
    grid.close()
    return names


def no_stop() -> int:
    from rorqual.comm.heap.nvshmem import NvshmemHeap

    grid, device = start()
    heap = NvshmemHeap(grid.ep, device)
    n = heap.allocate(4096).own.numel()
    if grid.ep.index:
        heap.close()
    grid.close()
    return n
