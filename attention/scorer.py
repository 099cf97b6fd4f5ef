"""Choosing keys on the fused path: the index scores of a step, and the highest of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .batch import AttentionBatch
from .keys import Choice
from .kv.cache import LayerCache
from .ops import AttentionOps

if TYPE_CHECKING:
    from .indexer import Indexer

_UNIT = 64  # tokens that sizes of parts are multiples of
_LOGIT_BYTES = 1 << 30  # scores held at a time


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Index queries of a step's tokens, and what they are scored against. A token's choice does not depend on the others'."""

    ops: AttentionOps
    batch: AttentionBatch
    pool: torch.Tensor  # index keys as kernels take them
    topk: int
    queries: torch.Tensor  # [T, H, D]
    weights: torch.Tensor  # fp32 [T, H]
    shared: bool  # later layers use this one's choice

    @classmethod
    def of(
        cls,
        indexer: Indexer,
        ops: AttentionOps,
        x: torch.Tensor,
        flat: torch.Tensor,
        turn: torch.Tensor,
        batch: AttentionBatch,
        cache: LayerCache,
    ) -> Scorer:
        """Of the tokens ``x`` [T, hidden] with index queries ``flat`` [T, heads * D], whose own keys are in the cache."""
        assert cache.index is not None
        queries, weights = ops.index_query(
            flat.view(x.shape[0], indexer.n_heads, indexer.head_dim),
            indexer.head_weights(x),
            turn,
            interleaved=indexer.interleaved,
            rotate=cache.rotate_index,
            fp8=cache.rotate_index,
            scale=indexer.n_heads**-0.5 * indexer.head_dim**-0.5,
        )
        return cls(
            ops=ops, batch=batch, pool=cache.index.pool, topk=indexer.topk, queries=queries, weights=weights, shared=indexer.is_shared
        )

    def choose(self, here: slice) -> Choice:
        """Keys of the tokens ``here``, by position ascending, -1 at the end of short rows."""
        batch, ops = self.batch, self.ops
        token_row, limit, queries = batch.token_row[here], batch.limit[here], self.queries[here]
        scores = ops.indexer_logits(
            queries,
            self.weights[here],
            self.pool,
            batch.page_table,
            token_row,
            limit,
            page_size=batch.page_size,
            max_context=batch.max_context,
            max_query=min(batch.max_query, len(queries)),
        )
        positions, rows = ops.select_rows(
            scores, limit, self.topk, batch.latent_table, token_row, page_size=batch.page_size, max_context=batch.max_context
        )
        return Choice(positions=positions, rows=rows, scores=scores)

    def choose_all(self) -> Choice:
        """Keys of every token, with as many scores in memory at a time as may be."""
        tokens = len(self.queries)
        step = tokens_at_a_time(tokens, self.batch.max_context)
        if tokens <= step:
            whole = self.choose(slice(0, tokens))
            self.batch.keep_scores(whole.scores if self.shared else None)
            return whole
        self.batch.keep_scores(None)
        parts = [self.choose(slice(start, start + step)).without_scores() for start in range(0, tokens, step)]
        positions, rows = (torch.cat(each) for each in zip(*parts, strict=True))
        return Choice(positions=positions, rows=rows)


def tokens_at_a_time(tokens: int, max_context: int) -> int:
    """Tokens that are scored together: equal parts, each but the last a multiple of 64 where that many fit in memory.

    Kernels are compiled in kinds, by how many rows they get and by whether these begin on 16 bytes: such parts meet few kinds.
    """
    most = max(1, _LOGIT_BYTES // (4 * max(max_context, 1)))
    if tokens <= most:
        return max(1, tokens)
    unit = min(_UNIT, most)
    most -= most % unit
    each = -(-tokens // -(-tokens // most))
    return each + -each % unit
