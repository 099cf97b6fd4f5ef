"""MLA and the indexer against the attention modules of transformers, layer by layer in fp32."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rorqual.attention.config import IndexerConfig, MLAConfig, RopeConfig
from rorqual.attention.mla import MLA
from tests.attention.common import Paged

pytest.importorskip("transformers")

LENGTHS = [1, 5, 33, 70]
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
}
INDEX = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 12}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def hf_config(family: str, rope: dict, **extra):
    from transformers import DeepseekV2Config, DeepseekV3Config, DeepseekV32Config, GlmMoeDsaConfig

    kinds = {"v2": DeepseekV2Config, "v3": DeepseekV3Config, "v32": DeepseekV32Config, "glm": GlmMoeDsaConfig}
    sizes = {**SIZES, **(INDEX if family in ("v32", "glm") else {}), **extra}
    config = kinds[family](**sizes, rope_parameters=dict(rope))
    config._attn_implementation = "eager"
    return config


def our_config(family: str, rope: dict, hf) -> MLAConfig:
    yarn = (
        {}
        if rope["rope_type"] == "default"
        else {
            "factor": rope["factor"],
            "original_max_position": rope["original_max_position_embeddings"],
            **{k: rope[k] for k in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate") if k in rope},
        }
    )
    indexer = None
    if family in ("v32", "glm"):
        types = tuple(getattr(hf, "indexer_types", None) or ()) if family == "glm" else ()
        indexer = IndexerConfig(
            n_heads=hf.index_n_heads, head_dim=hf.index_head_dim, topk=hf.index_topk, rope_interleaved=family == "glm", layer_types=types
        )
    return MLAConfig(
        hidden=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        q_lora_rank=hf.q_lora_rank,
        kv_lora_rank=hf.kv_lora_rank,
        nope_dim=hf.qk_nope_head_dim,
        rope_dim=hf.qk_rope_head_dim,
        v_dim=hf.v_head_dim,
        bias=bool(hf.attention_bias),
        rope=RopeConfig(dim=hf.qk_rope_head_dim, theta=rope["rope_theta"], **yarn),
        indexer=indexer,
    )


def pair(family: str, rope: dict, layer: int = 0, seed: int = 0, **extra):
    """The transformers module, ours with the same random weights, and the rotary embedding of transformers."""
    import importlib

    name, folder = {
        "v2": ("DeepseekV2", "deepseek_v2"),
        "v3": ("DeepseekV3", "deepseek_v3"),
        "v32": ("DeepseekV32", "deepseek_v32"),
        "glm": ("GlmMoeDsa", "glm_moe_dsa"),
    }[family]
    code = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config = hf_config(family, rope, **extra)
    theirs = getattr(code, f"{name}Attention")(config, layer).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            value = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * value if "norm.weight" in key else value / parameter.shape[-1] ** 0.5)
    ours = MLA(our_config(family, rope, config), layer).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours, getattr(code, f"{name}RotaryEmbedding")(config)


@torch.no_grad()
def their_output(theirs, rotary, x: torch.Tensor, **extra):
    """Output of the transformers module on one sequence [L, hidden], and whatever it returns after it."""
    length = len(x)
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    out = theirs(x[None], position_embeddings=rotary(x[None], torch.arange(length)[None]), attention_mask=mask, **extra)
    return out[0][0], out[1:]


FAMILIES = [
    ("v2", PLAIN, {}),
    ("v2", YARN, {}),
    ("v2", PLAIN, {"q_lora_rank": None}),
    ("v3", PLAIN, {}),
    ("v3", YARN, {}),
    ("v3", PLAIN, {"attention_bias": True}),
    ("v3", {**YARN, "truncate": False, "attention_factor": 0.9}, {}),
    ("v3", {key: YARN[key] for key in YARN if "mscale" not in key}, {}),
    ("v32", PLAIN, {}),
    ("v32", YARN, {}),
    ("glm", PLAIN, {"indexer_types": ["full"] * 4}),
]


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("family,rope,extra", FAMILIES)
def test_ragged_paged_attention_equals_transformers(family, rope, extra, chunk):
    theirs, ours, rotary = pair(family, rope, **extra)
    paged = Paged(ours.config, LENGTHS)
    for mine, x in zip(paged.run(ours, chunk), paged.x, strict=True):
        torch.testing.assert_close(mine, their_output(theirs, rotary, x)[0], atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["v32", "glm"])
def test_selected_positions_equal_transformers(family):
    theirs, ours, rotary = pair(family, PLAIN, **({"indexer_types": ["full"] * 4} if family == "glm" else {}))
    paged = Paged(ours.config, [70])
    _, topk = paged.step(ours, [0], [70])
    seen = []
    theirs.indexer.register_forward_hook(lambda module, args, out: seen.append(out))
    their_output(theirs, rotary, paged.x[0])
    for position in range(70):
        wanted = np.sort([p for p in seen[0][0, position].tolist() if p <= position])[: ours.config.indexer.topk]
        mine = topk[0][position]
        assert mine[mine >= 0].tolist() == wanted.tolist(), position


def test_shared_layer_reuses_the_selection_and_equals_transformers():
    types = ["full", "shared", "full", "shared"]
    full_theirs, full, rotary = pair("glm", PLAIN, layer=0, indexer_types=types)
    shared_theirs, shared, _ = pair("glm", PLAIN, layer=1, seed=1, indexer_types=types)
    assert shared.indexer is None
    first, second = Paged(full.config, [70]), Paged(full.config, [70], has_indexer=False, seed=5)
    _, topk = first.step(full, [0], [70])
    out, passed = second.step(shared, [0], [70], torch.cat(topk))
    theirs_topk = their_output(full_theirs, rotary, first.x[0])[1][-1]
    wanted, _ = their_output(shared_theirs, rotary, second.x[0], prev_topk_indices=theirs_topk)
    torch.testing.assert_close(out[0], wanted, atol=3e-6, rtol=1e-5)
    assert torch.equal(torch.cat(passed), torch.cat(topk))


@pytest.mark.parametrize("rope", [PLAIN, YARN, {**YARN, "truncate": False}, {**YARN, "attention_factor": 1.7}])
def test_rotation_table_equals_transformers(rope):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    from rorqual.attention.rope import rotation

    config = hf_config("v3", rope)
    positions = torch.tensor([0, 1, 31, 32, 255, 100_000])
    cos, sin = DeepseekV3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    turn = rotation(our_config("v3", rope, config).rope, positions)
    assert torch.equal(turn.real, cos[0, :, :8]) and torch.equal(turn.imag, sin[0, :, :8])


def test_softmax_scale_equals_transformers():
    theirs, ours, _ = pair("v3", YARN)
    assert ours.config.softmax_scale == pytest.approx(theirs.scaling, rel=1e-12)
    assert dataclasses.replace(ours.config, rope=RopeConfig(dim=16)).softmax_scale == pytest.approx(40**-0.5)
