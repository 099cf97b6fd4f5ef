"""The attention part of a ``config.json``: widths, RoPE in both spellings, indexer and the layers that share it."""

from __future__ import annotations

from typing import Literal, cast

from ...attention.config import IndexerConfig, MLAConfig, RopeConfig
from .config_fields import Fields
from .model_family import Family


def parse_attention(fields: Fields, family: Family, hidden: int, n_layers: int) -> MLAConfig:
    """Shapes of the latent attention, its RoPE, and the indexer if the family has one.

    Raises:
        ValueError: a field is missing, invalid or not supported.
    """
    rope_dim = fields.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", f"must be even, found {rope_dim}")
    fields.get("q_lora_rank")  # must be there: null is a value (queries are projected directly)
    q_lora_rank = fields.optional_integer("q_lora_rank")
    if family.indexer and q_lora_rank is None:
        raise fields.error("q_lora_rank", "must be a whole number in a model with an indexer, found None")
    return MLAConfig(
        hidden=hidden,
        n_heads=fields.integer("num_attention_heads"),
        q_lora_rank=q_lora_rank,
        kv_lora_rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=rope_dim,
        v_dim=fields.integer("v_head_dim"),
        bias=fields.boolean("attention_bias", False),
        norm_eps=1e-6,
        rope=_rope(fields, rope_dim),
        indexer=_indexer(fields, family, rope_dim, n_layers) if family.indexer else None,
    )


def _rope(fields: Fields, dim: int) -> RopeConfig:
    """Legacy ``rope_scaling`` + ``rope_theta`` or new ``rope_parameters``; the first wins, as in transformers."""
    section = fields.section("rope_scaling") or fields.section("rope_parameters") or Fields({}, fields.where, "rope_parameters.")
    kind_field = "rope_type" if "rope_type" in section.raw else "type"
    kind = section.choice(kind_field, ("default", "yarn"), "default")
    theta = section.number("rope_theta", None) if "rope_theta" in section.raw else fields.number("rope_theta", 10000.0)
    for part in (section, fields):
        if part.get("partial_rotary_factor", None) not in (None, 1, 1.0):
            raise part.error("partial_rotary_factor", f"other than 1 is not supported, found {part.get('partial_rotary_factor')!r}")
    max_position = fields.integer("max_position_embeddings")
    interleaved = fields.boolean("rope_interleave", True)
    if kind == "default":
        return RopeConfig(dim=dim, theta=theta, max_position=max_position, interleaved=interleaved, original_max_position=max_position)
    outer = fields.optional_integer("original_max_position_embeddings")
    return RopeConfig(
        dim=dim,
        theta=theta,
        max_position=max_position,
        interleaved=interleaved,
        factor=section.number("factor"),
        original_max_position=outer or section.integer("original_max_position_embeddings", max_position),
        beta_fast=section.optional_number("beta_fast") or 32.0,
        beta_slow=section.optional_number("beta_slow") or 1.0,
        mscale=section.optional_number("mscale"),
        mscale_all_dim=section.optional_number("mscale_all_dim"),
        attention_factor=section.optional_number("attention_factor"),
        truncate=section.boolean("truncate", True),
    )


def _indexer(fields: Fields, family: Family, rope_dim: int, n_layers: int) -> IndexerConfig:
    head_dim = fields.integer("index_head_dim")
    if head_dim < rope_dim:
        raise fields.error("index_head_dim", f"must be at least qk_rope_head_dim ({rope_dim}), found {head_dim}")
    types = _indexer_types(fields, family, n_layers)
    if types[0] == "shared":
        raise fields.error("indexer_types", "must start with 'full': the first layer has no earlier layer whose keys it could share")
    if not family.shared_indexers and "shared" in types:
        raise fields.error("indexer_types", f"may not hold 'shared' in model_type {fields.get('model_type')!r}")
    return IndexerConfig(
        n_heads=fields.integer("index_n_heads"),
        head_dim=head_dim,
        topk=fields.integer("index_topk"),
        rope_interleaved=fields.boolean("indexer_rope_interleave", family.indexer_interleaved),
        layer_types=types,
    )


def _indexer_types(fields: Fields, family: Family, n_layers: int) -> tuple[Literal["full", "shared"], ...]:
    """``indexer_types``, else ``index_topk_pattern`` ("FSS..." or a list), else ``index_topk_freq`` and its offset."""
    allowed = ("full", "shared")
    if fields.get("indexer_types", None) is not None:
        return cast("tuple[Literal['full', 'shared'], ...]", fields.names("indexer_types", allowed, n_layers))
    pattern = fields.get("index_topk_pattern", None)
    if pattern is not None:
        if isinstance(pattern, str):
            pattern = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
        spelled = Fields({"index_topk_pattern": pattern}, fields.where)
        return cast("tuple[Literal['full', 'shared'], ...]", spelled.names("index_topk_pattern", allowed, n_layers))
    every = max(fields.integer("index_topk_freq", 1, least=0), 1)
    offset = fields.integer("index_skip_topk_offset", 2, least=0)
    kinds: list[Literal["full", "shared"]] = ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(n_layers)]
    return tuple(kinds)
