"""Shared memory of CPU ranks, places of GPU ranks, and messages among some ranks."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from rorqual.comm.control import agreed_epochs, exchange_ints
from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.heap import shm
from rorqual.comm.heap.shm import ShmHeap
from rorqual.comm.heap.symm import ONE_GPU, SymmHeap, place_problem
from rorqual.comm.heap.virtual import VirtualHeap
from rorqual.comm.select import make_dispatcher
from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.group import Group
from tests.ranks import run_ranks


def shared() -> list[Any]:
    """Bytes written by one rank are read by the others; failures of one are failures of all."""
    grid = Grid.create(GridSpec(dp=3), torch.device("cpu"), 30.0)
    rank, found = grid.ep.index, []
    heap = ShmHeap(grid.ep)
    peers = heap.allocate(1 << 16)
    assert not peers.own.any() and heap.allocated_bytes == 1 << 16 and peers.size == 3
    grid.ep.barrier("looked")
    peers.views[(rank + 1) % 3][rank] = 10 + rank  # type: ignore[index]
    grid.ep.barrier("written")
    assert peers.own[(rank + 2) % 3] == 10 + (rank + 2) % 3 and int(peers.own.sum()) == 10 + (rank + 2) % 3
    assert peers.pointers.tolist() == [view.data_ptr() for view in peers.views if view is not None]
    heap.close()
    heap.close()
    assert heap.allocated_bytes == 0
    create, open_files = shm._create, len(os.listdir("/proc/self/fd"))
    if rank == 1:
        shm._create = lambda n, ranks: (-1, "memory: none left")  # type: ignore[assignment]
    for size in (1 << 16, 1 << 40):  # the second is more than any machine has
        try:
            heap.allocate(size)
        except ValueError as error:
            found.append(str(error))
    shm._create = create
    fstat = os.fstat
    if rank == 2:  # it names another file than it made
        os.fstat = lambda file: os.stat_result((0, 1, *fstat(file)[2:]))  # type: ignore[assignment, misc]
    try:
        heap.allocate(1 << 16)
    except ValueError as error:
        found.append(str(error))
    os.fstat = fstat
    assert len(os.listdir("/proc/self/fd")) <= open_files + 1
    found.append(exchange_ints(grid.ep, [0, 2], [rank, 7]) if rank != 1 else None)
    if rank != 1:
        assert agreed_epochs(grid.ep, [True, False, True], [rank, 5 - rank]) == [2, 5]
    try:
        agreed_epochs(grid.ep, [True, True, True] if rank != 2 else [True, True, True, False], [1])
    except ValueError as error:
        assert "gave different masks" in str(error)
    else:
        raise AssertionError("different masks must be refused")
    grid.close()
    return found


def test_shared_memory() -> None:
    results = run_ranks(shared, 3)
    for rank, (one, large, other, told) in enumerate(results):
        assert "no shared workspace of 65536 bytes, ranks" in one and ("memory: none left" in one) == (rank == 1), one
        assert f"no shared workspace of {1 << 40} bytes" in large and (rank == 1 or "are free; lower max_tokens" in large), large
        assert "no shared workspace" in other and "is not the other rank's memory" in other, other
        assert told == (None if rank == 1 else [[0, 7], [2, 7]])


def test_machines_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shm.why_not() is None
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(ValueError, match="x86-64 promises and aarch64 does not; use torch"):
        ShmHeap(Group.solo())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "this is darwin" in str(shm.why_not())


def test_places_of_gpus() -> None:
    good = [[1, 5, 100 + rank, rank, 0] for rank in range(3)]
    ranks = (4, 5, 6)
    assert place_problem(good, ranks) is None and place_problem(good[:1], ranks[:1]) is None
    assert place_problem([good[0], [0, 5, 0, -1, 0], good[2]], ranks) == "ranks [5] have no CUDA device; their own errors say why"
    assert "on 2 hosts, and memory is mapped within one; use nvshmem or torch_node" in str(
        place_problem([*good[:2], [1, 6, 102, 2, 0]], ranks)
    )
    masked = [[1, 5, 100 + rank, 0, 0] for rank in range(3)]
    assert "CUDA_VISIBLE_DEVICES shows each rank other devices" in str(place_problem(masked, ranks))
    same = [[1, 5, 100, 0, allowed] for allowed in (1, 0, 1)]
    assert place_problem(same, ranks) == f"ranks [4, 5, 6] are on the same GPU; for tests, set {ONE_GPU}=1 on every rank"
    assert place_problem([[*row[:4], 1] for row in same], ranks) is None


def test_symmetric_memory_of_gpus_needs_them() -> None:
    with pytest.raises(ValueError, match="'symm' cannot be used here: it needs CUDA devices; CPU ranks of one host have shm"):
        SymmHeap(Group.solo(), torch.device("cpu"))


def test_virtual_ranks_allocate_the_same() -> None:
    heap = VirtualHeap(2)
    first, second = heap.of(0), heap.of(1)
    peers = first.allocate(64)
    assert first.allocated_bytes == 64 and second.allocated_bytes == 0
    with pytest.raises(ValueError, match="64 bytes before, 32 now"):
        second.allocate(32)
    peers.views[1][3] = 9  # type: ignore[index]
    assert int(second.allocate(64).own[3]) == 9
    second.close()
    assert second.allocated_bytes == 0


def too_large() -> list[str]:
    """What does not fit is refused on every rank, with what would; and differing specs are before that."""
    grid, found = Grid.create(GridSpec(dp=2), torch.device("cpu"), 30.0), []
    spec = EPSpec(n_ranks=2, n_slots=4, hidden=64, top_k=2, max_tokens=1 << 30)
    for number, limit in ((0, None), (0, 1 << 20), (grid.ep.index, None)):
        try:
            make_dispatcher("shm", grid, replace(spec, max_tokens=spec.max_tokens + number), limit_bytes=limit)
        except ValueError as error:
            found.append(str(error))
    grid.close()
    return found


def test_what_does_not_fit_is_refused_everywhere() -> None:
    for found in run_ranks(too_large, 2):
        assert len(found) == 3 and all("max_tokens of at most" in text for text in found[:2]), found
        assert "1048576 may be used; max_tokens of at most 496 fits" in found[1] and "disagree on max_tokens" in found[2], found
