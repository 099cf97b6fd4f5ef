"""Tiny random Hugging Face checkpoints, saved by transformers, and the oracle models that read them.

    path = checkpoint("v32")              # made once per process, in a temporary folder
    path = checkpoint("v3", vocab_size=4096, seed=1)
    make_checkpoint(folder, "glm_dsa")    # into a folder of your own
    model = stable_indexer(hf_model(path))

Also a script: ``python tests/checkpoints.py v32 /tmp/out``.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import shutil
import sys
import tempfile
import types
import zlib
from pathlib import Path
from typing import Any

import torch

TINY = Path(__file__).resolve().parents[1] / "launch" / "tiny"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
GROUPS = {"n_group": 4, "topk_group": 2}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
INDEXER = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 24}

# name -> (architecture, settings on top of COMMON)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # norm_topk_prob is true here because transformers ignores it for V2: a parser that honours it shows.
    "v2": (
        "DeepseekV2",
        {"n_shared_experts": 2, "topk_method": "greedy", "norm_topk_prob": True, "rope_parameters": PLAIN, "rms_norm_eps": 1e-4},
    ),
    "v2_no_q_lora": (
        "DeepseekV2",
        {"n_shared_experts": 2, "topk_method": "greedy", "q_lora_rank": None, "n_routed_experts": 8, "rope_parameters": PLAIN},
    ),
    # mscale differs from mscale_all_dim, so that cos and sin have an amplitude other than 1.
    "v2_groups": (
        "DeepseekV2",
        {
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 4.0,
            "rope_parameters": {**YARN, "mscale_all_dim": 0.707},
            **GROUPS,
        },
    ),
    "v3": ("DeepseekV3", {"rope_parameters": YARN, "num_nextn_predict_layers": 0, **GROUPS}),
    "kimi_k2": (
        "DeepseekV3",
        {
            "rope_parameters": {**YARN, "rope_theta": 50000.0, "beta_fast": 1.0},
            "num_nextn_predict_layers": 0,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
        },
    ),
    "v32": ("DeepseekV32", {"rope_parameters": YARN, **GROUPS, **INDEXER}),
    # rms_norm_eps far above the 1e-6 of q_a_layernorm and kv_a_layernorm: using it there shows.
    "glm_dsa": (
        "GlmMoeDsa",
        {
            "num_hidden_layers": 4,
            "rope_parameters": PLAIN,
            "rms_norm_eps": 1e-3,
            "indexer_types": ["full", "shared", "full", "shared"],
            "n_group": 1,
            "topk_group": 1,
            **INDEXER,
        },
    ),
}
NAMES = tuple(FAMILIES)


def _values(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Random values of one parameter; a function of name and seed only."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    noise = torch.randn(shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return noise * 0.1
    if "norm" in name:
        return noise * 0.2 if name.endswith("bias") else 1.0 + noise * 0.2
    if name.endswith("bias"):
        return noise * 0.1
    if "embed_tokens" in name:
        return noise
    gain = 1.5 if name.rsplit(".", 2)[-2] in ("lm_head", "q_b_proj", "q_proj") else 1.0
    return noise * (gain / math.sqrt(shape[-1]))


def make_checkpoint(
    folder: Path, name: str, *, seed: int = 0, max_shard_size: str = "2MB", tokenizer: bool = False, **settings: Any
) -> Path:
    """Save family ``name`` (one of NAMES) into ``folder``, fp32, in shards. ``settings`` override the config."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    family, own = FAMILIES[name]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **json.loads(json.dumps(own)), **settings})
    config.architectures = [f"{family}ForCausalLM"]
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    values = {key: _values(key, tensor.shape, seed) for key, tensor in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if name == "kimi_k2":
        edit_config(folder, model_type="kimi_k2", topk_method="noaux_tc", scoring_func="sigmoid")
    if tokenizer:
        tiny_tokenizer(folder)
    return folder


def edit_config(folder: Path, *, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Change or remove fields of ``folder/config.json``."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.update(changes)
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in remove}, indent=2), encoding="utf-8")


def tiny_tokenizer(folder: Path) -> Path:
    """Copy the embedded model's tokenizer (4,096 tokens: make the checkpoint with vocab_size=4096) into ``folder``."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / file, folder / file)
    return folder


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # forked children share the folder and must leave it
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _root() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="rorqual-checkpoints-"))
    atexit.register(_remove, folder, os.getpid())
    return folder


@functools.cache
def _cached(name: str, settings: str) -> Path:
    folder = _root() / f"{name}-{zlib.crc32(settings.encode()):08x}"
    return make_checkpoint(folder, name, **json.loads(settings))


def checkpoint(name: str, **settings: Any) -> Path:
    """Path of a tiny checkpoint (see ``make_checkpoint``), made once per process and removed at its end. Do not write into it."""
    return _cached(name, json.dumps(settings, sort_keys=True))


def hf_model(path: Path) -> Any:
    """The oracle: transformers' model of the checkpoint at ``path``, fp32, eval, plain attention and plain experts."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    cls = getattr(transformers, raw["architectures"][0])
    # transformers does not know kimi_k2: under that model_type it would leave the experts random.
    raw["model_type"] = cls.config_class.model_type
    model, info = cls.from_pretrained(
        path,
        config=cls.config_class.from_dict(raw),
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    extra = [key for key in info["unexpected_keys"] if not key.startswith(f"model.layers.{model.config.num_hidden_layers}.")]
    if info["missing_keys"] or extra:
        raise RuntimeError(f"the oracle of {path} did not load: missing {info['missing_keys']}, unexpected {extra}")
    return model.eval().requires_grad_(False)


def _sorted_topk(self: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, indices = torch.sort(self, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def stable_indexer(model: Any) -> Any:
    """Make the indexers of a V3.2 or GLM oracle choose by a stable descending sort: the lowest position wins a tie."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.Tensor.topk = _sorted_topk  # type: ignore[method-assign]
        try:
            return type(self).forward(self, *args, **kwargs)
        finally:
            del torch.Tensor.topk

    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):
            module.forward = types.MethodType(forward, module)
    return model


@torch.no_grad()
def hf_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits of every position in one pass without a cache: [len(tokens), vocab] fp32."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


@torch.no_grad()
def hf_greedy(model: Any, prompt: list[int], n: int) -> list[int]:
    """``n`` greedy tokens after ``prompt``, each from a full pass without a cache; stops at nothing."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(hf_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


if __name__ == "__main__":
    print(make_checkpoint(Path(sys.argv[2]), sys.argv[1]))
