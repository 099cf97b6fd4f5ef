"""Two halves of a step that take turns on the device: while one travels to its experts and back, the other computes.

Per layer: attention of A, of B, experts of A, of B. A's tokens travel beside B's attention, B's beside A's experts, A's results
beside B's experts, and B's beside A's attention in the next layer. Every rank makes the same calls in the same order, also for
a half without tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...attention.batch import AttentionBatch
from ...attention.kv.cache import LayerCache
from ...moe.exchange import Flight
from ...moe.layer import MoE

if TYPE_CHECKING:
    from .deepseek import DecoderLayer


@dataclass(kw_only=True)
class _Half:
    """One half between two layers."""

    batch: AttentionBatch
    x: torch.Tensor  # [t, hidden], without what is under way
    topk: torch.Tensor | None = None  # keys of the last layer that chose some
    normed: torch.Tensor | None = None  # [t, hidden] input of the feed-forward
    flight: Flight | None = None  # tokens at their experts
    beside: torch.Tensor | None = None  # output of the shared expert

    def land(self, layer: MoE) -> None:
        """Add what the experts of ``layer`` gave."""
        assert self.flight is not None
        self.x = self.x + layer.finish(self.flight, self.beside)
        self.flight = self.beside = self.normed = None


def run_halves(
    layers: Mapping[str, Any] | Any, x: torch.Tensor, batches: Sequence[AttentionBatch], caches: Sequence[LayerCache]
) -> torch.Tensor:
    """The layers of a stage on the tokens x [T, hidden], the first of which are those of the first batch: [T, hidden]."""
    parts = torch.split(x, [batch.n_tokens for batch in batches])
    halves = [_Half(batch=batch, x=part) for batch, part in zip(batches, parts, strict=True)]
    away: MoE | None = None  # layer whose experts the tokens are at
    for layer, cache in zip(layers.values(), caches, strict=True):
        away = _run_layer(layer, halves, cache, away)
    if away is not None:
        for half in halves:
            half.land(away)
    return torch.cat([half.x for half in halves])


def _run_layer(layer: DecoderLayer, halves: Sequence[_Half], cache: LayerCache, away: MoE | None) -> MoE | None:
    """One layer, which ends with its experts still under way where it has some."""
    sparse = layer.mlp if isinstance(layer.mlp, MoE) else None
    for half in halves:
        if away is not None:
            half.land(away)
        normed, half.x, half.topk = layer.attend(half.x, half.batch, cache, half.topk)
        if sparse is None:
            half.x = half.x + layer.mlp(normed)
        else:
            half.normed, half.flight = normed, sparse.begin(normed, half.batch.n_valid, half.batch.most_tokens)
    if sparse is not None:
        for half in halves:
            assert half.normed is not None and half.flight is not None
            half.beside = sparse.compute(half.normed, half.flight)
    return sparse
