"""MLA as a chain of fused operations over flat tokens: no host decision depends on values, so that it can be captured.

The same mathematics as ``MLA.forward`` on the torch path; a token's keys are named by cache rows, not by tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .batch import AttentionBatch
from .forms import expanding_pays
from .kv.cache import LayerCache
from .ops import AttentionOps
from .projections import Inputs, project
from .rope import rotation

if TYPE_CHECKING:
    from .indexer import Indexer
    from .mla import MLA
    from .tiles import TileGroup

_LOGIT_BYTES = 1 << 30  # scores held at a time
_EXPAND_ELEMENTS = 1 << 29  # expanded key and value elements held at a time


def fused_forward(
    mla: MLA, ops: AttentionOps, x: torch.Tensor, batch: AttentionBatch, cache: LayerCache, shared_rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write the tokens ``x`` [T, hidden] and attend: ([T, hidden], cache rows int32 [T, topk] or None for every key)."""
    config = mla.config
    turn = batch.once(("turn", config.rope), lambda: torch.view_as_real(rotation(config.rope, batch.positions)))
    inputs = project(mla, x)
    ops.write_latent(
        inputs.latent_row,
        mla.kv_a_layernorm.weight,
        mla.kv_a_layernorm.eps,
        turn,
        batch.write_rows,
        cache.latent.pool,
        interleaved=config.rope.interleaved,
    )
    rows = _selected(mla, ops, x, inputs, turn, batch, cache, shared_rows)
    queries = inputs.queries
    q_rope = ops.query_rope(queries[..., config.nope_dim :], turn, interleaved=config.rope.interleaved, dtype=queries.dtype)
    heads = _attend(mla, ops, queries, q_rope, rows, batch, cache)
    out: torch.Tensor = mla.o_proj(heads)
    return out, rows


def _selected(
    mla: MLA,
    ops: AttentionOps,
    x: torch.Tensor,
    inputs: Inputs,
    turn: torch.Tensor,
    batch: AttentionBatch,
    cache: LayerCache,
    shared_rows: torch.Tensor | None,
) -> torch.Tensor | None:
    """Cache rows of the selected keys, or None for every visible key. Writes the index keys."""
    sparse = mla.config.indexer
    if mla.indexer is not None:
        assert inputs.index_key is not None
        _write_index(mla.indexer, ops, inputs.index_key, turn, batch, cache)
    if sparse is None or batch.max_context <= sparse.topk or batch.n_tokens == 0:
        return None
    if mla.indexer is None:
        assert shared_rows is not None, f"layer {mla.layer_index} shares a selection, but none was passed"
        return shared_rows
    assert inputs.index_query is not None
    return _select(mla.indexer, ops, x, inputs.index_query, turn, batch, cache)


def _write_index(
    indexer: Indexer, ops: AttentionOps, key: torch.Tensor, turn: torch.Tensor, batch: AttentionBatch, cache: LayerCache
) -> None:
    assert cache.index is not None
    norm = indexer.k_norm
    ops.write_index(
        key,
        norm.weight,
        norm.bias,
        norm.eps,
        turn,
        batch.write_rows,
        cache.index.pool,
        page_size=batch.page_size,
        interleaved=indexer.interleaved,
        rotate=cache.rotate_index,
    )


def _select(
    indexer: Indexer,
    ops: AttentionOps,
    x: torch.Tensor,
    flat: torch.Tensor,
    turn: torch.Tensor,
    batch: AttentionBatch,
    cache: LayerCache,
) -> torch.Tensor:
    """Cache rows int32 [T, topk] of every token's keys, by position ascending, -1 at the end of short rows."""
    assert cache.index is not None
    tokens = x.shape[0]
    scale = indexer.n_heads**-0.5 * indexer.head_dim**-0.5
    queries, weights = ops.index_query(
        flat.view(tokens, indexer.n_heads, indexer.head_dim),
        indexer.head_weights(x),
        turn,
        interleaved=indexer.interleaved,
        rotate=cache.rotate_index,
        fp8=cache.rotate_index,
        scale=scale,
    )
    step = max(1, _LOGIT_BYTES // (4 * max(batch.max_context, 1)))
    parts = []
    for start in range(0, tokens, step):
        here = slice(start, start + step)
        token_row, limit = batch.token_row[here], batch.limit[here]
        scores = ops.indexer_logits(
            queries[here],
            weights[here],
            cache.index.pool,
            batch.page_table,
            token_row,
            limit,
            page_size=batch.page_size,
            max_context=batch.max_context,
            max_query=min(batch.max_query, step),
        )
        chosen = ops.select_rows(
            scores, limit, indexer.topk, batch.page_table, token_row, page_size=batch.page_size, max_context=batch.max_context
        )
        parts.append(chosen[1])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    mla: MLA,
    ops: AttentionOps,
    queries: torch.Tensor,
    q_rope: torch.Tensor,
    rows: torch.Tensor | None,
    batch: AttentionBatch,
    cache: LayerCache,
) -> torch.Tensor:
    """Head outputs, flat [T, heads * v]."""
    config = mla.config
    kv_b = mla.kv_b_proj.weight.view(-1, config.nope_dim + config.v_dim, config.kv_lora_rank)
    if rows is None and batch.groups and batch.max_query > 1:
        return _attend_groups(mla, ops, queries, q_rope, kv_b, batch, cache)
    return _absorbed(mla, ops, queries, q_rope, rows, kv_b, batch.token_row, batch.limit, batch, cache)


def _absorbed(
    mla: MLA,
    ops: AttentionOps,
    queries: torch.Tensor,
    q_rope: torch.Tensor,
    rows: torch.Tensor | None,
    kv_b: torch.Tensor,
    token_row: torch.Tensor,
    limit: torch.Tensor,
    batch: AttentionBatch,
    cache: LayerCache,
) -> torch.Tensor:
    """Attention in the latent space, over chosen rows or over every key: flat [T, heads * v]."""
    nope, scale = mla.config.nope_dim, mla.config.softmax_scale
    q_latent = torch.bmm(queries[..., :nope].transpose(0, 1), kv_b[:, :nope]).transpose(0, 1)
    if rows is not None:
        out, _ = ops.sparse_attention(q_latent, q_rope, cache.latent.pool, rows, scale=scale)
    else:
        out, _ = ops.dense_decode(
            q_latent,
            q_rope,
            cache.latent.pool,
            batch.page_table,
            token_row,
            limit,
            page_size=batch.page_size,
            scale=scale,
            max_context=batch.max_context,
            max_query=batch.max_query,
        )
    values = torch.bmm(out.transpose(0, 1), kv_b[:, nope:].transpose(1, 2))
    return values.transpose(0, 1).flatten(1)


def _attend_groups(
    mla: MLA, ops: AttentionOps, queries: torch.Tensor, q_rope: torch.Tensor, kv_b: torch.Tensor, batch: AttentionBatch, cache: LayerCache
) -> torch.Tensor:
    """Dense attention of a mixed batch: single tokens in absorbed form, longer runs of queries in the cheaper one."""
    result: torch.Tensor | None = None
    for group in batch.groups:
        mine, rope = group.pick(queries), group.pick(q_rope)
        if group.width == 1 or not expanding_pays(mla.config, group):
            token_row, limit = group.pick(batch.token_row), group.pick(batch.limit)
            part = _absorbed(mla, ops, mine, rope, None, kv_b, token_row, limit, batch, cache)
        else:
            part = _expanded(mla, ops, mine, rope, kv_b, group, cache)
        result = group.put(result, part, batch.n_tokens)
    assert result is not None
    return result


def _expanded(
    mla: MLA, ops: AttentionOps, queries: torch.Tensor, q_rope: torch.Tensor, kv_b: torch.Tensor, group: TileGroup, cache: LayerCache
) -> torch.Tensor:
    """Every key of the group's requests expanded once, some heads at a time, then flash attention over ragged lengths."""
    config, spans = mla.config, group.spans
    nope, latent, heads = config.nope_dim, config.kv_lora_rank, kv_b.shape[0]
    wide = ops.gather_latent(cache.latent.pool, spans.rows.int(), latent, config.rope_dim, queries.dtype)
    out = queries.new_empty(queries.shape[0], heads, config.v_dim)
    step = max(1, _EXPAND_ELEMENTS // (len(wide) * kv_b.shape[1]))
    for first in range(0, heads, step):
        some = slice(first, first + step)
        both = torch.nn.functional.linear(wide[:, :latent], kv_b[some].flatten(0, 1)).view(len(wide), -1, kv_b.shape[1])
        out[:, some], _ = ops.varlen_attention(
            torch.cat((queries[:, some, :nope], q_rope[:, some]), -1),
            both[..., :nope],
            wide[:, latent:],
            both[..., nope:],
            spans.query_start,
            spans.key_start,
            scale=config.softmax_scale,
            causal=True,
            max_query=int(spans.queries.max()),
            max_key=int(spans.context.max()),
        )
    return out.flatten(1)
