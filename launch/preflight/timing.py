"""Collectives and pairs of ranks, timed by the groups that the engine uses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...parallel.grid import Grid

SMALL_BYTES, LARGE_BYTES = 1024, 4 << 20
_ROUNDS = 10  # of small messages; the median counts
_ALL_PAIRS = 64  # ranks up to which every pair is tried; beyond, each rank tries the ones 1, 2, 4, ... away
_SLOWER = 4.0  # a link is slow when it is that many times worse than the median of its kind
_NOISE_US = 300.0  # and at least so much


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two ranks."""

    a: int
    b: int
    latency_us: float  # half a round trip of a few bytes
    gbytes_s: float  # of a large message, one way


def _timed(grid: Grid, work: Callable[[], Any], rounds: int) -> float:
    """Median seconds of ``work``, after one that does not count."""
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        work()
        if grid.device.type == "cuda":
            torch.cuda.synchronize(grid.device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def time_collectives(grid: Grid) -> list[dict[str, Any]]:
    """Rows of {op, bytes (a rank), us, gbytes_s (a rank sends)}. Collective."""
    n, device = grid.world.size, grid.device
    rows = []
    for size, rounds in ((SMALL_BYTES, _ROUNDS), (LARGE_BYTES, 3)):
        x = torch.ones(size // 4, device=device)
        seconds = _timed(grid, lambda x=x: grid.world.all_reduce(x.clone()), rounds)  # type: ignore[misc]
        rows.append({"op": "all-reduce", "bytes": size, "us": seconds * 1e6, "gbytes_s": size * 2 * (n - 1) / n / seconds / 1e9})
    for size, rounds in ((SMALL_BYTES, _ROUNDS), (LARGE_BYTES, 3)):
        y = torch.zeros(n, size // n, dtype=torch.uint8, device=device)
        seconds = _timed(grid, lambda y=y: grid.world.all_to_all(y, [1] * n, [1] * n), rounds)  # type: ignore[misc]
        rows.append({"op": "all-to-all", "bytes": size, "us": seconds * 1e6, "gbytes_s": size * (n - 1) / n / seconds / 1e9})
    return rows


def partners(rank: int, n: int) -> Iterator[int | None]:
    """With whom ``rank`` of ``n`` pairs up in each round, None where it stands aside; all ranks go through as many rounds."""
    if n > _ALL_PAIRS:
        step = 1
        while step < n:
            other = rank + step if rank // step % 2 == 0 else rank - step
            yield other if other < n else None
            step *= 2
        return
    m = n + n % 2  # the last seat stays put, the others go round
    for turn in range(m - 1):
        if rank == m - 1:
            other = turn
        elif rank == turn:
            other = m - 1
        else:
            other = (2 * turn - rank) % (m - 1)
        yield other if other < n else None


def time_pairs(grid: Grid) -> list[Pair]:
    """Every pair of ranks by point-to-point messages -> all pairs, on all ranks. Collective."""
    n, rank = grid.world.size, grid.rank
    small = torch.ones(8, dtype=torch.uint8, device=grid.device)
    large = torch.ones(LARGE_BYTES, dtype=torch.uint8, device=grid.device)
    numbers = [0] * (2 * n)  # nanoseconds, then bytes a millisecond, by partner
    for other in partners(rank, n):
        if other is not None:
            times = [_round_trip(grid, other, small) for _ in range(_ROUNDS + 1)][1:]
            numbers[2 * other] = int(min(times) / 2 * 1e9)
            numbers[2 * other + 1] = int(LARGE_BYTES / (min(_round_trip(grid, other, large) for _ in range(2)) / 2) / 1e3)
        grid.world.barrier("pairs")
    table = grid.world.gather_ints(numbers)
    return [
        Pair(a=a, b=b, latency_us=int(table[a, 2 * b]) / 1e3, gbytes_s=int(table[a, 2 * b + 1]) / 1e6)
        for a in range(n)
        for b in range(a + 1, n)
        if table[a, 2 * b]
    ]


def _round_trip(grid: Grid, other: int, x: torch.Tensor) -> float:
    """Seconds of a message there and back; the lower rank begins."""
    begin = time.perf_counter()
    for sends in (grid.rank < other, grid.rank > other):
        if sends:
            grid.world.send_async(x, other).wait()
        else:
            grid.world.recv_async(torch.empty_like(x), other).wait()
    if grid.device.type == "cuda":
        torch.cuda.synchronize(grid.device)
    return time.perf_counter() - begin


def slow_pairs(pairs: Sequence[Pair], hosts: Sequence[str]) -> list[tuple[Pair, str]]:
    """Pairs that are much slower than others of their kind (within a host, between hosts), and how."""
    found = []
    for inside in (True, False):
        kind = [pair for pair in pairs if (hosts[pair.a] == hosts[pair.b]) == inside]
        if len(kind) < 3:  # nothing to compare with
            continue
        latency = statistics.median(pair.latency_us for pair in kind)
        speed = statistics.median(pair.gbytes_s for pair in kind)
        for pair in kind:
            if pair.latency_us > _SLOWER * latency + _NOISE_US:
                found.append((pair, f"{pair.latency_us:.0f} us, others {latency:.0f} us"))
            elif pair.gbytes_s < speed / _SLOWER:
                found.append((pair, f"{pair.gbytes_s:.2f} GB/s, others {speed:.2f} GB/s"))
    return found
