"""The queries of a step on the fused path, and whether they are computed beside the choice of their keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from .batch import AttentionBatch
from .beside import IN_ORDER
from .ops import AttentionOps

if TYPE_CHECKING:
    from .mla import MLA
    from .projections import Inputs
    from .tiles import TileGroup

#: tokens of a step up to which the choice of keys is a chain of kernels too small to fill the device
_ASIDE_TO = 16


@dataclass(frozen=True, kw_only=True)
class Queries:
    """Queries of T tokens."""

    heads: torch.Tensor  # [T, heads, nope + rope], not rotated
    rope: torch.Tensor  # [T, heads, rope], the last values rotated
    latent: torch.Tensor | None = None  # [T, heads, C], the first values in the latent space; None: not computed yet

    def pick(self, group: TileGroup) -> Queries:
        """Those of one group of requests."""
        return Queries(heads=group.pick(self.heads), rope=group.pick(self.rope))

    def absorbed(self, kv_b: torch.Tensor, nope: int) -> torch.Tensor:
        """The first values in the latent space, [T, heads, C], by ``kv_b`` [heads, nope + v, C] (arXiv:2405.04434, section 2.1.2)."""
        if self.latent is not None:
            return self.latent
        return torch.bmm(self.heads[..., :nope].transpose(0, 1), kv_b[:, :nope]).transpose(0, 1)


def make_queries(mla: MLA, ops: AttentionOps, inputs: Inputs, turn: torch.Tensor, *, absorb: bool = False) -> Queries:
    """The queries of a layer's ``inputs``, rotated by ``turn``; with ``absorb`` in the latent space too."""
    config, heads = mla.config, inputs.queries(mla)
    rope = ops.query_rope(heads[..., config.nope_dim :], turn, interleaved=config.rope.interleaved, dtype=heads.dtype)
    queries = Queries(heads=heads, rope=rope)
    return replace(queries, latent=queries.absorbed(mla.kv_b(), config.nope_dim)) if absorb else queries


def apart(mla: MLA, ops: AttentionOps, batch: AttentionBatch) -> bool:
    """Whether queries and index queries are products of their own, so that one may run beside the choice of keys.

    Contexts do not count: a step's products are cut in one way or the other, which may change their last bit.
    """
    return mla.indexer is not None and ops.aside is not IN_ORDER and 0 < batch.n_tokens <= _ASIDE_TO


def has_choice(mla: MLA, batch: AttentionBatch) -> bool:
    """Whether this step attends chosen keys, by this layer's choice or an earlier one's, rather than every key."""
    sparse = mla.config.indexer
    return sparse is not None and batch.n_tokens > 0 and batch.max_context > sparse.topk
