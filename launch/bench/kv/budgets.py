"""Hot rows shared out among layers: equal bytes, fewer misses, where some layers keep choosing the same rows and others do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .buffer import Policy, simulate
from .traces import HARD, PUBLISHED, Selection, TraceConfig

#: buffer sizes, in selections, at which a layer's misses are measured; between them they are taken to fall in a straight line
SIZES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
#: of drift and noise, from a layer that hardly changes its mind to one that often does
RESTLESSNESS = (0.3, 0.5, 0.7, 0.9, 1.0, 1.1, 1.3, 1.6)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Misses in percent of a selection, means over the layers."""

    equal: float  # every layer with the same number of rows
    shared_out: float  # the same rows in all, given where they save most
    sizes: tuple[float, ...]  # selections that each layer was given


def layer_profiles(context: int, k: int) -> list[TraceConfig]:
    """Layers of different kinds: the published process, calmer and more restless, and one of the hard kind."""
    kinds = [replace(PUBLISHED, quick=PUBLISHED.quick * f, noise=PUBLISHED.noise * f) for f in RESTLESSNESS]
    return [replace(kind, context=context, k=k, seed=number, name=f"layer kind {number}") for number, kind in enumerate([*kinds, HARD])]


def miss_curve(trace: Sequence[Selection], policy: Callable[[], Policy], *, warm_up: int) -> NDArray[np.float64]:
    """[len(SIZES)] misses in percent, never rising with the size."""
    k = len(trace[0].chosen)
    found = [simulate(trace, int(size * k), policy(), warm_up=warm_up).missed for size in SIZES]
    return np.minimum.accumulate(np.array(found))


def share_out(curves: Sequence[NDArray[np.float64]], *, mean_size: float, step: float = 1 / 32) -> Split:
    """Give rows, a page of ``step`` selections at a time, to the layer whose misses they cut most per row.

    Every layer keeps at least one selection. ``mean_size`` is in selections. A layer may be given several steps at once, so that
    a flat stretch of its curve before a steep one does not hide it.
    """
    grid = np.arange(SIZES[0], SIZES[-1] + step / 2, step)
    misses = [np.interp(grid, SIZES, curve) for curve in curves]
    at = [0] * len(curves)
    left = int(round((mean_size - SIZES[0]) * len(curves) / step))
    while left > 0:
        gains = [_best_move(m, i, left) for m, i in zip(misses, at, strict=True)]
        layer = int(np.argmax([gain for gain, _ in gains]))
        gain, move = gains[layer]
        if gain <= 0.0:
            break
        at[layer] += move
        left -= move
    equal = float(np.mean([np.interp(mean_size, SIZES, curve) for curve in curves]))
    shared = float(np.mean([m[i] for m, i in zip(misses, at, strict=True)]))
    return Split(equal=equal, shared_out=shared, sizes=tuple(float(grid[i]) for i in at))


def _best_move(misses: NDArray[np.float64], at: int, left: int) -> tuple[float, int]:
    """Most misses saved per step, and by how many steps."""
    ahead = misses[at + 1 : at + 1 + left]
    if len(ahead) == 0:
        return 0.0, 0
    gains = (misses[at] - ahead) / np.arange(1, len(ahead) + 1)
    best = int(np.argmax(gains))
    return float(gains[best]), best + 1
