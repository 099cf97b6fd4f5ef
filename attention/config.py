"""Shapes and switches of the attention of one model family."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding over ``dim`` values; YaRN (arXiv:2309.00071) when ``factor`` is above 1."""

    dim: int  # rotated values per head (qk_rope_head_dim)
    theta: float = 10000.0  # base of the geometric frequency series
    max_position: int = 4096  # positions the model declares (max_position_embeddings)
    interleaved: bool = True  # main attention pairs neighbours (0,1),(2,3).. ; False pairs halves
    factor: float = 1.0  # YaRN context stretch; 1.0 means plain RoPE
    original_max_position: int = 4096  # positions before the stretch
    beta_fast: float = 32.0  # YaRN ramp start, in rotations
    beta_slow: float = 1.0  # YaRN ramp end, in rotations
    mscale: float | None = None  # YaRN amplitude numerator, None when the checkpoint gives none
    mscale_all_dim: float | None = None  # YaRN amplitude denominator; also scales the softmax (squared)
    attention_factor: float | None = None  # explicit amplitude of cos and sin, overrides the two above
    truncate: bool = True  # round the YaRN ramp bounds to whole frequency indices

    @property
    def softmax_mscale(self) -> float:
        """Factor on the softmax scale: ``(0.1 * mscale_all_dim * ln(factor) + 1) ** 2`` under YaRN, else 1."""
        if self.factor <= 1.0 or not self.mscale_all_dim:
            return 1.0
        return (0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0) ** 2


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """DSA lightning indexer (DeepSeek-V3.2): which ``topk`` keys a query attends to."""

    n_heads: int  # indexer heads (index_n_heads)
    head_dim: int  # values per indexer head (index_head_dim); the first rope.dim of them are rotated
    topk: int  # keys kept per query (index_topk)
    rope_interleaved: bool = False  # half-split in V3.2, interleaved in GLM
    layer_types: tuple[Literal["full", "shared"], ...] = ()  # per layer; "shared" reuses the previous full layer's keys


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2 paper, section 2.1; HF field names in brackets)."""

    hidden: int  # model width (hidden_size)
    n_heads: int  # attention heads of the whole model (num_attention_heads)
    q_lora_rank: int | None  # query latent width; None projects queries directly (q_proj)
    kv_lora_rank: int  # latent width C (kv_lora_rank)
    nope_dim: int  # unrotated values per head (qk_nope_head_dim)
    rope_dim: int  # rotated values per head (qk_rope_head_dim)
    v_dim: int  # value width per head (v_head_dim)
    bias: bool = False  # biases on q_a, kv_a and o projections (attention_bias)
    norm_eps: float = 1e-6  # eps of q_a_layernorm and kv_a_layernorm (1e-6 in every published model, not rms_norm_eps)
    rope: RopeConfig
    indexer: IndexerConfig | None = None  # None: dense attention

    @property
    def latent_dim(self) -> int:
        """Values in one cached latent row: latent, then RoPE key."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        """``(nope + rope) ** -0.5``, times YaRN's squared mscale."""
        return float((self.nope_dim + self.rope_dim) ** -0.5 * self.rope.softmax_mscale)
