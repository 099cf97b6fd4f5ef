"""Groups: every collective against what it must give, control messages, and broken calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.group import Group
from tests.ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.bool)


def mine(rank: int, n: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that any rank can work out for any other."""
    values = torch.arange(n * width, dtype=torch.float32).view(n, width) + 100 * rank + n
    return (values % 7).to(dtype) if dtype in (torch.bool, torch.float8_e4m3fn) else (values % 251).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.float(), b.float())


def tensors(group: Group) -> None:
    size, me = group.size, group.index
    for dtype in DTYPES:
        assert same(group.all_gather(mine(me, 2, 3, dtype)), torch.cat([mine(r, 2, 3, dtype) for r in range(size)]))
        sizes = [(3 * r + 1) % 4 for r in range(size)]
        uneven = torch.cat([mine(r, sizes[r], 3, dtype) for r in range(size)])
        assert same(group.all_gather_uneven(mine(me, sizes[me], 3, dtype), sizes), uneven)
        x = mine(me, 4, 5, dtype).t().contiguous().t()  # not contiguous
        assert same(group.all_gather(x), torch.cat([mine(r, 4, 5, dtype) for r in range(size)]))
        x = mine(me, 3, 2, dtype)
        assert group.broadcast(x, size - 1) is x and same(x, mine(size - 1, 3, 2, dtype))
        splits = torch.tensor([[(r + 2 * s) % 3 for s in range(size)] for r in range(size)])  # [from, to]
        starts = splits.cumsum(1) - splits
        full = [mine(r, int(splits[r].sum()), 4, dtype) for r in range(size)]
        want = torch.cat([full[r][starts[r, me] : starts[r, me] + splits[r, me]] for r in range(size)])
        assert same(group.all_to_all(full[me], splits[me].tolist(), splits[:, me].tolist()), want)
    big = torch.full((700_000,), float(me))
    assert group.all_gather(big).view(size, -1)[:, ::1000].eq(torch.arange(size).unsqueeze(1)).all()
    assert group.all_gather(torch.empty(0, 3)).shape == (0, 3) and group.all_gather_uneven(torch.empty(0, 3), [0] * size).shape == (0, 3)
    assert group.all_to_all(torch.empty(0, 3), [0] * size, [0] * size).shape == (0, 3)
    pending = [group.all_to_all_async(torch.full((size, 2), float(10 * n + me)), [1] * size, [1] * size) for n in range(3)]
    for n in (2, 0, 1):
        assert pending[n].wait()[:, 0].tolist() == [10.0 * n + r for r in range(size)] and pending[n].is_done()


def sums(group: Group) -> None:
    """In place; in rank order in fp32, so that the sum of an element does not depend on the shape around it."""
    gen = torch.Generator().manual_seed(4)
    parts = torch.randn(group.size, 33, 7, generator=gen) * torch.tensor([10.0**r for r in range(group.size)]).view(-1, 1, 1)
    want = parts[0].clone()
    for part in parts[1:]:
        want += part
    x = parts[group.index].clone()
    assert group.all_reduce(x) is x and torch.equal(x, want)
    one = group.all_reduce(parts[group.index, 3:4].clone())
    assert torch.equal(one, want[3:4])
    strided = parts[group.index].t()[:5]
    kept = torch.empty(10, 33)[::2].copy_(strided)
    assert torch.equal(group.all_reduce(kept), want.t()[:5])
    half = parts[group.index].bfloat16()
    wide = parts.bfloat16().float()
    total = wide[0].clone()
    for part in wide[1:]:
        total += part
    assert torch.equal(group.all_reduce(half), total.bfloat16())
    assert group.all_reduce(torch.tensor([2**60 + group.index])).item() == group.size * 2**60 + sum(range(group.size))


def control(group: Group) -> None:
    size, me = group.size, group.index
    assert group.gather_ints([me, -(2**62)]).tolist() == [[r, -(2**62)] for r in range(size)]
    assert group.gather_ints([7]).dtype == np.int64 and group.gather_ints([]).shape == (size, 0)
    for src in range(size):
        for length in (0, 1, 2048, 2049, 100, 300_000, 5):  # above and below what travels with the length
            data = bytes((src + i) % 256 for i in range(length))
            assert group.broadcast_bytes(data if me == src else None, src) == data
    with pytest.raises(ValueError, match="the sender .index [0-9]. must give data, found None"):
        group.broadcast_bytes(None, me)
    for data in (b"", b"x" * 2048, b"y" * 5000):
        if me == 0:
            group.send_bytes(data, 1)
            assert group.recv_bytes(1) == data[::-1]
        elif me == 1:
            assert group.recv_bytes(0) == data
            group.send_bytes(data[::-1], 0)
    group.barrier("all here")
    with pytest.raises(RuntimeError, match=r"rank \d is at barrier '(a|b)' of group \w+; ranks \[.*\] are at another one"):
        group.barrier("a" if me == 0 else "b")


def everything() -> str:
    grid = Grid.create(GridSpec(dp=2, tp=2), torch.device("cpu"), 30.0)
    for group in (grid.world, grid.ep, grid.tp):
        tensors(group)
        sums(group)
        control(group)
    text = repr(grid.tp)
    group = grid.tp
    grid.close()
    with pytest.raises(RuntimeError, match=r"group tp \[.*\] is closed"):
        group.all_gather(torch.ones(1))
    return text


def test_collectives_of_four_and_two_ranks() -> None:
    texts = run_ranks(everything, 4)
    assert texts[3] == "Group(tp, ranks=[2, 3], index=1)"


def test_alone() -> None:
    group = Group.solo()
    x = torch.ones(2, 2)
    assert group.all_gather_uneven(x, [2]) is x and group.broadcast(x) is x and group.all_to_all_async(x, [2], [2]).wait() is x
    with pytest.raises(ValueError, match="must give data, found None"):
        group.broadcast_bytes(None)
    with pytest.raises(RuntimeError, match="group solo has no peers"):
        group.send_bytes(b"x", 0)
