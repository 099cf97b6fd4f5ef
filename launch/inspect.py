"""What a model is made of and what it takes: parameters, bytes, memory per rank under a layout, KV bytes per token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..attention.kv.layout import index_row_bytes, kv_bytes_per_token, latent_row_bytes
from ..engine.config_check import check_page_size
from ..engine.hf_config.model_parser import parse_model_config
from ..engine.model_config import ModelConfig
from ..engine.models.shards import stage_layers
from ..engine.weights.convert import is_quantised
from ..engine.weights.fp8 import BLOCK, scale_shape
from ..engine.weights.hub import resolve_model
from ..engine.weights.shapes import PARTS, TensorShape, tensor_shapes
from .inspect_experts import ExpertPlaces
from .inspect_text import render

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def run_inspect(model: str, *, kv_cache_dtype: str = "auto", index_cache_dtype: str = "auto", as_json: bool = False, **layout: Any) -> str:
    """Describe a model by name (see ``resolve_model``), as text or JSON; ``layout``: see ``describe``.

    Raises:
        ValueError: no such model, a config that is not understood, or a layout that does not fit it.
    """
    config = parse_model_config(resolve_model(model, weights=False))
    found = describe(config, kv_dtype=kv_cache_dtype, index_dtype=index_cache_dtype, **layout)
    return json.dumps(found, indent=2) if as_json else render(found)


def describe(
    config: ModelConfig,
    *,
    tp: int = 1,
    dp: int = 1,
    pp: int = 1,
    ep: int | None = None,
    page_size: int = 64,
    kv_dtype: str = "auto",
    index_dtype: str = "auto",
    num_redundant_experts: int | None = None,
    enable_eplb: bool = False,
) -> dict[str, Any]:
    """Architecture, counts per part, memory per rank, and KV bytes of a model under a layout.

    Args:
        config: the model.
        tp, dp, pp: degrees of the grid.
        ep: ranks the experts are spread over, dp * tp (default) or 1.
        page_size: tokens of a KV page.
        kv_dtype: "float32", "bfloat16", "fp8", or "auto" for the model's dtype.
        index_dtype: of index keys, "float32", "bfloat16", "fp8", "fp4", or "auto" for that of the rows.
        num_redundant_experts: slots of a layer beyond one for every expert, None for none.
        enable_eplb: experts move, for which ranks keep buffers.

    Returns:
        Numbers only of whole values and bytes. Ranks of one pipeline stage hold the same, and are listed once.

    Raises:
        ValueError: the layout does not fit the model, or no cache has such pages.
    """
    check_page_size(page_size)
    experts = ExpertPlaces.of(
        config, tp=tp, dp=dp, pp=pp, ep=ep, num_redundant_experts=num_redundant_experts, enable_eplb=enable_eplb
    )  # fmt: skip
    _check(config, tp, dp, pp, ep, placed=experts.placed)
    spread = dp * tp if ep is None else ep
    dtype = _kv_dtype(config, kv_dtype)
    tensors = list(tensor_shapes(config))
    stages = [_stage(config, tensors, stage_layers(config.n_layers, pp, s), tp, spread, experts) for s in range(pp)]
    return {
        "architecture": _architecture(config),
        "parts": _parts(config, tensors),
        "total": _total(config, tensors),
        "layout": {"tp": tp, "dp": dp, "pp": pp, "ep": spread, "world": tp * dp * pp},
        "per_rank": stages,
        "kv": _kv(config, dtype, dtype if index_dtype == "auto" else index_dtype, page_size, pp),
    }


def _check(config: ModelConfig, tp: int, dp: int, pp: int, ep: int | None, *, placed: bool) -> None:
    for name, degree in (("tp", tp), ("dp", dp), ("pp", pp)):
        if degree < 1:
            raise ValueError(f"{name} must be at least 1, found {degree}")
    if ep not in (None, 1, dp * tp):
        raise ValueError(f"ep {ep} does not fit dp {dp} x tp {tp}; valid: {sorted({1, dp * tp})}")
    moe = config.moe
    spread = dp * tp if ep is None else ep
    wanted = [("num_attention_heads", config.attention.n_heads, tp), ("intermediate_size", config.intermediate, tp)]
    if moe is not None:
        wanted.append(("shared expert width", moe.n_shared * moe.intermediate, tp))
        if spread == 1:
            wanted.append(("moe_intermediate_size", moe.intermediate, tp))
        elif not placed:
            wanted.append(("routed experts", moe.n_experts, spread))
    for what, size, degree in wanted:
        if size % degree:
            valid = [d for d in range(1, min(size, 1024) + 1) if size % d == 0]
            raise ValueError(f"{what} {size} does not divide over {degree} ranks; valid: {valid}")


def _kv_dtype(config: ModelConfig, asked: str) -> str:
    if asked not in ("auto", "float32", "bfloat16", "fp8"):
        raise ValueError(f"kv cache dtype must be auto, float32, bfloat16 or fp8, found {asked!r}")
    name = config.dtype if asked == "auto" else asked
    return "bfloat16" if name == "float16" else name


def _architecture(config: ModelConfig) -> dict[str, Any]:
    a, m = config.attention, config.moe
    facts: dict[str, Any] = {
        "model_type": config.model_type,
        "architecture": config.architecture,
        "dtype": config.dtype,
        "quantization": None if config.quantization is None else "block FP8",
        "vocab_size": config.vocab_size,
        "hidden": config.hidden,
        "layers": config.n_layers,
        "sparse_layers": config.mlp_types.count("sparse"),
        "mtp_layers": config.n_mtp_layers,
        "max_position": config.max_position,
        "heads": a.n_heads,
        "head_dims": {"nope": a.nope_dim, "rope": a.rope_dim, "value": a.v_dim},
        "latent_ranks": {"query": a.q_lora_rank, "kv": a.kv_lora_rank},
        "rope": {"theta": a.rope.theta, "yarn_factor": a.rope.factor},
        "indexer": None,
        "moe": None,
    }
    if a.indexer is not None:
        i = a.indexer
        layers = sum(_has_indexer(config))
        facts["indexer"] = {"heads": i.n_heads, "head_dim": i.head_dim, "topk": i.topk, "layers": layers}
    if m is not None:
        facts["moe"] = {
            "experts": m.n_experts,
            "top_k": m.top_k,
            "shared": m.n_shared,
            "intermediate": m.intermediate,
            "groups": m.n_group,
            "top_groups": m.topk_group,
            "scoring": m.scoring,
            "method": m.method,
        }
    return facts


def _stored_bytes(config: ModelConfig, tensor: TensorShape) -> int:
    """Bytes in the checkpoint, FP8 scales included."""
    if tensor.keep_fp32:
        return 4 * tensor.numel
    if config.quantization is not None and is_quantised(tensor.name):
        rows, columns = scale_shape((tensor.shape[0], tensor.shape[1]), tuple(config.quantization.get("weight_block_size") or BLOCK))
        return tensor.numel + 4 * rows * columns
    return _BYTES[config.dtype] * tensor.numel


def _parts(config: ModelConfig, tensors: Sequence[TensorShape]) -> dict[str, dict[str, int]]:
    counts = {part: {"tensors": 0, "parameters": 0, "bytes": 0} for part in PARTS}
    for tensor in tensors:
        row = counts[tensor.part]
        row["tensors"] += 1
        row["parameters"] += tensor.numel
        row["bytes"] += _stored_bytes(config, tensor)
    return {part: row for part, row in counts.items() if row["tensors"]}


def _total(config: ModelConfig, tensors: Sequence[TensorShape]) -> dict[str, int]:
    main = [t for t in tensors if t.part != "MTP"]
    total = sum(t.numel for t in main)
    experts = sum(t.numel for t in main if t.part == "routed experts")
    used = experts * config.moe.top_k // config.moe.n_experts if config.moe is not None else 0
    return {
        "parameters": total,
        "active_parameters": total - experts + used,
        "bytes": sum(_stored_bytes(config, t) for t in main),
        "parameters_with_mtp": sum(t.numel for t in tensors),
        "bytes_with_mtp": sum(_stored_bytes(config, t) for t in tensors),
    }


def _stage(
    config: ModelConfig, tensors: Sequence[TensorShape], layers: range, tp: int, spread: int, experts: ExpertPlaces
) -> dict[str, Any]:
    """Weight memory of one rank of a pipeline stage, in the compute dtype (FP8 weights are expanded on loading)."""
    ways = {"whole": 1, "tp": tp, "experts": spread if spread > 1 else tp}
    found: dict[str, int] = {}
    for tensor in tensors:
        if tensor.part == "MTP" or not _on_stage(config, tensor, layers):
            continue
        if tensor.split == "vocab":
            values = -(-tensor.shape[0] // tp) * tensor.shape[1]
        else:
            values = tensor.numel // ways[tensor.split] if tensor.split != "experts" else tensor.numel
        size = values * (4 if tensor.fp32_in_memory else _BYTES[config.dtype])
        found[tensor.part] = found.get(tensor.part, 0) + size
    if "routed experts" in found:
        found["routed experts"] = experts.scaled(found["routed experts"], ways["experts"])
    staging = experts.staging(_BYTES[config.dtype])
    if staging:
        found["experts on the move"] = staging
    text = experts.text(layers, _BYTES[config.dtype])
    return {"layers": [layers.start, layers.stop], "bytes": sum(found.values()), "parts": found, "experts": text}


def _on_stage(config: ModelConfig, tensor: TensorShape, layers: range) -> bool:
    """Embedding on the first stage, final norm and head on the last, layers where they belong."""
    if tensor.layer is not None:
        return tensor.layer in layers
    first, last = layers.start == 0, layers.stop == config.n_layers
    return (first or (config.tie_word_embeddings and last)) if tensor.part == "embedding" else last


def _has_indexer(config: ModelConfig) -> list[bool]:
    indexer = config.attention.indexer
    if indexer is None:
        return [False] * config.n_layers
    kinds = indexer.layer_types or ("full",) * config.n_layers
    return [kind == "full" for kind in kinds]


def _kv(config: ModelConfig, dtype: str, index_dtype: str, page_size: int, pp: int) -> dict[str, Any]:
    """Cache bytes of a token: over all layers, and on the ranks of each stage."""
    has = _has_indexer(config)
    stages = [stage_layers(config.n_layers, pp, s) for s in range(pp)]
    total = kv_bytes_per_token(config.attention, has, dtype, index_dtype)
    return {
        "dtype": dtype,
        "page_size": page_size,
        "latent_bytes_per_token_layer": latent_row_bytes(config.attention, dtype),
        "index_dtype": index_dtype,
        "indexer_bytes_per_token_layer": index_row_bytes(config.attention, index_dtype),
        "bytes_per_token": total,
        "bytes_per_page": total * page_size,
        "bytes_per_token_per_stage": [
            kv_bytes_per_token(config.attention, [has[i] for i in layers], dtype, index_dtype) for layers in stages
        ],
    }
