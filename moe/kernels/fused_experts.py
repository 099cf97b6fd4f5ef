"""SwiGLU experts on a rank's tokens: permute, gated product, product, weighted sum; five or six launches, no wait of the host.

The gated unit (and, for FP8, its quantisation) is the first product's end: its two halves never reach memory.
"""

from __future__ import annotations

from typing import Any

import torch

from ...parallel.kernels.quantise import quantise_activation
from ...parallel.kernels.quantise_torch import empty_scales
from ...parallel.kernels.tuned import config_for
from .fused_experts_torch import ExpertWeights, check_tokens, output_dtype
from .grouped_gemm import multiply
from .grouped_gemm_hopper import hopper_programs
from .permute import permute, segment_blocks
from .permute_rows import permute_rows, unpermute
from .permute_torch import RowBlocks

Config = dict[str, Any]


def _heuristic(n_rows: int, experts: ExpertWeights) -> Config:
    """Settings by the expected rows of an expert that has any, and by how many programs the first product would be; from an H200.

    With few rows, weights are all there is to load. The plain kernel's many small programs load them best, with two stages each when
    there are plenty and three when there are not; the Hopper kernel's one program an SM does where each has either one tile or several.
    """
    n_slots, wide, hidden = experts.gate_up.shape
    opened = min(max(n_rows, 1), n_slots)
    mean = n_rows / opened
    programs = hopper_programs(experts.gate_up.device)
    if experts.gate_up.dtype == torch.float32 or not programs or wide % 256 or hidden % 256:
        return {"block": 16 if mean <= 16 else 32, "path": "tile"}
    if mean > 8:
        return {"block": 64 if mean <= 48 else 128}
    turns = opened * (wide // 256) / programs
    if turns <= 2 or 6 < turns <= 16:
        return {"block": 16, "first": {"path": "hopper"}}
    return {"block": 16, "first": {"num_stages": 3 if turns <= 6 else 2}}


def _settings(n_rows: int, experts: ExpertWeights, given: Config | None) -> Config:
    """What the caller wants, over what was measured on this GPU at the nearest shape, over the heuristic."""
    n_slots, wide, hidden = experts.gate_up.shape
    shape = {"rows": n_rows, "slots": n_slots, "hidden": hidden, "inner": wide // 2}
    dtype = str(experts.gate_up.dtype).removeprefix("torch.")
    found = config_for("fused_experts", {}, **shape, dtype=dtype) if given is None else given
    return found if "block" in found else {**_heuristic(n_rows, experts), **found}


def _gate(
    rows: torch.Tensor, scales: torch.Tensor | None, layout: RowBlocks, experts: ExpertWeights, config: Config
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """silu(gate) * up of every row, quantised for FP8 experts."""
    weights = experts.gate_up
    inner = weights.shape[1] // 2
    out = torch.empty((rows.shape[0], inner), dtype=rows.dtype, device=rows.device)
    steps = empty_scales(rows.shape[0], inner, rows.device) if experts.fp8 else None
    settings = {"path": config.get("path"), **config.get("first", {})}
    multiply(rows, weights, layout, out, a_scales=scales, b_scales=experts.gate_up_scales, out_scales=steps, gated=True, config=settings)
    return out, steps


def _swiglu(
    rows: torch.Tensor, scales: torch.Tensor | None, layout: RowBlocks, experts: ExpertWeights, dtype: torch.dtype, config: Config
) -> torch.Tensor:
    product, steps = _gate(rows, scales, layout, experts, config)
    settings = {"path": config.get("path"), **config.get("second", {})}
    out = torch.empty((rows.shape[0], experts.down.shape[1]), dtype=dtype, device=rows.device)
    multiply(product, experts.down, layout, out, a_scales=steps, b_scales=experts.down_scales, config=settings)
    return out


def expert_rows(
    x: torch.Tensor, slots: torch.Tensor, experts: ExpertWeights, *,
    x_scales: torch.Tensor | None = None, out_dtype: torch.dtype | None = None, n_rows: int | None = None, config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The output of every expert that a token chose, not yet weighted, for callers that sum where they send.

    Args: as of ``fused_experts``.

    Returns:
        (y [rows, hidden], place int32 [T, k]: the row of y of each choice, -1 for none). Slots ascend with the rows. Rows that no
        choice names hold anything.

    Raises:
        ValueError: tokens and experts do not fit each other.
    """
    check_tokens(x, experts, x_scales)
    dtype = output_dtype(x, experts, out_dtype)
    chosen = _settings(slots.numel() if n_rows is None else n_rows, experts, config)
    layout = permute(slots, experts.n_slots, block=chosen["block"])
    rows, scales = permute_rows(x, layout, quantise=experts.fp8, x_scales=x_scales, dtype=experts.gate_up.dtype)
    return _swiglu(rows, scales, layout, experts, dtype, chosen), layout.place


def fused_experts(
    x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, *,
    x_scales: torch.Tensor | None = None, out_dtype: torch.dtype | None = None, n_rows: int | None = None, config: Config | None = None,
) -> torch.Tensor:  # fmt: skip
    """Every token's experts, weighted and summed in fp32, slots ascending.

    Args:
        x: [T, hidden] bf16, fp16 or fp32, of the experts' dtype (any of them for FP8 experts), or e4m3 with ``x_scales``; rows may
            be strided. Tokens without a choice are not read.
        slots: int32 [T, k], -1 for none; a token of nothing but -1 gives zeros.
        weights: float32 [T, k].
        experts: the weights of this rank's slots.
        x_scales: float32 [T, ceil(hidden / 128)] of tokens that are e4m3 already: FP8 experts take them as they are.
        out_dtype: of the result; x's by default. Needed for e4m3 tokens and FP8 experts.
        n_rows: choices to expect, which settings go by; all of ``slots`` by default. Any number of them may come.
        config: ``{"block", "first", "second", "path"}``: rows of a block, settings of the two products, a path for both.

    Returns:
        [T, hidden]. The outputs of the experts are rounded to x's dtype (``out_dtype`` for e4m3) before they are weighted.

    Raises:
        ValueError: tokens and experts do not fit each other.
    """
    y, place = expert_rows(x, slots, experts, x_scales=x_scales, out_dtype=out_dtype, n_rows=n_rows, config=config)
    return unpermute(y, place, weights, out_dtype=out_dtype or y.dtype)


def grouped_swiglu_device(x: torch.Tensor, counts: torch.Tensor, experts: ExpertWeights, *, config: Config | None = None) -> torch.Tensor:
    """``down(silu(gate(x)) * up(x))`` of rows that arrived sorted by slot.

    Args:
        x: [N, hidden] sorted by slot; dtypes as in ``fused_experts``.
        counts: int32 or int64 [S], rows of each slot, on the device or the CPU (from where they are copied).
        experts: the weights of this rank's slots.
        config: as in ``fused_experts``.

    Returns:
        [N, hidden] in x's dtype.

    Raises:
        ValueError: tokens and experts do not fit each other.
    """
    check_tokens(x, experts)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    chosen = _settings(x.shape[0], experts, config)
    layout = segment_blocks(counts.to(x.device, non_blocking=True), x.shape[0], chosen["block"])
    rows, scales = quantise_activation(x) if experts.fp8 else (x, None)
    return _swiglu(rows, scales, layout, experts, x.dtype, chosen)
