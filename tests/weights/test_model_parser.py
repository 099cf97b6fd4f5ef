from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from rorqual.attention.rope import cos_sin_factor, inverse_frequencies
from rorqual.engine.hf_config.model_parser import parse_model_config
from tests.checkpoints import NAMES, TINY, checkpoint, hf_model
from tests.weights import published


def hf_config(raw: dict[str, Any]) -> Any:
    cls = getattr(transformers, raw["architectures"][0]).config_class
    # The parsed object is edited in place by transformers, so it gets a copy.
    return cls.from_dict({**json.loads(json.dumps(raw)), "model_type": cls.model_type})


@pytest.mark.parametrize("name", published.ALL)
def test_published_configs_give_the_rope_and_scale_of_transformers(name: str) -> None:
    raw = published.ALL[name]
    ours, theirs = parse_model_config(raw), hf_config(raw)
    module = __import__(type(theirs).__module__.replace("configuration", "modeling"), fromlist=["x"])
    rotary = getattr(module, type(theirs).__name__.replace("Config", "RotaryEmbedding"))(theirs)
    rope = ours.attention.rope
    assert torch.equal(inverse_frequencies(rope, torch.device("cpu")), rotary.inv_freq)
    assert cos_sin_factor(rope) == pytest.approx(rotary.attention_scaling, abs=1e-12)
    scale = module.yarn_apply_mscale if hasattr(module, "yarn_apply_mscale") else None
    if scale is not None:
        width = theirs.qk_nope_head_dim + theirs.qk_rope_head_dim
        assert ours.attention.softmax_scale == pytest.approx(scale(theirs.rope_parameters, width**-0.5), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_saved_checkpoints_give_what_the_loaded_model_has(name: str) -> None:
    path = checkpoint(name)
    config, model = parse_model_config(path), hf_model(path)
    attention = model.model.layers[0].self_attn
    assert config.attention.softmax_scale == pytest.approx(attention.scaling, rel=1e-12)
    assert config.attention.norm_eps == attention.kv_a_layernorm.variance_epsilon == 1e-6
    assert config.rms_norm_eps == model.model.norm.variance_epsilon
    assert torch.equal(inverse_frequencies(config.attention.rope, torch.device("cpu")), model.model.rotary_emb.inv_freq)
    assert cos_sin_factor(config.attention.rope) == pytest.approx(model.model.rotary_emb.attention_scaling, abs=1e-12)
    kinds = tuple("sparse" if hasattr(layer.mlp, "experts") else "dense" for layer in model.model.layers)
    assert config.mlp_types == kinds and config.n_layers == len(kinds)
    if config.attention.indexer is not None:
        full = tuple("shared" if layer.self_attn.indexer is None else "full" for layer in model.model.layers)
        assert config.attention.indexer.layer_types == full


def test_families() -> None:
    v2, lite, v3, v32, kimi, glm = (parse_model_config(published.ALL[n]) for n in ("V2", "V2-Lite", "V3", "V3.2", "Kimi-K2", "GLM-5"))
    assert v2.moe is not None and lite.moe is not None and v3.moe is not None and kimi.moe is not None and glm.moe is not None
    assert (v2.moe.scoring, v2.moe.method, v2.moe.norm_topk_prob) == ("softmax", "group_limited_greedy", False)
    assert (lite.moe.method, lite.attention.q_lora_rank, lite.moe.n_shared) == ("greedy", None, 2)
    assert (v3.moe.scoring, v3.moe.method, v3.moe.norm_topk_prob, v3.n_mtp_layers) == ("sigmoid", "noaux_tc", True, 1)
    assert (kimi.moe.n_group, kimi.moe.routed_scaling_factor, kimi.attention.rope.theta) == (1, 2.827, 50000.0)
    assert v3.attention.indexer is None and v32.attention.indexer is not None and glm.attention.indexer is not None
    assert not v32.attention.indexer.rope_interleaved and glm.attention.indexer.rope_interleaved
    assert v32.attention.softmax_scale == pytest.approx(0.135234, abs=1e-6)
    assert (glm.rms_norm_eps, glm.attention.norm_eps, glm.attention.rope.theta) == (1e-5, 1e-6, 1e6)
    assert glm.eos_token_ids == (154820, 154827, 154829)
    assert v3.mlp_types == ("dense",) * 3 + ("sparse",) * 58
    assert v3.quantization is not None and v3.quantization["weight_block_size"] == [128, 128]


def test_v2_ignores_norm_topk_prob() -> None:
    config = parse_model_config({**published.V2, "norm_topk_prob": True})
    assert config.moe is not None and config.moe.norm_topk_prob is False


def test_old_and_new_spellings_agree() -> None:
    old = parse_model_config(published.V3)
    new = {k: v for k, v in published.V3.items() if k not in ("rope_scaling", "rope_theta", "torch_dtype", "first_k_dense_replace")}
    new["rope_parameters"] = {**published.V3["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000.0}
    new["mlp_layer_types"] = ["dense"] * 3 + ["sparse"] * 58
    new["dtype"] = "bfloat16"
    assert parse_model_config(new) == old


GLM_CASES: list[dict[str, Any]] = [
    {},
    {"index_topk_freq": 4},
    {"index_topk_freq": 3, "index_skip_topk_offset": 5},
    {"index_topk_pattern": "F" + "FSS" * 25 + "FS"},
    {"index_topk_pattern": ["full"] + ["shared"] * 77, "index_topk_freq": 2},
    {"indexer_types": ["full", "shared"] * 39, "index_topk_pattern": "F" * 78},
]


@pytest.mark.parametrize("extra", GLM_CASES)
def test_indexer_types_follow_transformers(extra: dict[str, Any]) -> None:
    raw = {**published.GLM_5, **extra}
    indexer = parse_model_config(raw).attention.indexer
    assert indexer is not None and list(indexer.layer_types) == hf_config(raw).indexer_types


def test_moe_layer_freq() -> None:
    config = parse_model_config({**published.V2_LITE, "moe_layer_freq": 2, "first_k_dense_replace": 3})
    assert config.mlp_types[:7] == ("dense", "dense", "dense", "dense", "sparse", "dense", "sparse")


def test_dense_model_has_no_moe() -> None:
    config = parse_model_config({**published.V3, "n_routed_experts": None})
    assert config.moe is None and set(config.mlp_types) == {"dense"}


def test_eos_ids_of_the_generation_config_are_added(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published.V3))
    assert parse_model_config(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1], "pad_token_id": 9, "bos_token_id": 8}))
    config = parse_model_config(str(tmp_path))
    assert (config.eos_token_ids, config.pad_token_id, config.bos_token_id) == ((1, 7), 9, 0)


def test_embedded_model() -> None:
    config = parse_model_config(TINY)
    assert (config.model_type, config.n_layers, config.n_mtp_layers, config.max_position) == ("deepseek_v32", 5, 1, 8192)


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**base, **changes}


YARN = published.V3["rope_scaling"]
BAD: list[tuple[dict[str, Any], str]] = [
    (changed(published.V3, model_type="llama"), "model_type 'llama' .* is not supported; supported: deepseek_v2 .*glm_moe_dsa"),
    (changed(published.V3, architectures=["LlamaForCausalLM"]), "'LlamaForCausalLM' does not belong to model_type 'deepseek_v3'"),
    ({k: v for k, v in published.V3.items() if k != "model_type"}, "field 'model_type' is missing"),
    ({k: v for k, v in published.V3.items() if k != "kv_lora_rank"}, "field 'kv_lora_rank' is missing"),
    ({k: v for k, v in published.V3.items() if k != "q_lora_rank"}, "field 'q_lora_rank' is missing"),
    (changed(published.V3, hidden_size="big"), "field 'hidden_size' must be a whole number of at least 1, found 'big'"),
    (changed(published.V3, num_hidden_layers=0), "field 'num_hidden_layers' must be a whole number of at least 1, found 0"),
    (changed(published.V3, rms_norm_eps=-1.0), "field 'rms_norm_eps' must be a number above 0, found -1.0"),
    (changed(published.V3, attention_bias="no"), "field 'attention_bias' must be true or false, found 'no'"),
    (changed(published.V3, hidden_act="gelu"), "field 'hidden_act' must be 'silu', found 'gelu'"),
    (changed(published.V3, num_key_value_heads=8), r"field 'num_key_value_heads' must equal num_attention_heads \(128\).*found 8"),
    (changed(published.V3, mlp_bias=True), "field 'mlp_bias' true is not supported"),
    (changed(published.V3, scoring_func="softmax"), "field 'scoring_func' must be one of sigmoid, found 'softmax'"),
    (changed(published.V2, topk_method="noaux_tc"), "field 'topk_method' must be one of greedy, group_limited_greedy, found 'noaux_tc'"),
    (changed(published.V3, n_group=7), r"field 'n_group' must divide n_routed_experts \(256\), found 7"),
    (changed(published.V3, topk_group=9), r"field 'topk_group' must be at most n_group \(8\), found 9"),
    (changed(published.V3, num_experts_per_tok=129), "field 'num_experts_per_tok' must be at most the 128 experts a token can reach"),
    (changed(published.V3, rope_scaling=changed(YARN, type="linear")), "'rope_scaling.type' must be one of default, yarn, found 'linear'"),
    (changed(published.V3, rope_scaling={"type": "yarn"}), "field 'rope_scaling.factor' is missing"),
    (changed(published.V3, rope_scaling=4), "field 'rope_scaling' must be an object, found 4"),
    (changed(published.V3, partial_rotary_factor=0.5), "field 'partial_rotary_factor' other than 1 is not supported, found 0.5"),
    (changed(published.V3, qk_rope_head_dim=63), "field 'qk_rope_head_dim' must be even, found 63"),
    (changed(published.V3, torch_dtype="int8"), "field 'torch_dtype' must be one of bfloat16, float16, float32, found 'int8'"),
    (changed(published.V3, eos_token_id="end"), "field 'eos_token_id' must be a token id or a list of token ids, found 'end'"),
    (changed(published.V3, mlp_layer_types=["dense"]), "'mlp_layer_types' must be a list with one entry for each of the 61 layers"),
    (changed(published.V3, quantization_config={"quant_method": "awq"}), "'quantization_config.quant_method' must be one of fp8, found"),
    (changed(published.V3, quantization_config={"quant_method": "fp8"}), "'quantization_config.weight_block_size' must be two block edges"),
    (changed(published.V32, q_lora_rank=None), "field 'q_lora_rank' must be a whole number in a model with an indexer, found None"),
    ({k: v for k, v in published.V32.items() if k != "index_topk"}, "field 'index_topk' is missing"),
    (changed(published.V32, index_head_dim=32), r"field 'index_head_dim' must be at least qk_rope_head_dim \(64\), found 32"),
    (changed(published.V32, indexer_types=["full", "shared"] + ["full"] * 59), "may not hold 'shared' in model_type 'deepseek_v32'"),
    (changed(published.GLM_5, indexer_types=["shared"] + ["full"] * 77), "field 'indexer_types' must start with 'full'"),
    (changed(published.GLM_5, index_topk_pattern="FX" * 39), "field 'index_topk_pattern' may hold full, shared, found 'X'"),
]


@pytest.mark.parametrize(("raw", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_fields_are_named(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_model_config(raw)


def test_bad_folders(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="nowhere is not a folder; give the folder of a Hugging Face checkpoint"):
        parse_model_config(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"has no config.json, so it is not a Hugging Face checkpoint \(it holds: notes.txt\)"):
        parse_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON: "):
        parse_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="config.json must hold a JSON object, found list"):
        parse_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**published.V3, "vocab_size": None}))
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json: field 'vocab_size' must be a whole number"):
        parse_model_config(tmp_path)
