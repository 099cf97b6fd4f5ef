"""Counts of values by size, cheap enough to be kept for every token, and the bounds that each metric uses."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

#: seconds from the arrival of a request to its first token
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
#: seconds from one token to the next
TPOT = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
#: seconds of a request, or of a part of its life
LATENCY = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
#: seconds of a step
STEP = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
#: tokens of a step
STEP_TOKENS = (0.0, 1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
#: tokens of a request
REQUEST_TOKENS = tuple(float(lead * 10**power) for power in range(6) for lead in (1, 2, 5))


class Histogram:
    """How many values fell into each bucket, and their sum. Bucket i holds those in (bounds[i - 1], bounds[i]]; one more holds the rest."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds rise"
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def total(self) -> int:
        """Values counted."""
        return sum(self.counts)

    def to_wire(self) -> dict[str, Any]:
        """Plain values for a message: the upper bounds, a count for each and one for larger values, and the sum of all values."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Histograms in the form of ``Histogram.to_wire`` with the same bounds, added up.

    Raises:
        ValueError: bounds differ, or there is nothing to add up.
    """
    if not parts:
        raise ValueError("no histograms to add up")
    bounds = list(parts[0]["bounds"])
    if any(list(part["bounds"]) != bounds for part in parts):
        raise ValueError("histograms with different bounds cannot be added up")
    counts = [sum(column) for column in zip(*(part["counts"] for part in parts), strict=True)]
    return {"bounds": bounds, "counts": counts, "sum": sum(part["sum"] for part in parts)}


def difference(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a histogram got since ``before``; all of it when there is no earlier state, or the counts began anew since."""
    if before is None or any(a < b for a, b in zip(now["counts"], before["counts"], strict=True)):
        return dict(now)
    counts = [a - b for a, b in zip(now["counts"], before["counts"], strict=True)]
    return {"bounds": now["bounds"], "counts": counts, "sum": now["sum"] - before["sum"]}


def mean(histogram: Mapping[str, Any]) -> float | None:
    """Mean of the values; None without any."""
    total = sum(histogram["counts"])
    return histogram["sum"] / total if total else None


def quantile(histogram: Mapping[str, Any], share: float) -> float | None:
    """The value below which ``share`` (0 to 1) of all values lie, assumed to be spread evenly in their bucket; None without any.

    Values beyond the last bound count as that bound.
    """
    counts, bounds = histogram["counts"], histogram["bounds"]
    rank = share * sum(counts)
    if not sum(counts):
        return None
    below = 0
    for place, count in enumerate(counts[:-1]):
        if count and below + count >= rank:
            low = bounds[place - 1] if place else min(0.0, bounds[0])
            return float(low + (bounds[place] - low) * max(0.0, rank - below) / count)
        below += count
    return float(bounds[-1])
