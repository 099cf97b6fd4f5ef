"""What the engine knows of a model: families reduced to one set of shapes and switches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..attention.config import MLAConfig
from ..moe.config import MoEConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One DeepSeek-family causal language model, parsed from a Hugging Face ``config.json``."""

    model_type: str  # HF model_type: deepseek_v2, deepseek_v3, deepseek_v32, glm_moe_dsa, kimi_k2
    architecture: str  # HF architectures[0]
    vocab_size: int  # rows of the embedding and of the head
    hidden: int  # model width
    n_layers: int  # decoder layers, MTP layers not counted
    intermediate: int  # width of the dense MLP
    rms_norm_eps: float  # eps of the layer norms and the final norm
    max_position: int  # max_position_embeddings
    attention: MLAConfig  # attention shapes
    moe: MoEConfig | None  # None when no layer is sparse
    mlp_types: tuple[Literal["dense", "sparse"], ...]  # per layer
    n_mtp_layers: int = 0  # MTP layers in the checkpoint (num_nextn_predict_layers); not loaded
    tie_word_embeddings: bool = False  # head shares the embedding
    dtype: str = "bfloat16"  # dtype the checkpoint declares
    bos_token_id: int | None = None  # begin-of-text token
    eos_token_ids: tuple[int, ...] = ()  # tokens that end a text
    pad_token_id: int | None = None  # padding token
    quantization: dict[str, Any] | None = None  # HF quantization_config (block FP8), None when unquantised
