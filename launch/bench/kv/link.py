"""Rows fetched from host memory, measured against the link: by number of rows, bytes of a row, size of the pool, place and order."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..results import Row
from .link_rows import Choice, Choices, MemoryRows

#: shares of the link that a fetch must reach, by fewest rows, over 2 MiB extents of a pool of at least ``_AIM_GIB``
_TARGETS = ((2048, 0.85), (274, 0.60))
_AIM_GIB = 64
_DEVICE_ROWS = 400_000  # that rows are fetched into, more than the L2 holds
_MOST_PEER_ROWS = 2048  # copies of single rows take milliseconds beyond
Launch = Callable[[int], Any]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What the link does at its best."""

    gb_per_s: float  # contiguous pinned memory to the device, by the copy engine
    round_trip_us: float  # a fetch of one row beyond a fetch of none
    piece_ns: float  # translating the address of a piece that was not touched lately

    def floor_us(self, n_bytes: float, pieces: float = 0.0) -> float:
        """Least microseconds of a fetch: the bytes or the translations, whichever take longer, and one round trip."""
        return max(n_bytes / self.gb_per_s, pieces * self.piece_ns) / 1e3 + self.round_trip_us


def replay_us(launch: Launch, choices: Choices, *, replays: int = 5) -> float:
    """Median microseconds of a launch in a replayed graph of one for each of ``choices``, which are new before every replay."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for number in range(len(choices.source)):
            launch(number)
    times = []
    for _ in range(replays + 1):
        choices.refill()
        times.append(_span_us(graph.replay) / len(choices.source))
    return statistics.median(times[1:])


def measure_link(memory: torch.Tensor) -> Link:
    """The link's bandwidth and round trip, over ``memory``: uint8 [n], registered."""
    n_bytes = min(memory.numel(), 256 << 20)
    device = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    copies = [_span_us(lambda: device.copy_(memory[:n_bytes], non_blocking=True)) for _ in range(6)]
    rows = MemoryRows(memory, 128)
    pool = torch.empty(_DEVICE_ROWS, 128, dtype=torch.uint8, device="cuda")
    choices = Choices(Choice(requests=1, rows=1), rows.n_rows, 128, _DEVICE_ROWS, 64, "cuda")
    one = replay_us(_fetch(rows, pool, choices), choices)
    for count in choices.count:
        count.zero_()
    none = replay_us(_fetch(rows, pool, choices), choices)
    apart = Choice(requests=1, rows=4096, placement="rows")  # almost all of them in pieces of their own
    choices = Choices(apart, rows.n_rows, 128, _DEVICE_ROWS, 16, "cuda")
    many = replay_us(_fetch(rows, pool, choices), choices)
    return Link(
        gb_per_s=n_bytes / statistics.median(copies[1:]) / 1e3,
        round_trip_us=max(0.0, one - none),
        piece_ns=max(0.0, 1e3 * (many - one) / choices.pieces()),
    )


def measure(memory: torch.Tensor, row_bytes: int, choice: Choice, link: Link, *, peers: bool = False) -> tuple[Row, float, float]:
    """One row of the table (GB/s), its microseconds, and their floor."""
    rows = MemoryRows(memory, row_bytes)
    pool = torch.empty(_DEVICE_ROWS, row_bytes, dtype=torch.uint8, device="cuda")
    n_rows = choice.requests * choice.rows
    launches = max(2, min(64, 24_000 // n_rows))
    choices = Choices(choice, rows.n_rows, row_bytes, _DEVICE_ROWS, launches, "cuda")
    us = replay_us(_fetch(rows, pool, choices), choices)
    n_bytes, gib = n_rows * row_bytes, memory.numel() / 2**30
    share = next((part for fewest, part in _TARGETS if n_rows >= fewest), None)
    aimed = choice.placement == "extents" and choice.order == "positions" and gib >= _AIM_GIB and share is not None
    floor = link.floor_us(n_bytes, choices.pieces())
    others = {name: n_bytes / time_us / 1e3 for name, time_us in _peers(rows, pool, choices)} if peers else {}
    row = Row(
        name=f"fetch, {row_bytes} B rows",
        params={
            "rows": n_rows,
            "requests": choice.requests,
            "context": choice.context,
            "pool_gib": round(gib, 1),
            "placement": choice.placement,
            "order": choice.order,
        },
        value=n_bytes / us / 1e3,
        unit="GB/s",
        better="higher",
        roof=min(1.0, floor / us),
        peers=others,
        target=link.gb_per_s * share if aimed and share is not None else None,
    )
    return row, us, floor


def _fetch(rows: MemoryRows, pool: torch.Tensor, choices: Choices) -> Launch:
    from ....attention.kernels.fetch_rows import fetch_rows

    return lambda number: fetch_rows(rows, pool, choices.source[number], choices.target[number], choices.count[number])


def _peers(rows: MemoryRows, pool: torch.Tensor, choices: Choices) -> Iterator[tuple[str, float]]:
    """Microseconds of other ways to the same bytes, the lists being on the host already, which flatters them."""
    source, target = choices.source[0].flatten().cpu().long(), choices.target[0].flatten().long()
    if source.numel() > _MOST_PEER_ROWS:
        return
    places = target.tolist()
    chosen = source.tolist()

    def one_by_one() -> None:
        for place, row in zip(places, chosen, strict=True):
            pool[place].copy_(rows.bytes[row], non_blocking=True)

    staging = torch.empty(source.numel(), rows.pitch, dtype=torch.uint8, pin_memory=True)
    landing = torch.empty(staging.shape, dtype=torch.uint8, device="cuda")

    def gathered() -> None:
        torch.index_select(rows.bytes, 0, source, out=staging)
        landing.copy_(staging, non_blocking=True)
        pool.index_copy_(0, target, landing)

    yield "a copy a row", _wall_us(one_by_one)
    yield "gathered by the CPU, one copy", _wall_us(gathered)


def _wall_us(work: Callable[[], None]) -> float:
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def _span_us(work: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(start.elapsed_time(end))
