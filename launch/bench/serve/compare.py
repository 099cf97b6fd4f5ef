"""Two results side by side: ratios of what belongs together, and whether they are more than noise.

Runs are paired by their load, requests of detailed runs by their place in the dataset. A ratio is B over A; where there are several
pairs it is their geometric mean with an interval that resampling the pairs gives. One pair has no interval: nothing can be said of noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .charts import is_detailed
from .pareto import load_of

#: figures of whole runs: key, "higher" or "lower" is better
RUN_FIGURES = (
    ("request_throughput", "higher"),
    ("output_throughput", "higher"),
    ("total_token_throughput", "higher"),
    ("request_goodput", "higher"),
    ("mean_ttft_ms", "lower"),
    ("median_ttft_ms", "lower"),
    ("p99_ttft_ms", "lower"),
    ("mean_tpot_ms", "lower"),
    ("median_tpot_ms", "lower"),
    ("p99_tpot_ms", "lower"),
    ("p99_itl_ms", "lower"),
    ("mean_e2el_ms", "lower"),
    ("p99_e2el_ms", "lower"),
)
REQUEST_FIGURES = ("ttft", "tpot", "e2el")
#: resamplings of an interval, and the share of them that it holds
_DRAWS, _SHARE = 2000, 0.95
#: settings that two paired runs must share to be the same load
_SAME = ("dataset", "num_prompts", "total_input_tokens", "total_output_tokens", "burstiness")


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One figure of both."""

    name: str  # of the figure
    better: str  # "higher" or "lower"
    a: float  # geometric mean of A
    b: float  # geometric mean of B
    ratio: float  # B over A, of the pairs
    low: float | None  # the interval; None with fewer than three pairs
    high: float | None
    pairs: int

    @property
    def verdict(self) -> str:
        """What B is, as far as the pairs tell."""
        if self.low is None or self.high is None:
            return "-"
        if self.low <= 1.0 <= self.high:
            return "same within noise"
        return "better" if (self.ratio > 1.0) == (self.better == "higher") else "worse"

    def worse_than(self, share: float) -> bool:
        """Whether B is worse by more than ``share``, beyond noise where that is known."""
        edge = self.ratio
        if self.low is not None and self.high is not None:
            edge = self.high if self.better == "higher" else self.low
        return edge < 1.0 - share if self.better == "higher" else edge > 1.0 + share


def ratio_of(name: str, better: str, pairs: Sequence[tuple[float, float]], seed: int = 0) -> Ratio | None:
    """The ratio of pairs (A, B); None when there are no pairs of positive numbers."""
    good = [(a, b) for a, b in pairs if a and b and a > 0 and b > 0]
    if not good:
        return None
    logs = np.log(np.array(good))
    steps = logs[:, 1] - logs[:, 0]
    low = high = None
    if len(good) >= 3:
        draws = np.random.default_rng(seed).integers(0, len(good), (_DRAWS, len(good)))
        means = np.exp(np.sort(steps[draws].mean(1)))
        low, high = float(means[int(_DRAWS * (1 - _SHARE) / 2)]), float(means[int(_DRAWS * (1 + _SHARE) / 2) - 1])
    middle = np.exp(logs.mean(0))
    return Ratio(
        name=name,
        better=better,
        a=float(middle[0]),
        b=float(middle[1]),
        ratio=float(np.exp(steps.mean())),
        low=low,
        high=high,
        pairs=len(good),
    )


def pair_runs(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Runs of the same load, in the order of A; the first with the first where a load was run several times.

    Raises:
        ValueError: no load is in both; the loads of each are told.
    """
    rest = list(b)
    found = []
    for run in a:
        mate = next((other for other in rest if load_of(other) == load_of(run)), None)
        if mate is not None:
            rest.remove(mate)
            found.append((run, mate))
    if not found:
        loads = ["; ".join(dict.fromkeys(map(load_of, runs))) for runs in (a, b)]
        raise ValueError(f"nothing to compare: A ran ({loads[0]}), B ran ({loads[1]})")
    return found


def differences(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """What differs in the load of paired runs: then a ratio is of other work, too."""
    found: dict[str, None] = {}
    for a, b in pairs:
        for key in _SAME:
            if key in a and key in b and a[key] != b[key]:
                found[f"{load_of(a)}: {key} is {a[key]} in A and {b[key]} in B"] = None
        for name, run in (("A", a), ("B", b)):
            if run.get("failed"):
                found[f"{load_of(a)}: {run['failed']} requests failed in {name}"] = None
    return list(found)


def run_ratios(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[Ratio]:
    """Ratios of the figures that all paired runs have."""
    found = [ratio_of(key, better, [(a.get(key) or 0.0, b.get(key) or 0.0) for a, b in pairs]) for key, better in RUN_FIGURES]
    return [ratio for ratio in found if ratio is not None]


def request_ratios(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[Ratio]:
    """Ratios over requests, where both runs hold theirs and they were as many."""
    both: dict[str, list[tuple[float, float]]] = {name: [] for name in REQUEST_FIGURES}
    for a, b in pairs:
        if not (is_detailed(a) and is_detailed(b)) or len(a["errors"]) != len(b["errors"]):
            continue
        for i in range(len(a["errors"])):
            one, two = _request(a, i), _request(b, i)
            if one and two:
                for name in both:
                    both[name].append((one[name], two[name]))
    found = [ratio_of(f"{name} of each request", "lower", values) for name, values in both.items()]
    return [ratio for ratio in found if ratio is not None]


def _request(run: dict[str, Any], i: int) -> dict[str, float] | None:
    """Latencies of a request; None when it failed."""
    if run["errors"][i]:
        return None
    ttft, latency, made = run["ttfts"][i], run["latencies"][i], run["output_lens"][i]
    return {"ttft": ttft, "e2el": latency, "tpot": (latency - ttft) / (made - 1) if made > 1 else 0.0}
