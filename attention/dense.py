"""Attention that goes through every key a query sees, in absorbed or in expanded form."""

from __future__ import annotations

import torch

from .absorbed import attend, finite
from .latents import Latents
from .tiles import TileGroup

_HEAD_BUDGET = 1 << 25  # expanded key and value elements held at a time


def dense_absorbed(queries: torch.Tensor, group: TileGroup, cache: Latents, latent: int) -> torch.Tensor:
    """Absorbed queries [n, H, W] of the group's n tokens over all their keys -> attended latents fp32 [n, H, latent]."""
    tokens, heads, width = queries.shape
    out = queries.new_empty(tokens, heads, latent)
    for chunk in group.chunks(pair_cost=heads, key_cost=width):
        mine = queries.index_select(0, chunk.token).view(*chunk.limit.shape, heads, width)
        rows = cache.of_chunk(chunk).float()
        chunk.store(out, attend(mine, rows, chunk.hidden, latent))
    return out


def dense_expanded(
    queries: torch.Tensor, group: TileGroup, cache: Latents, kv_b: torch.Tensor, nope: int, topk: torch.Tensor | None = None
) -> torch.Tensor:
    """Queries fp32 [n, H, nope + rope] (scaled) of the group's n tokens over their keys -> fp32 [n, H, value].

    ``kv_b`` [H, nope + value, C] expands a latent row to each head's key and value. ``topk`` [n, k] (-1: no key) masks all
    but the selected positions. Every cached key is expanded once, for as many heads at a time as memory allows.
    """
    rows = cache.of_spans(group.spans)  # [S, C + rope]
    heads, both, latent = kv_b.shape
    out = queries.new_empty(queries.shape[0], heads, both - nope)
    step = max(1, _HEAD_BUDGET // (rows.shape[0] * (both + rows.shape[1] - latent)))
    for first in range(0, heads, step):
        some = slice(first, first + step)
        expanded = torch.matmul(rows[:, :latent], kv_b[some].transpose(1, 2)).float()  # [h, S, nope + value]
        rope = rows[None, :, latent:].float().expand(expanded.shape[0], -1, -1)
        keys, values = torch.cat((expanded[:, :, :nope], rope), 2), finite(expanded[:, :, nope:])
        _attend_expanded(queries[:, some], group, keys, values, topk, out[:, some])
    return out


def _attend_expanded(
    queries: torch.Tensor, group: TileGroup, keys: torch.Tensor, values: torch.Tensor, topk: torch.Tensor | None, out: torch.Tensor
) -> None:
    """queries [n, h, d] over keys [h, S, d] and values [h, S, v] of the group's spans, into ``out`` [n, h, v]."""
    heads, _, wide = keys.shape
    for chunk in group.chunks(pair_cost=heads, key_cost=heads * (wide + values.shape[2])):
        n, b = chunk.limit.shape
        index = (group.spans.tile_start[chunk.tiles, None] + chunk.key_positions).reshape(-1)
        mine = queries.index_select(0, chunk.token).view(n, b, heads, wide).permute(2, 0, 1, 3).reshape(heads * n, b, wide)
        k = keys.index_select(1, index).view(heads * n, -1, wide)
        v = values.index_select(1, index).view(heads * n, -1, values.shape[2])
        hidden = chunk.hidden if topk is None else _unselected(topk.index_select(0, chunk.token), chunk.keys).view(n, b, -1)
        scores = torch.bmm(mine, k.transpose(1, 2)).view(heads, n, b, -1).masked_fill_(hidden, float("-inf"))
        attended = torch.bmm(torch.softmax(scores, -1).view(heads * n, b, -1), v)
        chunk.store(out, attended.view(heads, n * b, -1).transpose(0, 1))


def _unselected(topk: torch.Tensor, keys: int) -> torch.Tensor:
    """Mask [m, keys], True where a position is not among ``topk`` [m, k]; -1 lands in an extra column that is cut off."""
    mask = torch.ones(topk.shape[0], keys + 1, dtype=torch.bool, device=topk.device)
    return mask.scatter_(1, torch.where(topk < 0, keys, topk), False)[:, :keys]
