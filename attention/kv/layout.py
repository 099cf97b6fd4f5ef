"""Row formats of the caches: FP8 latent rows (656 bytes at DeepSeek-V3 widths), index keys, and sizes in bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..config import MLAConfig
from . import fp4

E4M3_MAX = 448.0  # largest finite float8_e4m3fn
_GROUP = 128  # latent values that share one scale
_FLOAT_BYTES = {"float32": 4, "bfloat16": 2}
INDEX_FORMATS = (*_FLOAT_BYTES, "fp8", "fp4")  # of index keys; latent rows have all but the last


def n_scales(width: int) -> int:
    """fp32 scales of an FP8 latent of ``width`` values: one per 128, the last group may be short."""
    return -(-width // _GROUP)


def fp8_latent_bytes(latent: int, rope: int) -> int:
    """Bytes of an FP8 latent row: ``latent`` e4m3 values, their fp32 scales, ``rope`` bf16 values."""
    return latent + 4 * n_scales(latent) + 2 * rope


def latent_row_bytes(config: MLAConfig, dtype: str) -> int:
    """Bytes one token takes in one layer's latent cache."""
    if dtype == "fp8":
        return fp8_latent_bytes(config.kv_lora_rank, config.rope_dim)
    return config.latent_dim * _FLOAT_BYTES[dtype]


def index_row_bytes(config: MLAConfig, dtype: str) -> int:
    """Bytes one token takes in one layer's index-key cache, whose format is ``dtype``; 0 without an indexer."""
    if config.indexer is None:
        return 0
    width = config.indexer.head_dim
    if dtype in ("fp8", "fp4"):
        return width + 4 if dtype == "fp8" else fp4.key_bytes(width)
    return width * _FLOAT_BYTES[dtype]


def kv_bytes_per_token(config: MLAConfig, layer_has_indexer: Sequence[bool], dtype: str, index_dtype: str | None = None) -> int:
    """Cache bytes of one token over all the layers listed; ``index_dtype`` of index keys is ``dtype`` by default.

    Raises:
        ValueError: a dtype is unknown, or the widths do not fit its format.
    """
    check_layout(config, dtype, index_dtype)
    index = sum(layer_has_indexer) * index_row_bytes(config, index_dtype or dtype)
    return len(layer_has_indexer) * latent_row_bytes(config, dtype) + index


def check_layout(config: MLAConfig, dtype: str, index_dtype: str | None = None) -> None:
    """Refuse cache formats that are unknown or that the model's widths do not fit; ``index_dtype`` is ``dtype`` by default.

    Raises:
        ValueError: naming the value found and what would be valid.
    """
    _check_latent(config, dtype)
    _check_index(config, index_dtype or dtype)


def _check_latent(config: MLAConfig, dtype: str) -> None:
    if dtype not in (*_FLOAT_BYTES, "fp8"):
        raise ValueError(f"unknown KV cache dtype {dtype!r}; use one of float32, bfloat16, fp8")
    if dtype != "fp8":
        return
    if config.kv_lora_rank % 4 or config.rope_dim % 2:
        raise ValueError(
            f"KV cache dtype fp8 needs kv_lora_rank divisible by 4 and an even qk_rope_head_dim, got {config.kv_lora_rank} "
            f"and {config.rope_dim}; use float32 or bfloat16"
        )


def _check_index(config: MLAConfig, dtype: str) -> None:
    """FP8 and FP4 keys are Hadamard-transformed, which takes a power of two; FP4 has blocks of 32."""
    if dtype not in INDEX_FORMATS:
        raise ValueError(f"unknown index cache dtype {dtype!r}; use one of {', '.join(INDEX_FORMATS)}")
    if dtype in _FLOAT_BYTES or config.indexer is None:
        return
    width, least = config.indexer.head_dim, 4 if dtype == "fp8" else 32
    if width < least or width & (width - 1):
        others = "float32 or bfloat16" if width & (width - 1) or width < 4 or dtype == "fp8" else "float32, bfloat16 or fp8"
        raise ValueError(
            f"index keys in {dtype} need an index_head_dim that is a power of two, {least} or more, got {width}; use {others} "
            "(index_cache_dtype; with auto it is kv_cache_dtype)"
        )


def quantise(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 bytes (uint8 [T, W]) and fp32 scales [T, ceil(W / group)] of ``values`` [T, W] in any float dtype.

    A scale is ``amax / 448`` of its group. The error of a value is at most 1/16 of it, or 2**-10 scales if that is more.
    """
    tokens, width = values.shape
    groups = -(-width // group)
    padded = torch.nn.functional.pad(values.float(), (0, groups * group - width)).view(tokens, groups, group)
    largest = padded.abs().amax(-1).clamp_min(1e-12)
    scales = largest / torch.full_like(largest, E4M3_MAX)  # a number would be a product with its rounded inverse on CUDA
    scaled = (padded / scales[:, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).view(tokens, groups * group)[:, :width], scales


def encode_latent(values: torch.Tensor, latent: int) -> torch.Tensor:
    """FP8 rows, uint8 [T, bytes], of ``values`` [T, latent + rope]: e4m3 latent, fp32 scales, bf16 RoPE key."""
    codes, scales = quantise(values[:, :latent], _GROUP)
    return torch.cat((codes, _as_bytes(scales), _as_bytes(values[:, latent:].to(torch.bfloat16))), 1)


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Bytes of each row of ``values`` [T, W], uint8 [T, W * size]. Flat in between: an empty tensor may have any strides."""
    return values.reshape(-1).view(torch.uint8).view(len(values), values.shape[1] * values.element_size())


def decode_latent(rows: torch.Tensor, latent: int) -> torch.Tensor:
    """fp32 [N, latent + rope] of FP8 rows, uint8 [N, bytes]. Scales may be any fp32."""
    groups = n_scales(latent)
    codes, scales, rope = torch.split(rows, [latent, 4 * groups, rows.shape[1] - latent - 4 * groups], 1)
    factors = scales.contiguous().view(torch.float32).repeat_interleave(_GROUP, 1)[:, :latent]
    wide = codes.contiguous().view(torch.float8_e4m3fn).float() * factors
    return torch.cat((wide, rope.contiguous().view(torch.bfloat16).float()), 1)
