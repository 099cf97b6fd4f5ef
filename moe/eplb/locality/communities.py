"""Groups of experts that tokens choose together, found from tokens alone: where a gate has no groups, or they are not known."""

from __future__ import annotations

import numpy as np

from ..plan import Floats
from ..topology import Ints
from .coactivation import coactivation
from .routing import Routing

TOKENS = 8192  # looked at: pairs of experts are many, and seldom chosen each
_ROUNDS = 40  # of power iteration
_SHIFT = 0.12  # added to all eigenvalues: between those of chance, which are negative as often as not, and those of groups


def blocks(load: Floats, routing: Routing, n_groups: int, n_nodes: int) -> Ints:
    """[layers, experts] number of the block that an expert belongs to: the gate's group, or two communities for each node."""
    experts = load.shape[1]
    if n_groups > 1 or n_nodes < 2:
        return np.broadcast_to(np.arange(experts) // (experts // n_groups), load.shape)
    last = routing.tokens(max(0, routing.n_tokens - TOKENS))
    return communities(last, depth=int(np.ceil(np.log2(2 * n_nodes))))


def communities(routing: Routing, *, depth: int) -> Ints:
    """Experts of each layer halved ``depth`` times, by the leading eigenvector of the modularity of their co-activation.

    Returns:
        [layers, experts] numbers 0 to 2**depth - 1; the halves of a community are of equal size, or differ by one.
    """
    together = coactivation(routing)
    layers, experts, _ = together.shape
    degree = np.maximum(together.sum(2), 1.0)
    root = np.sqrt(degree)
    chance = root[:, :, None] * root[:, None, :]
    modularity = (together / chance - chance / degree.sum(1)[:, None, None]).astype(np.float32)
    label = np.zeros((layers, experts), dtype=np.int64)
    random = np.random.default_rng(0)
    for level in range(depth):
        within = np.where(label[:, :, None] == label[:, None, :], modularity, np.float32(0))
        x = random.standard_normal((layers, experts, 1)).astype(np.float32)
        for _ in range(_ROUNDS):
            x = within @ x + np.float32(_SHIFT) * x
            x /= np.maximum(np.abs(x).max(1, keepdims=True), 1e-30)
        label = 2 * label + _upper(x[:, :, 0], label, 1 << level)
    return label


def _upper(x: np.ndarray, label: Ints, n: int) -> np.ndarray:
    """[layers, experts] whether an expert is in the upper half of its community."""
    order = np.lexsort((x, label), axis=1)
    place = np.argsort(order, axis=1)
    size = np.stack([np.bincount(row, minlength=n) for row in label])
    first = size.cumsum(1) - size
    return 2 * (place - np.take_along_axis(first, label, 1)) >= np.take_along_axis(size, label, 1)
