"""Whether the experts that are hot now are hot later: only then does a placement made now help later."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..trace import LoadTrace
from .views import busy, windows

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Persistence:
    """Hot experts of a window of steps, and how many of them are hot some windows later."""

    window: int  # steps of a window
    hot: int  # experts of a layer that count as hot: the most loaded
    lags: tuple[int, ...]  # windows between the two that are compared
    overlap: Floats  # [lags, layers] share of the hot experts that are hot again
    correlation: Floats  # [lags, layers] of the loads of the two windows, over experts
    chance: float  # overlap of experts that are drawn

    @property
    def mean_overlap(self) -> Floats:
        """[lags] over layers."""
        found: Floats = self.overlap.mean(1)
        return found


def persistence(trace: LoadTrace, *, window: int | None = None, hot: int | None = None, lags: tuple[int, ...] | None = None) -> Persistence:
    """Compare windows of ``window`` steps (default: an eighth of the trace), idle steps left out.

    ``hot`` experts of a layer are looked at (default: one in eight), ``lags`` windows apart (default: 1, 2, 4 .. as far as there are).

    Raises:
        ValueError: fewer than two windows.
    """
    trace = busy(trace)
    window = max(1, trace.n_steps // 8) if window is None else window
    sums = windows(trace, window) if trace.n_steps >= window else trace.counts[:0]
    if len(sums) < 2:
        raise ValueError(f"persistence: {trace.n_steps} steps with tokens make {len(sums)} windows of {window}; needs two or more")
    n_experts = trace.n_experts
    hot = max(1, n_experts // 8) if hot is None else hot
    if not 1 <= hot < n_experts:
        raise ValueError(f"persistence: hot must be between 1 and {n_experts - 1} experts, found {hot}")
    lags = tuple(2**i for i in range(16) if 2**i < len(sums)) if lags is None else lags
    if not lags or min(lags) < 1 or max(lags) >= len(sums):
        raise ValueError(f"persistence: lags must be between 1 and {len(sums) - 1} windows, found {lags}")
    is_hot = np.zeros(sums.shape, dtype=bool)
    np.put_along_axis(is_hot, np.argsort(-sums, axis=2, kind="stable")[:, :, :hot], True, axis=2)
    overlap = [(is_hot[:-lag] & is_hot[lag:]).sum(2).mean(0) / hot for lag in lags]
    spread = sums - sums.mean(2, keepdims=True)
    norm = np.sqrt((spread**2).sum(2))
    return Persistence(
        window=window,
        hot=hot,
        lags=lags,
        overlap=np.array(overlap),
        correlation=np.array([_correlation(spread, norm, lag) for lag in lags]),
        chance=hot / n_experts,
    )


def _correlation(spread: Floats, norm: Floats, lag: int) -> Floats:
    """[layers] mean over windows."""
    both = norm[:-lag] * norm[lag:]
    found = np.divide((spread[:-lag] * spread[lag:]).sum(2), both, out=np.zeros_like(both), where=both > 0)
    mean: Floats = found.mean(0)
    return mean
