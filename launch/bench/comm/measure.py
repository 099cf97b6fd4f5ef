"""Times of the four halves of dispatch and combine: by events inside a replayed graph, around eager calls, or by the clock.

Ranks are let go by a message of the host, tens of microseconds apart. So whatever is timed follows a trip that is not: an exchange
ends on all ranks at nearly the same time, and the next one begins there.
"""

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
_EAGER_TRIPS = 4  # one behind the other
_WARM_UP = 3
_SETS = 4  # tokens and choices that trips take in turn
_GRAPH, _EAGER, _CLOCK = "graph replay", "eager", "clock"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Medians of the slowest rank, in microseconds. Of virtual ranks: of one of them, on average."""

    halves: tuple[float, ...]  # as in ``HALVES``, see ``without_events``; each of the rank that took longest for it
    dispatch: float  # both halves of one rank: less than the sum of ``halves`` where one rank waits for another
    combine: float  # likewise
    trip: float  # all of them without an event in between
    timed: str  # graph replay, eager (launches by the host included), or clock
    fetched: bool  # results are fetched from where experts wrote them, which the engine's experts do not do; else they are sent
    traffic: Traffic  # of rank 0
    counted: tuple[int, ...]  # bytes that rank 0's dispatcher says it sent to each rank in one trip, results among them
    link_bytes: tuple[int, int]  # of them over links to other ranks: of the dispatch, of the combine

    @property
    def graph(self) -> bool:
        """Replayed from a graph."""
        return self.timed == _GRAPH


class Trips:
    """Dispatch and combine of all ranks of this process, with outputs of experts that are there already."""

    def __init__(self, crew: Crew, case: Case, dispatchers: list[Dispatcher]) -> None:
        self.dispatchers = dispatchers
        self.spec = case.spec(crew.size)
        self.inputs = [[Inputs.make(self.spec, rank, case.tokens, crew.device, turn) for rank in crew.mine] for turn in range(_SETS)]
        self._turn = 0
        self.fetched = False
        rank_layout = case.backend not in ("torch", "torch_node")
        self.layout = "rank" if rank_layout else "contiguous"
        shape = (crew.size * case.tokens, case.hidden)
        self.y = torch.randn(shape, device=crew.device).to(torch.bfloat16) if rank_layout else None
        self.out = [torch.empty(case.tokens, case.hidden, dtype=torch.bfloat16, device=crew.device) for _ in crew.mine]

    def run(self, mark: Callable[[], Any] | None = None) -> None:
        """One trip; ``mark`` is called before, between and behind its halves."""
        tell, inputs = mark or (lambda: None), self.inputs[self._turn % _SETS]
        self._turn += 1
        tell()
        tickets = [d.dispatch_send(i.x, i.ids, i.weights) for d, i in zip(self.dispatchers, inputs, strict=True)]
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
        self.fetched = place is not None
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
        traffic = Traffic.of(trips.spec, crew.mine[0], trips.inputs[0][0].ids)
        counted = _counted(trips)
        crew.meet()
        for _ in range(_WARM_UP):
            trips.run()
        timed = _CLOCK
        if crew.device.type == "cuda":
            timed = _GRAPH if dispatchers[0].caps.graph else _EAGER
        lines, whole = {_GRAPH: _replayed, _EAGER: _eager, _CLOCK: _by_the_clock}[timed](crew, trips, repeat)
        for dispatcher in dispatchers:
            dispatcher.health(wait=True)
        *halves, dispatch, combine, trip = crew.worst([value / len(crew.mine) for value in figures(lines, whole)])
        return Timing(
            halves=tuple(halves), dispatch=dispatch, combine=combine, trip=trip, timed=timed, fetched=trips.fetched, traffic=traffic,
            counted=tuple(map(sum, zip(*counted, strict=True))), link_bytes=_link_bytes(counted, traffic),
        )  # fmt: skip
    finally:
        for dispatcher in dispatchers:
            dispatcher.close()


def _counted(trips: Trips) -> tuple[list[int], list[int]]:
    """Bytes to each rank of one dispatch and one combine, as the first dispatcher of this process counts them."""
    marks: list[list[int]] = []
    trips.run(lambda: marks.append(list(trips.dispatchers[0].bytes_sent())))
    start, middle, end = marks[0], marks[2], marks[4]
    return [b - a for a, b in zip(start, middle, strict=True)], [b - a for a, b in zip(middle, end, strict=True)]


def _link_bytes(counted: tuple[list[int], list[int]], traffic: Traffic) -> tuple[int, int]:
    """What was counted; what the format says where a library does not count."""
    dispatch, combine = (sum(each) for each in counted)
    return dispatch or traffic.dispatch, combine or traffic.combine


def figures(lines: Sequence[Sequence[float]], whole: Sequence[float]) -> list[float]:
    """Medians of one rank: the four halves, dispatch, combine, and the trip.

    Args:
        lines: the halves of every trip with events between them.
        whole: trips without.
    """
    trip, halves = statistics.median(whole), _medians(lines)
    left = without_events(halves, trip)
    events = sum(halves) - sum(left)  # what the four of them took
    pairs = [statistics.median(line[at] + line[at + 1] for line in lines) for at in (0, 2)]
    return [*left, *(max(0.0, pair - events / 2) for pair in pairs), trip]


def without_events(halves: Sequence[float], trip: float) -> list[float]:
    """``halves`` less what measuring them took: an event costs the same wherever it stands, all of them what the trip lacks."""
    each = max(0.0, sum(halves) - trip) / len(halves)
    return [max(0.0, value - each) for value in halves]


def _event(**more: bool) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, **more)  # type: ignore[no-untyped-call]


def _medians(marks: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(times) for times in zip(*marks, strict=True)]


def _replayed(crew: Crew, trips: Trips, repeat: int) -> tuple[list[list[float]], list[float]]:
    """Two graphs of several trips behind one that is not timed: with event nodes between the halves, and around all of them only."""
    events: list[list[torch.cuda.Event]] = []
    around: list[torch.cuda.Event] = []

    def mark(line: list[torch.cuda.Event]) -> None:
        event = _event(external=True)
        event.record()
        line.append(event)

    def marked() -> None:
        trips.run()
        for _ in range(_GRAPH_TRIPS):
            line: list[torch.cuda.Event] = []
            trips.run(lambda line=line: mark(line))  # type: ignore[misc]
            events.append(line)

    def plain() -> None:
        trips.run()
        mark(around)
        for _ in range(_GRAPH_TRIPS):
            trips.run()
        mark(around)

    with_events, without = _capture(crew, marked), _capture(crew, plain)
    lines, whole = [], []
    for turn in range(repeat + 1):
        crew.meet()
        with_events.replay()
        crew.meet()
        without.replay()
        torch.cuda.synchronize()
        if turn:
            lines += [_between(line) for line in events]
            whole.append(_between(around)[0] / _GRAPH_TRIPS)
    return lines, whole


def _between(events: Sequence[torch.cuda.Event]) -> list[float]:
    """Microseconds from each event to the next."""
    return [1000 * a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def _capture(crew: Crew, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    crew.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    crew.meet()
    return graph


def _eager(crew: Crew, trips: Trips, repeat: int) -> tuple[list[list[float]], list[float]]:
    """As ``_replayed``, launched one by one: what the host takes longer than the device counts too."""
    lines, whole = [], []
    for _ in range(repeat):
        events: list[torch.cuda.Event] = []

        def mark(events: list[torch.cuda.Event] = events) -> None:
            events.append(_event())
            events[-1].record()

        crew.meet()
        trips.run()
        for _ in range(_EAGER_TRIPS):
            trips.run(mark)
        crew.meet()
        trips.run()
        mark()
        for _ in range(_EAGER_TRIPS):
            trips.run()
        mark()
        crew.meet()
        per_trip = len(HALVES) + 1
        lines += [_between(events[at : at + per_trip]) for at in range(0, per_trip * _EAGER_TRIPS, per_trip)]
        whole.append(_between(events[-2:])[0] / _EAGER_TRIPS)
    return lines, whole


def _by_the_clock(crew: Crew, trips: Trips, repeat: int) -> tuple[list[list[float]], list[float]]:
    lines, whole = [], []
    for _ in range(repeat):
        marks: list[float] = []
        crew.meet()
        trips.run()
        trips.run(lambda marks=marks: marks.append(1e6 * time.perf_counter()))  # type: ignore[misc]
        lines.append([b - a for a, b in zip(marks, marks[1:], strict=False)])
        whole.append(marks[-1] - marks[0])
    return lines, whole
