"""Block-FP8 product on Hopper, many rows: two warpgroups multiply what a third one copies (Gluon: TMA, mbarriers, wgmma).

A tile is ROWS x 128 of the output. Per block of 128 along K the copying warp brings ROWS x 128 activations with their scales
and 128 x 128 weights into one of STAGES slots, running ahead over the end of a tile. Each of the two multiplying warpgroups
owns half of the rows and goes through them in pieces of 64 x 128: four wgmma into a scratch accumulator, which is then
scaled and added to the fp32 sum in plain arithmetic (the promotion that e4m3 products on sm_90 need, as their own
accumulator keeps few bits). While one warpgroup adds, the other one's products keep the tensor cores busy.

Which tiles a program takes: ``n_whole`` rounds of one tile a program, then an equal, contiguous share of the blocks of all
tiles that are left, so that the last round does not leave SMs idle (``fp8_gemm_share``).
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from .fp8_gemm_share import add_parts
from .hopper import line, matrix, multiprocessors


@gluon.jit
def tile_of(index, n_row_tiles, n_column_tiles, GROUP: gl.constexpr):
    """See ``fp8_gemm_share.tile_of``."""
    band = index // (GROUP * n_column_tiles)
    first = band * GROUP
    height = gl.minimum(n_row_tiles - first, GROUP)
    inside = index % (GROUP * n_column_tiles)
    return first + inside % height, inside // height


@gluon.jit
def share_of(n_tiles, n_blocks, n_whole):
    """(rounds of whole tiles, first unit, one past the last unit, all shared units) of this program."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    rounds = gl.minimum(n_whole, (n_tiles - program + programs - 1) // programs)
    n_units = gl.maximum(n_tiles - n_whole * programs, 0) * n_blocks
    return rounds, program * n_units // programs, (program + 1) * n_units // programs, n_units


@gluon.jit
def next_part(turn, unit, end, n_whole, n_blocks):
    """(tile, first block, one past the last block, next unit): whole tiles in the first ``n_whole`` turns, then units up to ``end``."""
    shared = turn >= n_whole
    index = gl.where(shared, n_whole * gl.num_programs(0) + unit // n_blocks, turn * gl.num_programs(0) + gl.program_id(0))
    first = gl.where(shared, unit % n_blocks, 0)
    last = gl.where(shared, gl.minimum(n_blocks, first + end - unit), n_blocks)
    return index, first, last, gl.where(shared, unit + last - first, unit)


@gluon.jit
def place_of(first):
    """This program's place for its part of a shared tile whose first block it has is ``first``."""
    return (gl.program_id(0) * 2 + gl.where(first == 0, 1, 0)).to(gl.int64)


@gluon.jit
def multiply_piece(a, b, scale, total, scratch):
    """(total [64, 128] + scale [64] * (a [64, 128] . b [128, 128]^T), the product), the product replacing ``scratch``.

    Left alone, the compiler starts the next product before it has added this one, in registers of its own, and spills. So the
    scratch is named from product to product, and the addition is volatile assembly, which keeps its place.
    """
    scratch = warpgroup_mma(a, b.permute((1, 0)), scratch, use_acc=False, is_async=True)
    scratch = warpgroup_mma_wait(num_outstanding=0, deps=[scratch])
    factor, product = gl.broadcast(scale.expand_dims(1), scratch)
    total = gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [product, factor, total], dtype=gl.float32, is_pure=False, pack=1
    )
    return total, scratch


@gluon.jit
def add_bias(total, bias, column, n_columns):
    """Total [64, 128] + the bias of its columns."""
    layout: gl.constexpr = total.type.layout
    columns = column + gl.arange(0, 128, gl.SliceLayout(0, layout))
    return total + gl.load(bias + columns, mask=columns < n_columns, other=0.0).to(gl.float32).expand_dims(0)


@gluon.jit
def leave(total, place):
    """Store [64, 128] as a dense matrix."""
    layout: gl.constexpr = total.type.layout
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout)).expand_dims(1)
    gl.store(place + rows * 128 + gl.arange(0, 128, gl.SliceLayout(0, layout)).expand_dims(0), total)


@gluon.jit
def store_piece(total, c, staging, row, column):
    """Write [64, 128] at (row, column) through shared memory, half of the columns at a time; what lies outside is cut off."""
    left, right = total.to(c.dtype).reshape([64, 2, 64]).permute((0, 2, 1)).split()
    tma.store_wait(pendings=0)
    staging.store(left)
    fence_async_shared()
    tma.async_copy_shared_to_global(c, [row, column], staging)
    tma.store_wait(pendings=0)
    staging.store(right)
    fence_async_shared()
    tma.async_copy_shared_to_global(c, [row, column + 64], staging)


@gluon.jit
def _copy(a, a_scale, b, slots_a, slots_s, slots_b, full, empty, scale_pitch, n_row_tiles, n_column_tiles, n_blocks, n_whole,
          ROWS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """The copying warp: all tiles of this program, one slot a block of K."""
    n_bytes: gl.constexpr = a.block_type.nbytes + a_scale.block_type.nbytes + b.block_type.nbytes
    rounds, unit, end, _ = share_of(n_row_tiles * n_column_tiles, n_blocks, n_whole)
    step = 0
    turn = 0
    while (turn < rounds) | (unit < end):
        index, first, last, unit = next_part(turn, unit, end, n_whole, n_blocks)
        row_tile, column_tile = tile_of(index, n_row_tiles, n_column_tiles, GROUP)
        for block in range(first, last):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            ready = full.index(slot)
            mbarrier.expect(ready, n_bytes)
            tma.async_copy_global_to_shared(a, [row_tile * ROWS, block * 128], ready, slots_a.index(slot))
            tma.async_copy_global_to_shared(b, [column_tile * 128, block * 128], ready, slots_b.index(slot))
            tma.async_copy_global_to_shared(a_scale, [block * scale_pitch + row_tile * ROWS], ready, slots_s.index(slot))
            step += 1
        turn += 1


@gluon.jit
def _multiply(b_scale, bias, c, partial, slots_a, slots_s, slots_b, full, empty, staging, b_scale_stride, n_columns,
              n_row_tiles, n_column_tiles, n_blocks, n_whole, HALF: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
              GROUP: gl.constexpr, BIAS: gl.constexpr):  # fmt: skip
    """A multiplying warpgroup: rows HALF * ROWS / 2 .. of all tiles of this program."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    rows_of: gl.constexpr = gl.SliceLayout(1, layout)
    FIRST: gl.constexpr = HALF * (ROWS // 2)
    TALL: gl.constexpr = ROWS == 256
    scratch = gl.zeros([64, 128], gl.float32, layout)
    rounds, unit, end, _ = share_of(n_row_tiles * n_column_tiles, n_blocks, n_whole)
    step = 0
    turn = 0
    while (turn < rounds) | (unit < end):
        index, first, last, unit = next_part(turn, unit, end, n_whole, n_blocks)
        row_tile, column_tile = tile_of(index, n_row_tiles, n_column_tiles, GROUP)
        scales = b_scale + column_tile * b_scale_stride
        weight_scale = gl.load(scales + first)
        total = gl.zeros([64, 128], gl.float32, layout)
        if TALL:
            other = gl.zeros([64, 128], gl.float32, layout)
        for block in range(first, last):
            slot = step % STAGES
            next_scale = gl.load(scales + gl.minimum(block + 1, last - 1))
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            a = slots_a.index(slot)
            b = slots_b.index(slot)
            s = slots_s.index(slot)
            scale = s.slice(FIRST, 64, 0).load(rows_of)
            total, scratch = multiply_piece(a.slice(FIRST, 64, 0), b, scale * weight_scale, total, scratch)
            if TALL:
                scale = s.slice(FIRST + 64, 64, 0).load(rows_of)
                other, scratch = multiply_piece(a.slice(FIRST + 64, 64, 0), b, scale * weight_scale, other, scratch)
            weight_scale = next_scale
            mbarrier.arrive(empty.index(slot), count=1)
            step += 1
        if last - first < n_blocks:
            place = partial + place_of(first) * (ROWS * 128) + FIRST * 128
            leave(total, place)
            if TALL:
                leave(other, place + 64 * 128)
        else:
            row = row_tile * ROWS + FIRST
            column = column_tile * 128
            if BIAS:
                total = add_bias(total, bias, column, n_columns)
            store_piece(total, c, staging, row, column)
            if TALL:
                if BIAS:
                    other = add_bias(other, bias, column, n_columns)
                store_piece(other, c, staging, row + 64, column)
        turn += 1
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["scale_pitch", "b_scale_stride", "n_columns", "n_row_tiles", "n_column_tiles", "n_blocks", "n_whole"])
def fp8_gemm_tiles_kernel(a, a_scale, b, b_scale, bias, c, partial, scale_pitch, b_scale_stride, n_columns, n_row_tiles,
                 n_column_tiles, n_blocks, n_whole, ROWS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
                 BIAS: gl.constexpr):  # fmt: skip
    """All tiles, spread over a grid of one program an SM. a, a_scale, b, c are TMA descriptors."""
    gdc_launch_dependents()
    slots_a = gl.allocate_shared_memory(a.dtype, [STAGES, ROWS, 128], a.layout)
    slots_b = gl.allocate_shared_memory(b.dtype, [STAGES, 128, 128], b.layout)
    slots_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], a_scale.layout)
    staging = gl.allocate_shared_memory(c.dtype, [2, 64, 64], c.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (b_scale, bias, c, partial, slots_a, slots_s, slots_b, full, empty, staging.index(0), b_scale_stride,
                         n_columns, n_row_tiles, n_column_tiles, n_blocks, n_whole, 0, ROWS, STAGES, GROUP, BIAS)),
            (_multiply, (b_scale, bias, c, partial, slots_a, slots_s, slots_b, full, empty, staging.index(1), b_scale_stride,
                         n_columns, n_row_tiles, n_column_tiles, n_blocks, n_whole, 1, ROWS, STAGES, GROUP, BIAS)),
            (_copy, (a, a_scale, b, slots_a, slots_s, slots_b, full, empty, scale_pitch, n_row_tiles, n_column_tiles, n_blocks, n_whole,
                     ROWS, STAGES, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def launch(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    *, rows: int, stages: int, group: int, share: bool,
) -> None:  # fmt: skip
    """Run ``fp8_gemm_tiles_kernel`` on operands that TMA can address (``hopper.addressable``); at least one row, scales column by column.

    ``share``: the tiles beyond the last full round of one an SM are shared evenly, together with that round.
    """
    (n_rows, width), n_columns = a.shape, b.shape[0]
    pitch = a_scale.stride(1) if a_scale.shape[1] > 1 else -(-n_rows // 16) * 16
    n_blocks, tiles = triton.cdiv(width, 128), (triton.cdiv(n_rows, rows), triton.cdiv(n_columns, 128))
    n_tiles, programs = tiles[0] * tiles[1], multiprocessors(a.device)
    partial = b_scale  # named, not touched
    share = share and n_tiles % programs != 0
    if out.element_size() == 4:
        stages = min(stages, {256: 3, 128: 5}[rows])  # its way out takes the room of slots
    if share:
        n_whole = max(n_tiles // programs - 1, 0)
        programs = min(programs, n_tiles * n_blocks)
        partial = torch.empty(programs * 2 * rows * 128, dtype=torch.float32, device=a.device)
    else:
        programs = min(programs, n_tiles)
        n_whole = -(-n_tiles // programs)
    fp8_gemm_tiles_kernel[(programs,)](
        matrix(a, rows, 128), line(a_scale, (n_blocks - 1) * pitch + n_rows, rows), matrix(b, 128, 128), b_scale, bias,
        matrix(out, 64, 64), partial, pitch, b_scale.stride(0), n_columns, tiles[0], tiles[1], n_blocks, n_whole,
        ROWS=rows, STAGES=stages, GROUP=group, BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    if share:
        add_parts(partial, bias, out, rows=rows, group=group, tiles=tiles, n_blocks=n_blocks, n_whole=n_whole, programs=programs)
