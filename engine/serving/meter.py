"""What becomes of requests, in numbers: kept on rank 0, where every token of every replica passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

from .histogram import LATENCY, REQUEST_TOKENS, TPOT, TTFT, Histogram

#: histograms of requests, by the metric's name
REQUEST_HISTOGRAMS = {
    "time_to_first_token_seconds": TTFT,
    "inter_token_latency_seconds": TPOT,
    "request_time_per_output_token_seconds": TPOT,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prompt_tokens": REQUEST_TOKENS,
    "request_generation_tokens": REQUEST_TOKENS,
}


class _Replica:
    """Requests of one DP rank."""

    __slots__ = ("cached_tokens", "gaps", "generation_tokens", "histograms", "open", "prompt_tokens", "ended", "routed", "ttft")

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = self.open = self.routed = 0
        self.ended: Counter[str] = Counter()  # by reason
        self.histograms = {name: Histogram(bounds) for name, bounds in REQUEST_HISTOGRAMS.items()}
        self.ttft, self.gaps = self.histograms["time_to_first_token_seconds"], self.histograms["inter_token_latency_seconds"]


class _Open:
    """One completion under way."""

    __slots__ = ("arrived", "first", "last", "n", "prompt_tokens", "replica", "scheduled")

    def __init__(self, prompt_tokens: int, arrived: float, replica: _Replica) -> None:
        self.prompt_tokens, self.arrived, self.replica = prompt_tokens, arrived, replica
        self.scheduled: float | None = None
        self.first = self.last = 0.0  # times of its first and its latest token
        self.n = 0  # tokens so far


class Meter:
    """Times and counts of completions. All times are seconds of one clock (``time.monotonic``); unknown names are ignored.

    ``name`` is what the caller knows a completion by. About a microsecond a token; nothing is kept of what has ended.
    """

    def __init__(self, dp: int) -> None:
        """``dp``: replicas."""
        self._replicas = [_Replica() for _ in range(dp)]
        self._open: dict[Hashable, _Open] = {}
        self._refused: Counter[int] = Counter()  # by HTTP status

    @property
    def n_open(self) -> int:
        """Completions that have not ended."""
        return len(self._open)

    @property
    def activity(self) -> object:
        """Something that differs from what it was before whenever anything has happened."""
        counts = tuple((found.routed, found.generation_tokens, found.open) for found in self._replicas)
        return counts, self._refused.total()

    def arrived(self, name: Hashable, prompt_tokens: int, at: float, dp_rank: int) -> None:
        """A completion was given to a replica. ``at``: when the whole request was there, in the HTTP process."""
        replica = self._replicas[dp_rank]
        replica.open += 1
        replica.routed += 1
        self._open[name] = _Open(prompt_tokens, at, replica)

    def scheduled(self, name: Hashable, at: float) -> None:
        """Its first step began; later calls (after a preemption) change nothing."""
        found = self._open.get(name)
        if found is not None and found.scheduled is None:
            found.scheduled = at

    def tokens(self, name: Hashable, n: int, now: float) -> None:
        """``n`` more tokens of it have come; 0 changes nothing."""
        found = self._open.get(name)
        if found is None or not n:
            return
        replica = found.replica
        if found.n:
            replica.gaps.add(now - found.last)
        else:
            replica.ttft.add(now - found.arrived)
            replica.prompt_tokens += found.prompt_tokens
            found.first = now
        found.last = now
        found.n += n
        replica.generation_tokens += n

    def ended(self, name: Hashable, reason: str, now: float, cached_tokens: int = 0) -> None:
        """It has ended with ``reason``, of which ``cached_tokens`` prompt tokens came from a cache."""
        found = self._open.pop(name, None)
        if found is None:
            return
        replica, hists = found.replica, found.replica.histograms
        replica.open -= 1
        replica.ended[reason] += 1
        replica.cached_tokens += cached_tokens
        hists["e2e_request_latency_seconds"].add(now - found.arrived)
        hists["request_prompt_tokens"].add(found.prompt_tokens)
        hists["request_generation_tokens"].add(found.n)
        if not found.n:
            return
        started = found.arrived if found.scheduled is None else min(found.scheduled, found.first)
        hists["request_queue_time_seconds"].add(max(0.0, started - found.arrived))
        hists["request_prefill_time_seconds"].add(found.first - started)
        hists["request_decode_time_seconds"].add(found.last - found.first)
        hists["request_inference_time_seconds"].add(found.last - started)
        if found.n > 1:
            hists["request_time_per_output_token_seconds"].add((found.last - found.first) / (found.n - 1))

    def refused(self, status: int) -> None:
        """A request was not taken; ``status``: what HTTP says."""
        self._refused[status] += 1

    def forget(self, dp_rank: int | None = None) -> None:
        """Completions under way (of one replica) will not end any more: they leave no trace but their tokens."""
        gone = [name for name, found in self._open.items() if dp_rank is None or found.replica is self._replicas[dp_rank]]
        for name in gone:
            self._open.pop(name).replica.open -= 1

    def replica(self, dp_rank: int) -> dict[str, Any]:
        """Numbers of one replica's completions, as plain values."""
        found = self._replicas[dp_rank]
        return {
            "open": found.open,
            "routed": found.routed,
            "prompt_tokens": found.prompt_tokens,
            "cached_prompt_tokens": found.cached_tokens,
            "generation_tokens": found.generation_tokens,
            "ended": dict(found.ended),
            "histograms": {name: histogram.to_wire() for name, histogram in found.histograms.items()},
        }

    def all_replicas(self) -> dict[str, Any]:
        """Numbers that belong to no replica."""
        return {"refused": {str(status): count for status, count in self._refused.items()}}
