"""Every tensor of a model, from its configuration alone: names and shapes as in the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..model_config import ModelConfig

Part = Literal["embedding", "attention", "indexer", "dense MLP", "routed experts", "shared experts", "router", "norms", "head", "MTP"]
PARTS: tuple[Part, ...] = (
    "embedding",
    "attention",
    "indexer",
    "dense MLP",
    "routed experts",
    "shared experts",
    "router",
    "norms",
    "head",
    "MTP",
)
Split = Literal["whole", "tp", "vocab", "experts"]


@dataclass(frozen=True, kw_only=True)
class TensorShape:
    """One checkpoint tensor, FP8 scales not listed."""

    name: str  # Hugging Face tensor name
    shape: tuple[int, ...]  # full shape
    part: Part  # what it belongs to
    layer: int | None  # decoder layer, None outside of them
    split: Split = "whole"  # held by every rank; divided over tp; vocabulary rows over tp; experts over the expert ranks
    keep_fp32: bool = False  # float32 in published checkpoints
    fp32_in_memory: bool = False  # float32 on the device whatever the compute dtype

    @property
    def numel(self) -> int:
        """Values in it."""
        return math.prod(self.shape)


def tensor_shapes(config: ModelConfig) -> Iterator[TensorShape]:
    """All tensors of a model, MTP layers included (their part is "MTP")."""
    vocab, hidden = config.vocab_size, config.hidden
    yield TensorShape(name="model.embed_tokens.weight", shape=(vocab, hidden), part="embedding", layer=None, split="vocab")
    for layer in range(config.n_layers):
        yield from _layer(config, layer, config.mlp_types[layer])
    yield TensorShape(name="model.norm.weight", shape=(hidden,), part="norms", layer=None)
    if not config.tie_word_embeddings:
        yield TensorShape(name="lm_head.weight", shape=(vocab, hidden), part="head", layer=None, split="vocab")
    for layer in range(config.n_layers, config.n_layers + config.n_mtp_layers):
        for tensor in (*_layer(config, layer, "sparse" if config.moe else "dense"), *_mtp_extras(config, layer)):
            yield TensorShape(name=tensor.name, shape=tensor.shape, part="MTP", layer=layer, keep_fp32=tensor.keep_fp32)


def _mtp_extras(config: ModelConfig, layer: int) -> Iterator[TensorShape]:
    """What an MTP layer has beyond a decoder layer (DeepSeek-V3 report, section 2.2)."""
    hidden, vocab = config.hidden, config.vocab_size
    for name, shape in (
        ("enorm", (hidden,)),
        ("hnorm", (hidden,)),
        ("eh_proj", (hidden, 2 * hidden)),
        ("embed_tokens", (vocab, hidden)),
        ("shared_head.norm", (hidden,)),
        ("shared_head.head", (vocab, hidden)),
    ):
        yield TensorShape(name=f"model.layers.{layer}.{name}.weight", shape=shape, part="MTP", layer=layer)


def _layer(config: ModelConfig, layer: int, kind: str) -> Iterator[TensorShape]:
    prefix = f"model.layers.{layer}"
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield TensorShape(name=f"{prefix}.{name}.weight", shape=(config.hidden,), part="norms", layer=layer)
    yield from _attention(config, layer)
    if kind == "dense":
        yield from _mlp(f"{prefix}.mlp", layer, config.hidden, config.intermediate, "dense MLP", "tp")
    else:
        yield from _moe(config, layer)


def _attention(config: ModelConfig, layer: int) -> Iterator[TensorShape]:
    a, prefix = config.attention, f"model.layers.{layer}.self_attn"
    query_width = a.n_heads * (a.nope_dim + a.rope_dim)
    linears: list[tuple[str, int, int, Split, bool]] = [
        ("kv_a_proj_with_mqa", a.latent_dim, a.hidden, "whole", a.bias),
        ("kv_b_proj", a.n_heads * (a.nope_dim + a.v_dim), a.kv_lora_rank, "tp", False),
        ("o_proj", a.hidden, a.n_heads * a.v_dim, "tp", a.bias),
    ]
    norms = [("kv_a_layernorm", a.kv_lora_rank)]
    if a.q_lora_rank is None:
        linears.append(("q_proj", query_width, a.hidden, "tp", False))
    else:
        linears.append(("q_a_proj", a.q_lora_rank, a.hidden, "whole", a.bias))
        linears.append(("q_b_proj", query_width, a.q_lora_rank, "tp", False))
        norms.append(("q_a_layernorm", a.q_lora_rank))
    for name, rows, columns, split, bias in linears:
        yield TensorShape(name=f"{prefix}.{name}.weight", shape=(rows, columns), part="attention", layer=layer, split=split)
        if bias:
            yield TensorShape(name=f"{prefix}.{name}.bias", shape=(rows,), part="attention", layer=layer)
    for name, width in norms:
        yield TensorShape(name=f"{prefix}.{name}.weight", shape=(width,), part="norms", layer=layer)
    yield from _indexer(config, layer)


def _indexer(config: ModelConfig, layer: int) -> Iterator[TensorShape]:
    a = config.attention
    i = a.indexer
    if i is None or a.q_lora_rank is None:
        return
    if layer < len(i.layer_types) and i.layer_types[layer] == "shared":
        return
    prefix = f"model.layers.{layer}.self_attn.indexer"
    yield TensorShape(name=f"{prefix}.wq_b.weight", shape=(i.n_heads * i.head_dim, a.q_lora_rank), part="indexer", layer=layer)
    yield TensorShape(name=f"{prefix}.wk.weight", shape=(i.head_dim, a.hidden), part="indexer", layer=layer)
    yield TensorShape(name=f"{prefix}.weights_proj.weight", shape=(i.n_heads, a.hidden), part="indexer", layer=layer, fp32_in_memory=True)
    for name in ("weight", "bias"):
        yield TensorShape(
            name=f"{prefix}.k_norm.{name}", shape=(i.head_dim,), part="indexer", layer=layer, keep_fp32=True, fp32_in_memory=True
        )


def _mlp(prefix: str, layer: int, hidden: int, inner: int, part: Part, split: Split) -> Iterator[TensorShape]:
    for name, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner))):
        yield TensorShape(name=f"{prefix}.{name}.weight", shape=shape, part=part, layer=layer, split=split)


def _moe(config: ModelConfig, layer: int) -> Iterator[TensorShape]:
    m, prefix = config.moe, f"model.layers.{layer}.mlp"
    assert m is not None, "a sparse layer needs a MoE configuration"
    yield TensorShape(name=f"{prefix}.gate.weight", shape=(m.n_experts, m.hidden), part="router", layer=layer, fp32_in_memory=True)
    if m.method == "noaux_tc":
        yield TensorShape(
            name=f"{prefix}.gate.e_score_correction_bias",
            shape=(m.n_experts,),
            part="router",
            layer=layer,
            keep_fp32=True,
            fp32_in_memory=True,
        )
    for expert in range(m.n_experts):
        yield from _mlp(f"{prefix}.experts.{expert}", layer, m.hidden, m.intermediate, "routed experts", "experts")
    if m.n_shared:
        yield from _mlp(f"{prefix}.shared_experts", layer, m.hidden, m.n_shared * m.intermediate, "shared experts", "tp")
