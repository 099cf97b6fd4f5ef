"""Block-FP8 linear layers: activations in 1 x 128 blocks times weights in 128 x 128 blocks (DeepSeek-V3 report, section 3.3).

    out[m, n] = sum over blocks k of  a_scale[m, k] * b_scale[n // 128, k] * sum over the block of a[m, .] * b[n, .]

The inner sum of 128 products is one chain of tensor-core instructions; every scaled block is added in fp32.

What a row's result depends on: its own values, and the launch chosen for the number of rows M. The choice is the same for
all M up to 16, up to 32, up to 64, up to 128, and up to each multiple of 256 above (``fp8_gemm_config``), and tuning files may
move it; within one choice a row has the same bits whatever the other rows hold and however many there are. Between choices
the order of the fp32 sum over blocks differs (programs that share a tile cut K elsewhere), so the last bits of a row may.
"""

from __future__ import annotations

from typing import Any

import torch

from . import fp8_gemm_narrow, fp8_gemm_split, fp8_gemm_tiles
from .fp8_gemm_config import bucket, config, split_config
from .fp8_gemm_torch import check_operands, output
from .hopper import addressable, has_tma
from .quantise import quantise_activation


def _column_by_column(scale: torch.Tensor) -> torch.Tensor:
    """Scales as ``quantise`` lays them; those of another layout are copied."""
    pitch = scale.stride(1)
    if scale.stride(0) == 1 and scale.data_ptr() % 16 == 0 and (pitch % 4 == 0 or scale.shape[1] == 1):
        return scale
    n_rows, blocks = scale.shape
    return torch.empty((blocks, -(-n_rows // 16) * 16), dtype=torch.float32, device=scale.device).t()[:n_rows].copy_(scale)


def run(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    chosen: dict[str, Any], *, ahead: bool = False,
) -> None:  # fmt: skip
    """Launch ``chosen`` (a result of ``config``) on checked operands; what TMA cannot address gets the portable launch.

    ``ahead``: the kernel before this one writes neither the weight nor its scales nor the bias, so they may be read early.
    """
    if chosen["kind"] != "split" and not (has_tma(a.device) and addressable(a) and addressable(b) and addressable(out)):
        chosen = split_config(bucket(a.shape[0]), b.shape[0], a.shape[1])
    settings = {name: value for name, value in chosen.items() if name != "kind"}
    if chosen["kind"] == "split":
        fp8_gemm_split.launch(a, a_scale, b, b_scale, bias, out, **settings)
        return
    a_scale = _column_by_column(a_scale)
    if chosen["kind"] == "narrow":
        fp8_gemm_narrow.launch(a, a_scale, b, b_scale, bias, out, ahead=ahead, **settings)
    else:
        fp8_gemm_tiles.launch(a, a_scale, b, b_scale, bias, out, **settings)


def fp8_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Product of quantised activations and a quantised weight, with fp32 promotion every 128 of K.

    Args:
        a: [M, K] float8_e4m3fn, rows may be strided; any M, 0 included.
        a_scale: float32 [M, ceil(K / 128)]; best as ``quantise`` lays it out, other strides cost a copy when M is large.
        b: [N, K] float8_e4m3fn, rows may be strided; any N and K, fast where TMA can address it (rows on 16 bytes).
        b_scale: float32 [ceil(N / 128), ceil(K / 128)], arbitrary values.
        out_dtype: bfloat16, float16 or float32.
        bias: [N] of any float dtype, added in fp32, or None.
        out: [M, N] of ``out_dtype`` to write, or None for a new one.

    Returns:
        [M, N] in ``out_dtype``.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit together.
    """
    check_operands(a, a_scale, b, b_scale, bias)
    out = output(a, b, out_dtype, out)
    if a.shape[0]:
        run(a, a_scale, b, b_scale, bias, out, config(a.shape[0], b.shape[0], a.shape[1]))
    return out


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x`` quantised in 1 x 128 blocks, times ``weight``: ``quantise_activation`` and ``fp8_gemm``.

    Args:
        x: [M, K] bf16, fp16 or fp32, rows may be strided.
        weight: [N, K] float8_e4m3fn with float32 ``weight_scale`` [ceil(N / 128), ceil(K / 128)].
        out_dtype: of the result; ``x``'s by default.
        bias: [N] or None.

    Returns:
        [M, N].

    Raises:
        ValueError: as ``quantise_activation`` and ``fp8_gemm``.
    """
    values, scales = quantise_activation(x)
    check_operands(values, scales, weight, weight_scale, bias)
    out = output(values, weight, out_dtype or x.dtype, None)
    if x.shape[0]:
        run(values, scales, weight, weight_scale, bias, out, config(x.shape[0], weight.shape[0], x.shape[1]), ahead=True)
    return out
