"""What a layer computes from its tokens before it looks at the cache: the fused path's dense products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .mla import MLA


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a layer computes from its tokens before it looks at the cache."""

    flat_queries: torch.Tensor | None  # [T, heads * (nope + rope)], not rotated; None: still to be computed from the query latent
    query_latent: torch.Tensor | None  # [T, q_lora_rank] normed; None without one
    latent_row: torch.Tensor  # [T, C + rope], neither normed nor rotated
    index_key: torch.Tensor | None  # [T, D]
    index_query: torch.Tensor | None  # [T, index heads * D]; None: likewise, where the layer has an indexer

    def queries(self, mla: MLA) -> torch.Tensor:
        """[T, heads, nope + rope], not rotated."""
        flat = mla.q_b_proj(self.query_latent) if self.flat_queries is None else self.flat_queries
        width = mla.config.nope_dim + mla.config.rope_dim
        return flat.view(flat.shape[0], flat.shape[1] // width, width)

    def index_queries(self, mla: MLA) -> torch.Tensor:
        """[T, index heads * D]."""
        if self.index_query is not None:
            return self.index_query
        assert mla.indexer is not None and self.query_latent is not None
        out: torch.Tensor = mla.indexer.wq_b(self.query_latent)
        return out


def project(mla: MLA, x: torch.Tensor, *, queries_later: bool = False) -> Inputs:
    """The products with ``x`` [T, hidden] and with the query latent, as few as the weights allow.

    With ``queries_later`` those with the query latent are left to ``Inputs``, each a product of its own.
    """
    indexer, key, index_query = mla.indexer, None, None
    flat, latent = None, None
    if mla.config.q_lora_rank is None:
        flat, latent_row = mla.q_proj(x), mla.kv_a_proj_with_mqa(x)
    else:
        if mla.by_hidden is not None:
            low, key, latent_row = _split(mla.by_hidden(x), [mla.q_a_proj, None if indexer is None else indexer.wk, mla.kv_a_proj_with_mqa])
        else:
            low, latent_row = mla.q_a_proj(x), mla.kv_a_proj_with_mqa(x)
            key = None if indexer is None else indexer.wk(x)
        latent = mla.q_a_layernorm(low)
        if not queries_later:
            flat, index_query = _by_latent(mla, latent)
    return Inputs(flat_queries=flat, query_latent=latent, latent_row=latent_row, index_key=key, index_query=index_query)


def _by_latent(mla: MLA, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries and index queries of the normed query latent; None where those are a product of their own, or not needed."""
    if mla.by_latent is None:
        return mla.q_b_proj(latent), None
    assert mla.indexer is not None
    flat, index_query = _split(mla.by_latent(latent), [mla.q_b_proj, mla.indexer.wq_b])
    return flat, index_query


def _split(whole: torch.Tensor, parts: list[Any]) -> tuple[torch.Tensor, ...]:
    """The outputs of stacked linears, one for each of ``parts``; empty for a part that is None."""
    return torch.split(whole, [0 if part is None else part.weight.shape[0] for part in parts], -1)
