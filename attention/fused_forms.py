"""The forms of attention on the fused path: over chosen rows, over every key in absorbed form, or expanded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .batch import AttentionBatch
from .forms import expanding_pays
from .keys import Keys
from .ops import AttentionOps
from .queries import Queries

if TYPE_CHECKING:
    from .mla import MLA
    from .tiles import TileGroup

_EXPAND_ELEMENTS = 1 << 29  # expanded key and value elements held at a time


def attend(mla: MLA, ops: AttentionOps, queries: Queries, keys: Keys, batch: AttentionBatch) -> torch.Tensor:
    """Head outputs, flat [T, heads * v]."""
    if keys.rows is None and batch.groups and batch.max_query > 1:
        return _attend_groups(mla, ops, queries, keys, batch)
    return _absorbed(mla, ops, queries, batch.token_row, batch.limit, keys, batch)


def _absorbed(
    mla: MLA,
    ops: AttentionOps,
    queries: Queries,
    token_row: torch.Tensor,
    limit: torch.Tensor,
    keys: Keys,
    batch: AttentionBatch,
) -> torch.Tensor:
    """Attention in the latent space, over chosen rows or over every key: flat [T, heads * v]."""
    kv_b, nope, scale = mla.kv_b(), mla.config.nope_dim, mla.config.softmax_scale
    q_latent = queries.absorbed(kv_b, nope)
    if keys.copies:
        ops.beside.join()
    if keys.rows is not None:
        out, _ = ops.sparse_attention(q_latent, queries.rope, keys.pool, keys.rows, scale=scale)
    else:
        out, _ = ops.dense_decode(
            q_latent,
            queries.rope,
            keys.pool,
            keys.pages.table,
            token_row,
            limit,
            page_size=batch.page_size,
            scale=scale,
            max_context=batch.max_context,
            max_query=batch.max_query,
        )
    values = torch.bmm(out.transpose(0, 1), kv_b[:, nope:].transpose(1, 2))
    return values.transpose(0, 1).flatten(1)


def _attend_groups(mla: MLA, ops: AttentionOps, queries: Queries, keys: Keys, batch: AttentionBatch) -> torch.Tensor:
    """Dense attention of a mixed batch: single tokens in absorbed form, longer runs of queries in the cheaper one."""
    result: torch.Tensor | None = None
    for group in batch.groups:
        mine = queries.pick(group)
        if group.width == 1 or not expanding_pays(mla.config, group):
            token_row, limit = group.pick(batch.token_row), group.pick(batch.limit)
            part = _absorbed(mla, ops, mine, token_row, limit, keys, batch)
        else:
            part = _expanded(mla, ops, mine, group, keys)
        result = group.put(result, part, batch.n_tokens)
    assert result is not None
    return result


def _expanded(mla: MLA, ops: AttentionOps, queries: Queries, group: TileGroup, keys: Keys) -> torch.Tensor:
    """Every key of the group's requests expanded once, some heads at a time, then flash attention over ragged lengths."""
    config, spans, kv_b, mine = mla.config, group.spans, mla.kv_b(), queries.heads
    nope, latent, heads = config.nope_dim, config.kv_lora_rank, kv_b.shape[0]
    wide = ops.gather_latent(keys.pool, keys.spans(spans).int(), latent, config.rope_dim, mine.dtype)
    out = mine.new_empty(mine.shape[0], heads, config.v_dim)
    step = max(1, _EXPAND_ELEMENTS // (len(wide) * kv_b.shape[1]))
    for first in range(0, heads, step):
        some = slice(first, first + step)
        both = torch.nn.functional.linear(wide[:, :latent], kv_b[some].flatten(0, 1)).view(len(wide), -1, kv_b.shape[1])
        out[:, some], _ = ops.varlen_attention(
            torch.cat((mine[:, some, :nope], queries.rope[:, some]), -1),
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
