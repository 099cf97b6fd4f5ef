"""The first decode step: what is in the hot buffer when prefill hands over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .buffer import simulate
from .policies import best
from .traces import Ints, Selection


def seed(trace: Sequence[Selection], window: int, rows: int) -> Ints:
    """Positions that the last ``window`` steps of ``trace`` chose, the newest step's first, at most ``rows``."""
    newest_first = np.concatenate([selection.chosen for selection in reversed(trace[-window:])])
    _, first = np.unique(newest_first, return_index=True)
    return newest_first[np.sort(first)][:rows]


def first_misses(trace: Sequence[Selection], window: int, rows: int) -> float:
    """Misses of the first step after a seeding, in percent of k, mean over starts; window 0: the oldest ``rows`` positions."""
    found = []
    for start in range(max(32, window), len(trace), 8):
        begin = seed(trace[:start], window, rows) if window else np.arange(rows)
        found.append(simulate(trace[start : start + 1], rows, best(), start=begin).first)
    return float(np.mean(found))
