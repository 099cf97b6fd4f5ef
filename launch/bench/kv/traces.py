"""Which positions a decode step's indexer chooses, step after step: a seeded model with the locality that was published.

A position's index score is a sum of independent Gaussian parts: one that never changes, two that drift (AR(1) in the step), noise
of the step, and one tied to the distance between position and query instead of to the position. The first tokens and the last
ones score higher. A step chooses its ``k`` highest scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_SINK_BONUS = 10.0  # standard deviations, roughly: sinks are always chosen
_RECENT_BONUS = 6.0  # of the last token; falls linearly to 0 over ``recent`` tokens


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Weights (standard deviations) of the parts of a score, and the sizes."""

    name: str
    context: int = 65_536  # positions at the first step; each step adds one
    k: int = 2048  # positions chosen
    seed: int = 0
    fixed: float = 0.0  # relevance that never changes
    slow: float = 0.0  # relevance that drifts slowly
    slow_keep: float = 0.99  # its correlation from step to step
    quick: float = 0.0  # relevance that drifts quickly
    quick_keep: float = 0.8
    noise: float = 0.0  # new in every step
    relative: float = 0.0  # tied to the distance from the query, so that choices move on by one position a step
    smooth: int = 1  # neighbouring distances whose relative parts overlap
    sinks: int = 4
    recent: float = 1 / 32  # of k: the last tokens that score higher

    def __post_init__(self) -> None:
        if not 1 <= self.k <= self.context:
            raise ValueError(f"a trace chooses 1 to {self.context} of {self.context} positions, found k = {self.k}")
        for name in ("slow_keep", "quick_keep"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is a correlation and must be in [0, 1), found {getattr(self, name)}")


#: fitted to six figures published for GLM-5.1 with k 2048 (misses of LRU 30 / 13.4 / 6.7% with k / 2k / 4k rows; at 2k FIFO 17.2,
#: random 16.1, Belady 8.2%)
PUBLISHED = TraceConfig(
    name="published", fixed=0.642, slow=0.688, slow_keep=0.9786, quick=0.301, quick_keep=0.7295, noise=0.147
)  # fmt: skip
#: the same figures by other parts: shows what does not follow from the figures
PUBLISHED_FIXED = TraceConfig(
    name="published, less drift", fixed=0.793, slow=0.267, slow_keep=0.9989, quick=0.523, quick_keep=0.8849, noise=0.160
)  # fmt: skip
#: 35 to 50% of a choice is in the next one, more after moving it on by one position: published for DeepSeek-V3.2 on an agent's task
HARD = TraceConfig(name="hard", fixed=0.2, slow=0.2, slow_keep=0.9, noise=0.25, relative=0.92, smooth=6)

#: what a fit is held against, misses in percent
PUBLISHED_MISSES = {("lru", 1): 30.0, ("lru", 2): 13.4, ("lru", 4): 6.7, ("fifo", 2): 17.2, ("random", 2): 16.1, ("belady", 2): 8.2}


@dataclass(frozen=True)
class Selection:
    """One step of one layer and request."""

    scores: Floats  # [positions], index scores of all positions
    chosen: Ints  # [k], the chosen, ascending


def scaled(config: TraceConfig, *, context: int, k: int | None = None, seed: int | None = None) -> TraceConfig:
    """The same process over another context."""
    return replace(config, context=context, k=config.k if k is None else k, seed=config.seed if seed is None else seed)


def steps(config: TraceConfig, count: int) -> Iterator[Selection]:
    """``count`` consecutive steps; the first has ``config.context`` positions."""
    draw = np.random.Generator(np.random.SFC64(config.seed))
    total = config.context + count

    def normal(n: int) -> Floats:
        return draw.standard_normal(n, dtype=np.float32)

    fixed = normal(total) * np.float32(config.fixed)
    relative = _smoothed(normal(total + count + config.smooth), config.smooth) * np.float32(config.relative)
    parts = [
        (weight, keep, normal(total)) for weight, keep in ((config.slow, config.slow_keep), (config.quick, config.quick_keep)) if weight
    ]
    recent = max(1, int(config.recent * config.k))
    bonus = np.linspace(0.0, _RECENT_BONUS, recent, dtype=np.float32)
    for step in range(count):
        n = config.context + step
        scores = fixed[:n].copy()
        for weight, keep, values in parts:
            values *= np.float32(keep)
            values += normal(total) * np.float32((1.0 - keep * keep) ** 0.5)
            scores += values[:n] * np.float32(weight)
        if config.noise:
            scores += normal(n) * np.float32(config.noise)
        if config.relative:
            scores += relative[count - step : count - step + n]
        scores[: config.sinks] += _SINK_BONUS
        scores[n - recent :] += bonus
        yield Selection(scores, top(scores, config.k))


def _smoothed(values: Floats, width: int) -> Floats:
    """Sums of ``width`` neighbours, scaled to the variance of one."""
    sums = np.cumsum(values, dtype=np.float64)
    means: Floats = ((sums[width:] - sums[:-width]) / width**0.5).astype(np.float32)
    return means


def top(scores: Floats, k: int) -> Ints:
    """Positions of the ``k`` highest scores, ascending."""
    chosen: Ints = np.sort(np.argpartition(scores, len(scores) - k)[len(scores) - k :])
    return chosen


def overlap(trace: Sequence[Selection], *, shift: int = 0) -> float:
    """Mean share of a choice, moved on by ``shift`` positions, that the next step chooses too."""
    shares = [
        len(np.intersect1d(a.chosen + shift, b.chosen, assume_unique=True)) / len(b.chosen)
        for a, b in zip(trace[:-1], trace[1:], strict=True)
    ]
    return float(np.mean(shares))
