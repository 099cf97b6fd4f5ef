"""Times of the four halves of dispatch and combine: by events inside a replayed graph, around eager calls, or by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....comm.dispatcher import Dispatcher, Routed
from .cases import Case, Inputs, Traffic
from .crew import Crew

HALVES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
_GRAPH_TRIPS = 8  # in a graph
_WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Medians of the slowest rank, in microseconds. Of virtual ranks: of one of them, on average."""

    halves: tuple[float, ...]  # as in ``HALVES``, see ``without_events``
    trip: float  # all of them without an event in between
    graph: bool  # replayed
    traffic: Traffic  # of rank 0
    counted: tuple[int, ...]  # bytes that rank 0's dispatcher says it sent to each rank in one trip, results among them

    @property
    def dispatch(self) -> float:
        """Both halves."""
        return self.halves[0] + self.halves[1]

    @property
    def combine(self) -> float:
        """Both halves."""
        return self.halves[2] + self.halves[3]


class Trips:
    """Dispatch and combine of all ranks of this process, with outputs of experts that are there already."""

    def __init__(self, crew: Crew, case: Case, dispatchers: list[Dispatcher]) -> None:
        self.dispatchers = dispatchers
        self.spec = case.spec(crew.size)
        self.inputs = [Inputs.make(self.spec, rank, case.tokens, crew.device) for rank in crew.mine]
        rank_layout = case.backend not in ("torch", "torch_node")
        self.layout = "rank" if rank_layout else "contiguous"
        shape = (crew.size * case.tokens, case.hidden)
        self.y = torch.randn(shape, device=crew.device).to(torch.bfloat16) if rank_layout else None
        self.out = [torch.empty(case.tokens, case.hidden, dtype=torch.bfloat16, device=crew.device) for _ in crew.mine]

    def run(self, mark: Callable[[], Any] | None = None) -> None:
        """One trip; ``mark`` is called before, between and behind its halves."""
        tell = mark or (lambda: None)
        tell()
        tickets = [d.dispatch_send(i.x, i.ids, i.weights) for d, i in zip(self.dispatchers, self.inputs, strict=True)]
        tell()
        routed = [d.dispatch_recv(t, layout=self.layout) for d, t in zip(self.dispatchers, tickets, strict=True)]
        tell()
        tickets = [d.combine_send(self._outputs(d, r), r) for d, r in zip(self.dispatchers, routed, strict=True)]
        tell()
        for d, t, out in zip(self.dispatchers, tickets, self.out, strict=True):
            d.combine_recv(t, out)
        tell()

    def _outputs(self, dispatcher: Any, routed: Routed) -> torch.Tensor:
        """Where experts would have written: straight where the others fetch results from, if the backend can do that."""
        if self.y is None:
            return routed.x
        place = dispatcher.results(routed) if hasattr(dispatcher, "results") else None
        return self.y if place is None else place


def measure(crew: Crew, case: Case, *, repeat: int = 20) -> Timing:
    """Time ``case``. Collective over the crew.

    Raises:
        ValueError: the backend cannot have this case.
        DispatchTimeout: a rank did not come.
    """
    dispatchers = crew.dispatchers(case.backend, case.spec(crew.size))
    try:
        trips = Trips(crew, case, dispatchers)
        before = dispatchers[0].bytes_sent()
        trips.run()
        crew.meet()
        counted = tuple(b - a for a, b in zip(before, dispatchers[0].bytes_sent(), strict=True))
        for _ in range(_WARM_UP):
            trips.run()
        graph = crew.device.type == "cuda" and dispatchers[0].caps.graph
        if graph:
            halves, trip = _replayed(crew, trips, repeat)
        elif crew.device.type == "cuda":
            halves, trip = _eager(crew, trips, repeat)
        else:
            halves, trip = _by_the_clock(crew, trips, repeat)
        for dispatcher in dispatchers:
            dispatcher.health(wait=True)
        *halves, trip = crew.worst([value / len(crew.mine) for value in (*without_events(halves, trip), trip)])
        traffic = Traffic.of(trips.spec, crew.mine[0], trips.inputs[0].ids)
        return Timing(halves=tuple(halves), trip=trip, graph=graph, traffic=traffic, counted=counted)
    finally:
        for dispatcher in dispatchers:
            dispatcher.close()


def without_events(halves: Sequence[float], trip: float) -> list[float]:
    """``halves`` less what measuring them took: an event costs the same wherever it stands, all of them what the trip lacks."""
    each = max(0.0, sum(halves) - trip) / len(halves)
    return [max(0.0, value - each) for value in halves]


def _event(**more: bool) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, **more)  # type: ignore[no-untyped-call]


def _medians(marks: list[list[float]]) -> list[float]:
    return [statistics.median(times) for times in zip(*marks, strict=True)]


def _replayed(crew: Crew, trips: Trips, repeat: int) -> tuple[list[float], float]:
    """Two graphs of several trips: with event nodes between the halves, and without."""
    events: list[list[torch.cuda.Event]] = []

    def mark() -> None:
        event = _event(external=True)
        event.record()
        events[-1].append(event)

    def marked() -> None:
        for _ in range(_GRAPH_TRIPS):
            events.append([])
            trips.run(mark)

    def plain() -> None:
        for _ in range(_GRAPH_TRIPS):
            trips.run()

    with_events, without = _capture(crew, marked), _capture(crew, plain)
    halves, whole = [], []
    for turn in range(repeat + 1):
        crew.meet()
        with_events.replay()
        crew.meet()
        start, end = _event(), _event()
        start.record()
        without.replay()
        end.record()
        torch.cuda.synchronize()
        if turn:
            halves += [[1000 * a.elapsed_time(b) for a, b in zip(line, line[1:], strict=False)] for line in events]
            whole.append(1000 * start.elapsed_time(end) / _GRAPH_TRIPS)
    return _medians(halves), statistics.median(whole)


def _capture(crew: Crew, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    crew.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    crew.meet()
    return graph


def _eager(crew: Crew, trips: Trips, repeat: int) -> tuple[list[float], float]:
    halves, whole = [], []
    for _ in range(repeat):
        events: list[torch.cuda.Event] = []

        def mark(events: list[torch.cuda.Event] = events) -> None:
            events.append(_event())
            events[-1].record()

        crew.meet()
        trips.run(mark)
        crew.meet()
        halves.append([1000 * a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)])
        whole.append(1000 * events[0].elapsed_time(events[-1]))
    return _medians(halves), statistics.median(whole)


def _by_the_clock(crew: Crew, trips: Trips, repeat: int) -> tuple[list[float], float]:
    halves, whole = [], []
    for _ in range(repeat):
        marks: list[float] = []
        crew.meet()
        trips.run(lambda marks=marks: marks.append(1e6 * time.perf_counter()))  # type: ignore[misc]
        halves.append([b - a for a, b in zip(marks, marks[1:], strict=False)])
        whole.append(marks[-1] - marks[0])
    return _medians(halves), statistics.median(whole)
