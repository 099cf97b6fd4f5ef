"""Sharing tiles among programs: equal parts of the work, added up in one fixed order.

The shared tiles are one list of units, a block of K each, tile after tile and along K inside a tile; program p of P takes
units p * U / P .. (p + 1) * U / P. Programs that have only a part of a tile leave its fp32 sums in a workspace, and a second,
small kernel adds the parts in the order of K; on Hopper it is launched ahead and waits on the device.

A program has two places in the workspace, 2 p for the tile that it enters in the middle and 2 p + 1 for one that it begins and
does not finish; so the parts of a tile lie at 2 p + 1, 2 (p + 1), 2 (p + 2), .. for the programs p, p + 1, .. that share it.
Every place is a dense matrix, ROWS x 128 in the orientation of the output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def tile_of(index, n_row_tiles, n_column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile) of a running index: bands of GROUP row tiles, column by column, so that the L2 holds what is shared."""
    band = index // (GROUP * n_column_tiles)
    first = band * GROUP
    height = tl.minimum(n_row_tiles - first, GROUP)
    inside = index % (GROUP * n_column_tiles)
    return first + inside % height, inside // height


@triton.jit
def program_of(unit, n_units, programs):
    """The program whose share holds a unit."""
    return ((unit + 1) * programs - 1) // n_units


@triton.jit(do_not_specialize=["n_rows", "n_row_tiles", "n_column_tiles", "n_blocks", "n_whole", "programs"])
def fp8_gemm_parts_kernel(
    partial, bias, out, out_stride, n_rows, n_columns, n_row_tiles, n_column_tiles, n_blocks, n_whole, programs,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Program (shared tile, CHUNK of its rows): the sum of the parts, if the tile has more than one."""
    if WAIT:
        gdc_wait()
    tile = tl.program_id(0)
    n_units = tl.num_programs(0) * n_blocks
    first = program_of(tile * n_blocks, n_units, programs)
    sharers = program_of((tile + 1) * n_blocks - 1, n_units, programs) - first + 1
    row_tile, column_tile = tile_of(n_whole * programs + tile, n_row_tiles, n_column_tiles, GROUP)
    inner_rows = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    lanes = tl.arange(0, 128)
    rows = row_tile * ROWS + inner_rows
    columns = column_tile * 128 + lanes
    if (sharers > 1) & (row_tile * ROWS + tl.program_id(1) * CHUNK < n_rows):
        origin = partial + (first * 2 + 1).to(tl.int64) * (ROWS * 128) + inner_rows[:, None] * 128 + lanes[None, :]
        total = tl.load(origin)
        for part in range(1, sharers, 4):  # four loads in flight; a part that is not there adds nothing
            at = origin + (2 * part - 1) * (ROWS * 128)
            second = tl.load(at, mask=part < sharers, other=0.0)
            third = tl.load(at + 2 * (ROWS * 128), mask=part + 1 < sharers, other=0.0)
            fourth = tl.load(at + 4 * (ROWS * 128), mask=part + 2 < sharers, other=0.0)
            fifth = tl.load(at + 6 * (ROWS * 128), mask=part + 3 < sharers, other=0.0)
            total = total + second + third + fourth + fifth
        if BIAS:
            total += tl.load(bias + columns, mask=columns < n_columns, other=0.0).to(tl.float32)[None, :]
        target = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=(rows < n_rows)[:, None] & (columns < n_columns)[None, :])


def add_parts(
    partial: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, rows: int, group: int, tiles: tuple[int, int],
    n_blocks: int, n_whole: int, programs: int,
) -> None:  # fmt: skip
    """Launch the sum behind a product that shared the tiles after ``n_whole`` rounds of ``programs`` of them."""
    n_rows, n_columns = out.shape
    chunk = rows // 8
    fp8_gemm_parts_kernel[(tiles[0] * tiles[1] - n_whole * programs, 8)](
        partial, bias, out, out.stride(0), n_rows, n_columns, tiles[0], tiles[1], n_blocks, n_whole, programs,
        ROWS=rows, CHUNK=chunk, GROUP=group, BIAS=bias is not None, WAIT=out.is_cuda, num_warps=min(max(chunk // 4, 1), 4),
        **({"launch_pdl": True} if out.is_cuda else {}),
    )  # fmt: skip
