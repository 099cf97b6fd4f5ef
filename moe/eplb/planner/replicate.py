"""How many replicas each expert shall have: spare seats go one by one to the expert whose replicas carry most."""

from __future__ import annotations

import numpy as np

from ..plan import Floats
from ..topology import Ints


def share_out(load: Floats, n_seats: int, *, most: int, least: int = 1) -> tuple[Ints, Floats]:
    """Replicas of each expert, which make the largest load of a replica as small as it can be.

    Args:
        load: [layers, experts].
        n_seats: replicas of a layer together, between ``experts * least`` and ``experts * most``.
        most: replicas of one expert, at most: the ranks, as two on a rank help nothing.
        least: replicas of one expert, at least.

    Returns:
        [layers, experts] replicas, and [layers, spare + 1] the largest load of a replica after each spare seat was given.
    """
    layers, experts = load.shape
    counts = np.full((layers, experts), least, dtype=np.int64)
    spare = n_seats - experts * least
    peaks = np.empty((layers, spare + 1))
    rows = np.arange(layers)
    # experts without load still take turns, when all others have as many replicas as ranks
    weight = load + 1e-12 * np.maximum(load.mean(1, keepdims=True), 1e-300)
    each = weight / counts
    for given in range(spare):
        expert = each.argmax(1)
        peaks[:, given] = each[rows, expert]
        counts[rows, expert] += 1
        now = counts[rows, expert]
        each[rows, expert] = np.where(now < most, weight[rows, expert] / now, -1.0)
    peaks[:, spare] = (load / counts).max(1)
    return counts, np.maximum(peaks, load.max(1, keepdims=True) / most)
