"""Which form of attention costs least for a group of queries: multiplications of the formulas, plus measured overheads."""

from __future__ import annotations

from .config import MLAConfig
from .tiles import TileGroup

_SOFTMAX = 16  # masking and softmax of one score, in multiplications
_GATHER = 10  # fetching one cached value by row number, in multiplications


def _pairs(group: TileGroup) -> int:
    """(query, key) pairs the tiles of the group compute, padding included."""
    return int(group.contexts.sum()) * group.width


def _expanded(config: MLAConfig, group: TileGroup) -> int:
    """Cost a head of expanding every key of the group once and attending with ``nope + rope + v`` values a pair."""
    keys = int(group.spans.context.sum())
    once = keys * config.kv_lora_rank * (config.nope_dim + config.v_dim)
    return once + _pairs(group) * (config.nope_dim + config.rope_dim + config.v_dim + _SOFTMAX)


def expanding_pays(config: MLAConfig, group: TileGroup) -> bool:
    """Whether attending to all keys is cheaper in expanded than in absorbed form."""
    absorbed = _pairs(group) * (config.kv_lora_rank + config.latent_dim + _SOFTMAX)
    return _expanded(config, group) < absorbed


def masking_pays(config: MLAConfig, group: TileGroup, topk: int, heads: int) -> bool:
    """Whether expanding all keys and masking is cheaper than fetching ``topk`` rows for every query."""
    if group.width == 1:
        return False
    a_row = heads * (config.kv_lora_rank + config.latent_dim + _SOFTMAX) + config.latent_dim * _GATHER
    return heads * _expanded(config, group) < group.n_tokens * topk * a_row
