"""Messages between stages: order, counters, sends that do not wait."""

from __future__ import annotations

import time

import torch

from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.pipeline import Pipe, PipeStats
from tests.ranks import run_ranks


def stages(late_s: float) -> tuple[PipeStats, float]:
    grid = Grid.create(GridSpec(pp=2), torch.device("cpu"), 30.0)
    pipe = Pipe(grid.world, depth=4)
    hidden = [torch.full((n, 5), float(n), dtype=torch.bfloat16) for n in (3, 0, 1, 7)]
    send_s = 0.0
    if grid.next_rank is not None:
        begin = time.perf_counter()
        for x in hidden:
            pipe.send_async(x, grid.next_rank)
        send_s = time.perf_counter() - begin
        assert torch.equal(pipe.recv((2,), torch.int64, grid.next_rank), torch.tensor([4, 5]))
        pipe.drain()
        assert pipe.in_flight == 0
    else:
        assert grid.prev_rank is not None
        time.sleep(late_s)
        for x in hidden:
            assert torch.equal(pipe.recv(x.shape, x.dtype, grid.prev_rank), x)
        pipe.send_async(torch.tensor([4, 5]), grid.first_stage_peer)
        pipe.drain()
    grid.close()
    return pipe.stats, send_s


def test_two_stages() -> None:
    (first, send_s), (last, _) = run_ranks(stages, 2, 0.7)
    assert send_s < 0.5, "sends must not wait for the receiver"
    assert (first.sends, first.bytes_sent, first.receives, first.bytes_received) == (3, 11 * 5 * 2, 1, 16)
    assert (last.receives, last.bytes_received, last.sends, last.bytes_sent) == (3, 11 * 5 * 2, 1, 16)
    assert first.recv_wait_s > 0.3 > last.recv_wait_s and first.send_wait_s < 0.5


def many(n: int) -> float:
    """More messages than the pipe lets be under way: the oldest is waited for, and all arrive in order."""
    grid = Grid.create(GridSpec(pp=2), torch.device("cpu"), 30.0)
    pipe = Pipe(grid.world, depth=2)
    total = 0.0
    for i in range(n):
        if grid.next_rank is not None:
            pipe.send_async(torch.full((4,), float(i)), grid.next_rank)
            assert len(pipe._leaving) <= 2
        else:
            total += pipe.recv((4,), torch.float32, 0)[0].item() * i
    pipe.drain()
    grid.close()
    return total


def test_more_messages_than_room() -> None:
    assert run_ranks(many, 2, 20)[1] == sum(i * i for i in range(20))
