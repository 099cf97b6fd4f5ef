"""SwiGLU experts on a rank's tokens in plain PyTorch, and the weights both versions take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...parallel.kernels.quantise_torch import quantise_activation
from .grouped_gemm_torch import FP8, grouped_gemm
from .permute_torch import RowBlocks, permute, permute_rows, segment_blocks, unpermute


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The experts of S slots: ``down(silu(gate(x)) * up(x))``."""

    gate_up: torch.Tensor  # [S, 2 * I, hidden], the gate's rows first; fp32, bf16, fp16 or float8_e4m3fn
    down: torch.Tensor  # [S, hidden, I]
    gate_up_scales: torch.Tensor | None = None  # float32 [S, ceil(2 * I / 128), ceil(hidden / 128)], for FP8
    down_scales: torch.Tensor | None = None  # float32 [S, ceil(hidden / 128), ceil(I / 128)]

    def __post_init__(self) -> None:
        slots, wide, hidden = self.gate_up.shape
        if tuple(self.down.shape) != (slots, hidden, wide // 2) or wide % 2 or self.down.dtype != self.gate_up.dtype:
            found = f"{self.gate_up.dtype} {tuple(self.gate_up.shape)} and {self.down.dtype} {tuple(self.down.shape)}"
            raise ValueError(f"experts need gate_up [S, 2 * I, hidden] and down [S, hidden, I] of one dtype, found {found}")
        if self.fp8 and wide // 2 % 128:
            raise ValueError(f"FP8 experts need a width that is a multiple of 128, found {wide // 2}; dequantise them")

    @property
    def fp8(self) -> bool:
        """Whether the weights are block FP8."""
        return self.gate_up.dtype == FP8

    @property
    def n_slots(self) -> int:
        """S."""
        return self.gate_up.shape[0]


def check_tokens(x: torch.Tensor, experts: ExpertWeights, scales: torch.Tensor | None = None) -> None:
    """Refuse tokens of another width or dtype than the experts, or with gaps between their columns."""
    floats = (torch.bfloat16, torch.float16, torch.float32)
    fits = x.dtype == FP8 if scales is not None else x.dtype in floats if experts.fp8 else x.dtype == experts.gate_up.dtype
    if x.dim() != 2 or x.shape[1] != experts.gate_up.shape[2] or not fits or x.stride(1) != 1:
        found = f"{x.dtype} {tuple(x.shape)} of strides {x.stride()} for {experts.gate_up.dtype} {tuple(experts.gate_up.shape)}"
        raise ValueError(
            "tokens must be [T, hidden] of the experts' width and dtype (any float for FP8 experts, e4m3 with scales), columns "
            f"contiguous, found {found}"
        )


def output_dtype(x: torch.Tensor, experts: ExpertWeights, out_dtype: torch.dtype | None) -> torch.dtype:
    """Dtype of the experts' outputs before they are weighted: the tokens', or what is asked for where those are e4m3."""
    if x.dtype != FP8:
        return x.dtype
    if out_dtype is None and experts.fp8:
        raise ValueError("e4m3 tokens do not say in which dtype results are wanted; give out_dtype")
    return out_dtype or experts.gate_up.dtype


def _swiglu(rows: torch.Tensor, scales: torch.Tensor | None, layout: RowBlocks, experts: ExpertWeights, dtype: torch.dtype) -> torch.Tensor:
    both = grouped_gemm(rows, experts.gate_up, layout, a_scales=scales, b_scales=experts.gate_up_scales, out_dtype=torch.float32)
    inner = both.shape[1] // 2
    product = torch.nn.functional.silu(both[:, :inner]) * both[:, inner:]
    if not experts.fp8:
        return grouped_gemm(product.to(rows.dtype), experts.down, layout, out_dtype=dtype)
    values, steps = quantise_activation(product)
    return grouped_gemm(values, experts.down, layout, a_scales=steps, b_scales=experts.down_scales, out_dtype=dtype)


def expert_rows(
    x: torch.Tensor, slots: torch.Tensor, experts: ExpertWeights, *,
    x_scales: torch.Tensor | None = None, out_dtype: torch.dtype | None = None, n_rows: int | None = None,
    config: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See ``fused_experts.expert_rows``."""
    check_tokens(x, experts, x_scales)
    dtype = output_dtype(x, experts, out_dtype)
    layout = permute(slots, experts.n_slots, block=16)
    rows, scales = permute_rows(x, layout, quantise=experts.fp8, x_scales=x_scales, dtype=experts.gate_up.dtype)
    return _swiglu(rows, scales, layout, experts, dtype), layout.place


def fused_experts(
    x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, *,
    x_scales: torch.Tensor | None = None, out_dtype: torch.dtype | None = None, n_rows: int | None = None,
    config: dict[str, Any] | None = None,
) -> torch.Tensor:  # fmt: skip
    """See ``fused_experts.fused_experts``."""
    y, place = expert_rows(x, slots, experts, x_scales=x_scales, out_dtype=out_dtype)
    return unpermute(y, place, weights, out_dtype=out_dtype or y.dtype)


def grouped_swiglu_device(
    x: torch.Tensor, counts: torch.Tensor, experts: ExpertWeights, *, config: dict[str, Any] | None = None
) -> torch.Tensor:
    """See ``fused_experts.grouped_swiglu_device``."""
    check_tokens(x, experts)
    layout = segment_blocks(counts.to(x.device), x.shape[0], 16)
    rows, scales = quantise_activation(x) if experts.fp8 else (x, None)
    return _swiglu(rows, scales, layout, experts, x.dtype)
