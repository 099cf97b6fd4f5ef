"""A Chrome trace of a few steps as times by part, and the time in which the device idled."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .ranges import MODULE, PART

STEP = "rorqual.step"
#: parts of a step, in the order of reports
PARTS = ("attention", "indexer", "top-k", "MoE", "linear", "sampling", "communication", "other")
#: part -> what the names of its kernels match; the first that fits counts, where no range says better
_KERNELS = (
    ("top-k", r"topk|top_k|radix"),
    ("indexer", r"index_(query|write)|indexer|write_index|mqa_logits"),
    ("sampling", r"greedy|arg_?max|sampl"),
    ("MoE", r"moe|expert|route|grouped|permute|segment_blocks"),
    ("attention", r"attention|sparse_(decode|prefill)|dense_decode|flash|mla|latent|query_rope"),
    ("linear", r"gemm|gemv|matmul|nvjet|cutlass|cublas|splitk|quantise|silu_mul"),
)
_RULES = {part: re.compile(pattern, re.IGNORECASE) for part, pattern in _KERNELS}
_COMMUNICATION = re.compile(
    r"nccl|nvshmem|all_?reduce|all_?gather|all_?to_?all|send_tokens|receive_tokens|send_home|sum_home", re.IGNORECASE
)
Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """A decode step, averaged over those traced."""

    steps: int  # steps averaged
    graph_steps: int  # of them, those replayed from a graph
    step_us: float  # from the first work of a step on the device to that of the next
    parts_us: dict[str, float]  # device time by part; a kernel that came in early counts from the end of the one before it
    host_gap: float  # share of the step in which the device idled for want of work from the host, 0 to 1
    idle: float  # share in which it idled for any reason, those short gaps between kernels included
    kernels_us: dict[str, float]  # device time of the heaviest kernels, counted likewise

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))

    def table(self) -> str:
        """For people."""
        lines = [f"decode step {self.step_us:.0f} us ({self.graph_steps} of {self.steps} steps from a CUDA graph)"]
        for part, us in self.parts_us.items():
            if us:
                lines.append(f"  {part:14s} {us:9.1f} us {100 * us / self.step_us:5.1f} %")
        lines.append(f"  host gap {100 * self.host_gap:.1f} % of the step, device idle {100 * self.idle:.1f} %")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One kernel or copy on the device, times in microseconds."""

    start: float
    end: float
    name: str
    launch: float  # when the host called for it
    call: int  # number of that call; the kernels of a graph share it
    graph: bool  # the call was the launch of a graph
    step: int  # index of the step that launched it
    part: str
    stream: int = 0


class Attribution:
    """Parts of the kernels of a graph, learnt from the same launches made one by one under ranges."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._parts: dict[str, list[str]] = {}  # of each kernel's launches, in order
        for work in works:
            self._parts.setdefault(work.name, []).append(work.part)

    def apply(self, works: Sequence[Work]) -> list[str]:
        """Parts of the kernels of one replay, where several queues may mix their order: of one kernel as often launched by place."""
        seen: dict[str, int] = {}
        counts = Counter(work.name for work in works)
        found = []
        for work in works:
            parts, place = self._parts.get(work.name, [work.part]), seen.get(work.name, 0)
            found.append(parts[place if counts[work.name] == len(parts) else -1])
            seen[work.name] = place + 1
        return found


def part_of(kernel: str, inside: str | None) -> str:
    """The part that a kernel belongs to: that of the range ``inside`` which it was launched, else by its name."""
    if _COMMUNICATION.search(kernel):
        return "communication"
    if inside is not None and inside.startswith(PART):
        return inside[len(PART) :]
    if inside is not None and not _RULES["linear"].search(kernel):
        return inside[len(MODULE) :]
    return next((part for part, rule in _RULES.items() if rule.search(kernel)), "other")


class _Ranges:
    """Ranges of one kind on the host's time line; nested ones give the innermost."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._ranges = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"]), str(e["name"])) for e in events)
        self._starts = [r[0] for r in self._ranges]

    def at(self, time: float, *, reach: int = 256) -> tuple[int, str] | None:
        """(index, name) of the latest range begun that holds ``time``."""
        place = bisect_right(self._starts, time) - 1
        for index in range(place, max(-1, place - reach), -1):
            if self._ranges[index][1] >= time:
                return index, self._ranges[index][2]
        return None


def works(events: Sequence[Event]) -> list[Work]:
    """Work on the device that the traced steps launched, by start."""
    notes = [e for e in events if e.get("cat") == "user_annotation" and "dur" in e]
    steps = _Ranges([e for e in notes if e["name"] == STEP])
    parts = _Ranges([e for e in notes if e["name"].startswith((MODULE, PART))])
    calls = {
        e["args"]["correlation"]: (float(e["ts"]), "GraphLaunch" in e["name"])
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    found = []
    for e in events:
        call = e.get("args", {}).get("correlation")
        if e.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset") or call not in calls:
            continue
        launch, graph = calls[call]
        step = steps.at(launch)
        if step is None:
            continue
        inside = None if graph else parts.at(launch)
        part = part_of(e["name"], None if inside is None else inside[1])
        start = float(e["ts"])
        end = start + float(e["dur"])
        stream = int(e["args"].get("stream", 0))
        found.append(
            Work(start=start, end=end, name=e["name"], launch=launch, call=call, graph=graph, step=step[0], part=part, stream=stream)
        )
    return sorted(found, key=lambda w: w.start)


def _attribute(found: list[Work], attribution: Attribution | None) -> dict[tuple[int, float], str]:
    """(call, start) -> part, for the kernels of graphs."""
    calls: dict[int, list[Work]] = {}
    for work in found:
        if work.graph and attribution is not None:
            calls.setdefault(work.call, []).append(work)
    parts: dict[tuple[int, float], str] = {}
    for mine in calls.values():
        assert attribution is not None
        parts |= {(w.call, w.start): part for w, part in zip(mine, attribution.apply(mine), strict=True)}
    return parts


def analyse(events: Sequence[Event], from_graph: Sequence[bool], attribution: Attribution | None = None) -> StepProfile | None:
    """A step's average from a trace; ``from_graph`` says which steps were replays. None without two steps of work.

    A gap is the host's when the work after it was called for only after the device had run dry, or when a step or a graph
    begins with it: only gaps between kernels that were queued in time are the device's own.
    """
    found = works(events)
    first: dict[int, float] = {}
    for work in found:
        first.setdefault(work.step, work.start)
    if len(first) < 2:
        return None
    order = sorted(first)
    begin, end, count = first[order[0]], first[order[-1]], len(order) - 1
    idle, host = _gaps(found, begin, end)
    parts, kernels = dict.fromkeys(PARTS, 0.0), dict[str, float]()
    known = _attribute(found, attribution)
    for work, own in zip(found, _own_us(found), strict=True):
        if work.step != order[-1]:
            us = own / count
            parts[known.get((work.call, work.start), work.part)] += us
            kernels[work.name] = kernels.get(work.name, 0.0) + us
    return StepProfile(
        steps=count,
        graph_steps=sum(from_graph[step] for step in order[:-1] if step < len(from_graph)),
        step_us=(end - begin) / count,
        parts_us=parts,
        host_gap=host / (end - begin),
        idle=idle / (end - begin),
        kernels_us=dict(sorted(kernels.items(), key=lambda item: -item[1])[:40]),
    )


def _own_us(found: Sequence[Work]) -> list[float]:
    """Microseconds of each: one that came in while the one before it on its stream still ran only waited for its end."""
    until: dict[int, float] = {}
    own = []
    for work in found:
        busy = until.get(work.stream, work.start)
        own.append(max(0.0, work.end - max(work.start, busy)))
        until[work.stream] = max(busy, work.end)
    return own


def _gaps(found: Sequence[Work], begin: float, end: float) -> tuple[float, float]:
    """Microseconds from ``begin`` to ``end`` in which nothing ran, and those of them that the host is to blame for."""
    busy_until, idle, host = begin, 0.0, 0.0
    before = found[0]
    for work in found:
        if work.start > end:
            break
        gap = work.start - busy_until
        if gap > 0:
            idle += gap
            boundary = work.step != before.step or (work.graph and work.call != before.call)
            host += gap if boundary or work.launch > busy_until else 0.0
        if work.end > busy_until:
            busy_until, before = work.end, work
    return idle, host
