"""From a Hugging Face ``config.json`` to ``ModelConfig``. Semantics follow transformers 5.24.0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from ...moe.config import MoEConfig
from ...parallel.json_text import parse_json
from ..model_config import ModelConfig
from .attention_fields import parse_attention
from .config_fields import Fields
from .model_family import Family, find_family

_DTYPES = ("bfloat16", "float16", "float32")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: unreadable, not JSON, or not an object; the message names the file.
    """
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def parse_model_config(source: str | Path | Mapping[str, Any]) -> ModelConfig:
    """Parse a checkpoint folder (``config.json``, and end-of-text ids of ``generation_config.json``) or a loaded config.

    Raises:
        ValueError: no such folder or file, an unknown model, or a field that is missing, invalid or not supported.
    """
    if isinstance(source, Mapping):
        return _parse(source, {}, "config")
    folder = Path(source)
    path = folder / "config.json"
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder of a Hugging Face checkpoint")
    if not path.is_file():
        names = sorted(entry.name for entry in folder.iterdir())[:5]
        raise ValueError(f"{folder} has no config.json, so it is not a Hugging Face checkpoint (it holds: {', '.join(names) or 'nothing'})")
    generation = folder / "generation_config.json"
    return _parse(read_json(path), read_json(generation) if generation.is_file() else {}, str(path))


def _parse(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    fields = Fields(raw, where)
    architectures = fields.get("architectures", None) or [None]
    family = find_family(fields.get("model_type"), architectures[0], where)
    _refuse_unsupported(fields)
    n_layers = fields.integer("num_hidden_layers")
    hidden = fields.integer("hidden_size")
    mlp_types = _mlp_types(fields, family, n_layers)
    return ModelConfig(
        model_type=fields.get("model_type"),
        architecture=family.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden=hidden,
        n_layers=n_layers,
        intermediate=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", family.norm_eps),
        max_position=fields.integer("max_position_embeddings"),
        attention=parse_attention(fields, family, hidden, n_layers),
        moe=_moe(fields, family, hidden) if "sparse" in mlp_types else None,
        mlp_types=mlp_types,
        n_mtp_layers=fields.integer("num_nextn_predict_layers", 0, least=0),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        dtype=_dtype(fields),
        bos_token_id=_token(fields, generation, "bos_token_id"),
        eos_token_ids=_eos(fields, generation),
        pad_token_id=_token(fields, generation, "pad_token_id"),
        quantization=_quantization(fields),
    )


def _refuse_unsupported(fields: Fields) -> None:
    """Settings that no published model of these families has, and that would change the maths."""
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", f"must be 'silu', found {fields.get('hidden_act')!r}")
    if fields.boolean("mlp_bias", False):
        raise fields.error("mlp_bias", "true is not supported")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if kv_heads != heads:
        raise fields.error("num_key_value_heads", f"must equal num_attention_heads ({heads}) under latent attention, found {kv_heads}")


def _mlp_types(fields: Fields, family: Family, n_layers: int) -> tuple[Literal["dense", "sparse"], ...]:
    """Per layer; an explicit list wins over first_k_dense_replace and moe_layer_freq."""
    if fields.get("mlp_layer_types", None) is not None:
        return cast("tuple[Literal['dense', 'sparse'], ...]", fields.names("mlp_layer_types", ("dense", "sparse"), n_layers))
    if fields.optional_integer("n_routed_experts", 1, least=0) in (None, 0):
        return tuple("dense" for _ in range(n_layers))
    first = fields.integer("first_k_dense_replace", family.first_dense, least=0)
    every = fields.integer("moe_layer_freq", 1)
    kinds: list[Literal["dense", "sparse"]] = ["sparse" if i >= first and i % every == 0 else "dense" for i in range(n_layers)]
    return tuple(kinds)


def _moe(fields: Fields, family: Family, hidden: int) -> MoEConfig:
    n_experts = fields.integer("n_routed_experts")
    n_group = fields.integer("n_group", family.groups[0])
    topk_group = fields.integer("topk_group", family.groups[1])
    top_k = fields.integer("num_experts_per_tok")
    fields.choice("scoring_func", (family.scoring,), family.scoring)
    method = fields.choice("topk_method", family.methods, family.methods[0])
    if n_experts % n_group:
        raise fields.error("n_group", f"must divide n_routed_experts ({n_experts}), found {n_group}")
    if topk_group > n_group:
        raise fields.error("topk_group", f"must be at most n_group ({n_group}), found {topk_group}")
    reachable = n_experts if method == "greedy" else n_experts // n_group * topk_group
    if top_k > reachable:
        raise fields.error("num_experts_per_tok", f"must be at most the {reachable} experts a token can reach, found {top_k}")
    return MoEConfig(
        hidden=hidden,
        intermediate=fields.integer("moe_intermediate_size"),
        n_experts=n_experts,
        top_k=top_k,
        n_shared=fields.integer("n_shared_experts", 0, least=0),
        n_group=n_group,
        topk_group=topk_group,
        scoring=family.scoring,
        method=cast("Literal['noaux_tc', 'greedy', 'group_limited_greedy']", method),
        norm_topk_prob=fields.boolean("norm_topk_prob", True) and not family.ignores_norm_topk_prob,
        routed_scaling_factor=fields.number("routed_scaling_factor", family.scaling),
    )


def _dtype(fields: Fields) -> str:
    field = "dtype" if fields.get("dtype", None) is not None else "torch_dtype"
    value = str(fields.get(field, None) or "bfloat16").removeprefix("torch.")
    if value not in _DTYPES:
        raise fields.error(field, f"must be one of {', '.join(_DTYPES)}, found {value!r}")
    return value


def _token(fields: Fields, generation: Mapping[str, Any], name: str) -> int | None:
    """A token id of the config, else of the generation config."""
    found = fields.optional_integer(name, least=-1)
    if found is None:
        found = Fields(generation, "generation_config.json").optional_integer(name, least=-1)
    return None if found == -1 else found


def _eos(fields: Fields, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids of the config, then further ones of the generation config."""
    ids: list[int] = []
    for part in (fields, Fields(generation, "generation_config.json")):
        value = part.get("eos_token_id", None)
        for entry in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            if isinstance(entry, bool) or not isinstance(entry, int) or entry < 0:
                raise part.error("eos_token_id", f"must be a token id or a list of token ids, found {value!r}")
            if entry not in ids:
                ids.append(entry)
    return tuple(ids)


def _quantization(fields: Fields) -> dict[str, Any] | None:
    section = fields.section("quantization_config")
    if section is None:
        return None
    section.choice("quant_method", ("fp8",))
    section.choice("fmt", ("e4m3",), "e4m3")
    block = section.get("weight_block_size", None)
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise section.error("weight_block_size", f"must be two block edges such as [128, 128], found {block!r}")
    return dict(section.raw)
