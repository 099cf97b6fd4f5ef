"""Activations to block FP8, alone and behind the gated unit of an MLP: ``comm.fp8`` says the format, this makes it on the GPU.

Layout of the scales, which the products of ``fp8_gemm`` read. They have the shape [M, ceil(K / 128)] and the values of
``comm.fp8.quantise``, but lie column by column: strides (1, P), P = M rounded up to a multiple of 16. So the scales of
neighbouring rows in one block of K are neighbours in memory, every column starts on 64 bytes, and a tile of rows is one
contiguous read (or one TMA copy: the storage is a [ceil(K / 128), P] row-major matrix). Slots M .. P of a column are never
written and never change a result. The values are plain row-major [M, K].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .overlap import early_start, enter
from .quantise_torch import BLOCK, check_gate_up, check_rows, empty_scales

_E4M3_MAX = tl.constexpr(448.0)
_MOST_PROGRAMS = 65535  # of a grid in its second direction


@triton.jit
def quantise_tile(x):
    """fp32 [R, 128] -> (e4m3 [R, 128], fp32 scales [R]): the exact arithmetic of ``comm.fp8.quantise``.

    Quotients are rounded as IEEE division does: beside a tie of e4m3 another one would go to the other side. The product with
    the rounded inverse, corrected twice by its exact remainder (Markstein's theorem), has those bits and costs half of a
    division. A power of two keeps both operands among the normal numbers; only scales that are 0 are beyond it.
    """
    largest = tl.max(tl.abs(x), axis=1)
    scale = tl.where(largest > 0, tl.div_rn(largest, tl.full(largest.shape, _E4M3_MAX, tl.float32)), 1.0)
    shift = tl.where(scale < 1e-25, 1.2089258196146292e24, tl.where(scale > 1e25, 8.271806125530277e-25, 1.0))  # 2^80, 2^-80
    x = x * shift[:, None]
    divisor = tl.broadcast_to((scale * shift)[:, None], x.shape)
    inverse = tl.broadcast_to(tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale * shift)[:, None], x.shape)
    scaled = x * inverse
    scaled = tl.fma(tl.fma(-scaled, divisor, x), inverse, scaled)
    scaled = tl.fma(tl.fma(-scaled, divisor, x), inverse, scaled)
    scaled = tl.clamp(scaled, -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(tl.float8e4nv), scale


@triton.jit
def silu_mul_tile(gate, up, dtype: tl.constexpr):
    """silu(gate) * up in fp32, rounded once to ``dtype``."""
    gate = gate.to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["n_rows"])
def quantise_kernel(
    x, values, scales, count, n_rows, width, x_stride, scale_stride,
    GATED: tl.constexpr, COUNTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (k, r): block k of the columns of ROWS rows."""
    enter(EARLY)
    block = tl.program_id(0)
    if COUNTED:
        n_rows = tl.minimum(n_rows, tl.load(count))
    first = tl.program_id(1) * ROWS
    if first < n_rows:
        rows = first + tl.arange(0, ROWS)
        columns = block * BLOCK + tl.arange(0, BLOCK)
        mask = (rows < n_rows)[:, None] & (columns < width)[None, :]
        source = x + rows.to(tl.int64)[:, None] * x_stride + columns[None, :]
        tile = tl.load(source, mask=mask, other=0.0)
        if GATED:
            tile = silu_mul_tile(tile, tl.load(source + width, mask=mask, other=0.0), tile.dtype)
        value, scale = quantise_tile(tile.to(tl.float32))
        tl.store(values + rows.to(tl.int64)[:, None] * width + columns[None, :], value, mask=mask)
        tl.store(scales + block.to(tl.int64) * scale_stride + rows, scale, mask=rows < n_rows)


@triton.jit(do_not_specialize=["n_rows"])
def silu_mul_kernel(
    x, out, count, n_rows, width, x_stride, COUNTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Program (k, r): columns k * BLOCK .. of ROWS rows."""
    enter(EARLY)
    if COUNTED:
        n_rows = tl.minimum(n_rows, tl.load(count))
    first = tl.program_id(1) * ROWS
    if first < n_rows:
        rows = first + tl.arange(0, ROWS)
        columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = (rows < n_rows)[:, None] & (columns < width)[None, :]
        source = x + rows.to(tl.int64)[:, None] * x_stride + columns[None, :]
        gate = tl.load(source, mask=mask, other=0.0)
        product = silu_mul_tile(gate, tl.load(source + width, mask=mask, other=0.0), gate.dtype)
        tl.store(out + rows.to(tl.int64)[:, None] * width + columns[None, :], product, mask=mask)


def _rows_a_program(n_rows: int, blocks: int) -> tuple[int, int]:
    """(rows, warps) of a program: small ones while they would not fill the GPU, large ones where a grid would be too high."""
    if n_rows > 16 * _MOST_PROGRAMS:
        return 64, 4
    return (16, 4) if n_rows * blocks >= 16 * 1024 else (4, 1)


def _launch(x: torch.Tensor, width: int, gated: bool, count: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    n_rows = x.shape[0]
    values = torch.empty((n_rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = empty_scales(n_rows, width, x.device)
    blocks = scales.shape[1]
    if n_rows and blocks:
        rows, warps = _rows_a_program(n_rows, blocks)
        quantise_kernel[(blocks, triton.cdiv(n_rows, rows))](
            x, values, scales, count, n_rows, width, x.stride(0), scales.stride(1),
            GATED=gated, COUNTED=count is not None, ROWS=rows, BLOCK=BLOCK, num_warps=warps, **early_start(x.device),
        )  # fmt: skip
    return values, scales


def quantise_activation(x: torch.Tensor, *, count: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Block FP8 of ``x`` in blocks of 1 x 128, bit for bit that of ``comm.fp8.quantise`` for finite values.

    Args:
        x: [M, K] bf16, fp16 or fp32; rows may be strided. K need not be a multiple of 128.
        count: int32 [1] on the device, or None. Rows from there on are not computed, and their slots hold anything.

    Returns:
        (values float8_e4m3fn [M, K], scales float32 [M, ceil(K / 128)] lying column by column, see above).

    Raises:
        ValueError: ``x`` is not a matrix of such a dtype with contiguous columns.
    """
    check_rows(x)
    return _launch(x, x.shape[1], False, count)


def silu_mul_quantise(gate_up: torch.Tensor, *, count: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantise_activation(silu_mul(gate_up))`` in one pass, bit for bit.

    Args:
        gate_up: [M, 2 * I], the gate's columns first; dtypes, strides and ``count`` as in ``quantise_activation``.

    Returns:
        (values float8_e4m3fn [M, I], scales float32 [M, ceil(I / 128)] lying column by column).

    Raises:
        ValueError: as ``quantise_activation``, or an odd number of columns.
    """
    return _launch(gate_up, check_gate_up(gate_up), True, count)


def silu_mul(gate_up: torch.Tensor, *, count: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up, computed in fp32 and rounded once.

    Args:
        gate_up: [M, 2 * I], the gate's columns first; dtypes, strides and ``count`` as in ``quantise_activation``.

    Returns:
        [M, I] in ``gate_up``'s dtype.

    Raises:
        ValueError: as ``silu_mul_quantise``.
    """
    width = check_gate_up(gate_up)
    n_rows = gate_up.shape[0]
    out = torch.empty((n_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if n_rows and width:
        blocks = triton.cdiv(width, BLOCK)
        rows, warps = _rows_a_program(n_rows, blocks)
        silu_mul_kernel[(blocks, triton.cdiv(n_rows, rows))](
            gate_up, out, count, n_rows, width, gate_up.stride(0),
            COUNTED=count is not None, ROWS=rows, BLOCK=BLOCK, num_warps=warps, **early_start(gate_up.device),
        )  # fmt: skip
    return out
