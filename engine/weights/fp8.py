"""Block FP8 weights (DeepSeek-V3 report, section 3.3): e4m3 values with one scale per 128 x 128 block.

``weight = values * scale`` in float32, the scale of element (i, j) being ``weight_scale_inv[i // 128, j // 128]``. Blocks
at the bottom and right edge may be short. Scales are float32, or powers of two stored as one exponent byte (ue8m0).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

BLOCK = (128, 128)
SCALE_SUFFIX = "_scale_inv"
E4M3_MAX = 448.0
_STRIP = 1 << 22  # values dequantised at once: bounds the float32 temporaries to a few times 16 MiB

ScaleFormat = Literal["float32", "ue8m0"]


def scale_shape(shape: tuple[int, ...], block: tuple[int, int] = BLOCK) -> tuple[int, int]:
    """Shape of the scales of a weight of ``shape`` [rows, columns]."""
    rows, columns = shape
    return -(-rows // block[0]), -(-columns // block[1])


def decode_scale(scale: torch.Tensor) -> torch.Tensor:
    """Scales as float32, from float32, bfloat16, ue8m0, or ue8m0 exponents stored as uint8."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.float()


def _strips(rows: tuple[int, int], columns: int, edge: int) -> Iterator[tuple[int, int]]:
    """Cut ``rows`` at multiples of ``edge`` into strips of about ``_STRIP`` values."""
    start, stop = rows
    step = max(_STRIP // max(columns, 1) // edge, 1) * edge
    while start < stop:
        end = min(start // edge * edge + step, stop)
        yield start, end
        start = end


def dequantise_into(
    out: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    bounds: tuple[tuple[int, int], tuple[int, int]],
    block: tuple[int, int] = BLOCK,
) -> None:
    """Write a part of an FP8 weight into ``out``: exactly value x scale in float32, then cast to ``out``'s dtype.

    Args:
        out: [r1 - r0, c1 - c0], any float dtype and device.
        values: the whole stored weight, float8_e4m3fn [rows, columns].
        scale: its decoded scales, float32 of ``scale_shape``.
        bounds: ((r0, r1), (c0, c1)), any offsets within the weight.
        block: rows and columns that share a scale.
    """
    (r0, r1), (c0, c1) = bounds
    column_of = torch.arange(c0, c1) // block[1]
    for start, stop in _strips((r0, r1), c1 - c0, block[0]):
        row_of = torch.arange(start, stop) // block[0]
        part = values[start:stop, c0:c1].to(out.device).float()
        part *= scale[row_of][:, column_of].to(out.device)
        out[start - r0 : stop - r0].copy_(part)


def quantise_block_fp8(
    weight: torch.Tensor, block: tuple[int, int] = BLOCK, scale_format: ScaleFormat = "float32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight [rows, columns] in any float dtype: (float8_e4m3fn values, scales of ``scale_shape``).

    A scale is the largest magnitude of its block over 448; with "ue8m0" it is rounded up to a power of two and stored
    as float8_e8m0fnu. Blocks of zeros get the scale 1.
    """
    rows, columns = weight.shape
    n_rows, n_columns = scale_shape((rows, columns), block)
    padded = torch.zeros(n_rows * block[0], n_columns * block[1], dtype=torch.float32)
    padded[:rows, :columns] = weight
    blocks = padded.view(n_rows, block[0], n_columns, block[1])
    scale = blocks.abs().amax((1, 3)) / E4M3_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    if scale_format == "ue8m0":
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2**exponent, mantissa in [0.5, 1)
        scale = torch.ldexp(torch.ones_like(scale), torch.where(mantissa > 0.5, exponent, exponent - 1))
    values = (blocks / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).view_as(padded)[:rows, :columns]
    stored = scale.to(torch.float8_e8m0fnu) if scale_format == "ue8m0" else scale
    return values.contiguous().to(torch.float8_e4m3fn), stored
