"""Times of GPU work: by replay of a captured graph, or by events around launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]


def graph_us(calls: Sequence[Call] | Call, *, repeat: int = 10, replays: int = 20) -> float:
    """Median microseconds of one call: a graph of ``repeat`` rounds over ``calls`` (different inputs defeat the L2), replayed."""
    calls = [calls] if callable(calls) else list(calls)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeat):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    return _median(graph.replay, replays) / (repeat * len(calls))


def event_us(calls: Sequence[Call] | Call, *, repeat: int = 20) -> float:
    """Median microseconds of one call launched on its own, launch gaps of short kernels included."""
    calls = [calls] if callable(calls) else list(calls)
    for call in calls:
        call()

    def every() -> None:
        for call in calls:
            call()

    return _median(every, repeat) / len(calls)


def _median(work: Call, count: int) -> float:
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]  # type: ignore[no-untyped-call]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(1000.0 * start.elapsed_time(end) for start, end in events))
