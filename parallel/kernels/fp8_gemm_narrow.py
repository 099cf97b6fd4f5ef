"""Block-FP8 product on Hopper, few rows: tiles of the output so narrow that there is one for every SM (Gluon).

Few rows are bound by reading the weights once, so every SM must read its part of them, all along K, at the same time. A tile
is ROWS x COLUMNS; COLUMNS goes down to 16 where N is small, which keeps sums in registers from begin to end: no partial sums
leave an SM. One warp copies, running ahead by STAGES blocks of K. Of the two multiplying warpgroups

- with ROWS = 64, each takes every second block of K, and the second one hands its sums over at the end;
- with ROWS = 128, each takes half of the rows.

Rows beyond M give sums that are not written. TMA fills them with zeros, which it does slowly: up to 32 rows only 32 are copied,
and the tensor cores take whatever lies in the other rows of the slot.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from .hopper import line, matrix, multiprocessors


@gluon.jit
def _copy(a, a_scale, b, slots_a, slots_s, slots_b, full, empty, scale_pitch, n_row_tiles, n_tiles, n_blocks, ahead,
          ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The copying warp: one slot a block. If ``ahead``, weights come while the kernel before may still be running."""
    if ahead == 0:
        gdc_wait()
    n_bytes: gl.constexpr = a.block_type.nbytes + a_scale.block_type.nbytes + b.block_type.nbytes
    early = gl.minimum(STAGES, n_blocks)
    column = gl.program_id(0) // n_row_tiles * COLUMNS
    for block in range(early):
        mbarrier.expect(full.index(block), n_bytes)
        tma.async_copy_global_to_shared(b, [column, block * 128], full.index(block), slots_b.index(block))
    gdc_wait()
    step = 0
    for index in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        row = index % n_row_tiles * ROWS
        column = index // n_row_tiles * COLUMNS
        for block in range(n_blocks):
            slot = step % STAGES
            ready = full.index(slot)
            if step >= early:
                mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(ready, n_bytes)
                tma.async_copy_global_to_shared(b, [column, block * 128], ready, slots_b.index(slot))
            tma.async_copy_global_to_shared(a, [row, block * 128], ready, slots_a.index(slot).slice(0, a.block_shape[0], 0))
            tma.async_copy_global_to_shared(a_scale, [block * scale_pitch + row], ready, slots_s.index(slot))
            step += 1


@gluon.jit
def _write(total, out, bias, row, column, n_rows, n_columns, out_stride, BIAS: gl.constexpr):
    """Write total [64, COLUMNS] in out's dtype."""
    layout: gl.constexpr = total.type.layout
    COLUMNS: gl.constexpr = total.shape[1]
    if BIAS:
        columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        total += gl.load(bias + columns, mask=columns < n_columns, other=0.0).to(gl.float32).expand_dims(0)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    value = gl.convert_layout(total.to(out.dtype.element_ty), wide)
    rows = (row + gl.arange(0, 64, gl.SliceLayout(1, wide))).expand_dims(1)
    columns = (column + gl.arange(0, COLUMNS, gl.SliceLayout(0, wide))).expand_dims(0)
    gl.store(out + rows.to(gl.int64) * out_stride + columns, value, mask=(rows < n_rows) & (columns < n_columns))


@gluon.jit
def _multiply(b_scale, bias, out, slots_a, slots_s, slots_b, full, empty, handed, taken, parcel, b_scale_stride, out_stride, n_rows,
              n_columns, n_row_tiles, n_tiles, n_blocks, ahead, HALF: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
              STAGES: gl.constexpr, BIAS: gl.constexpr):  # fmt: skip
    """A multiplying warpgroup, the first (HALF = 0) or the second."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 32])
    TURNS: gl.constexpr = ROWS == 64
    STEP: gl.constexpr = 2 if TURNS else 1
    FIRST: gl.constexpr = 0 if TURNS else HALF * 64
    if ahead == 0:
        gdc_wait()
    base = 0
    turn = 0
    for index in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        row = index % n_row_tiles * ROWS + FIRST
        column = index // n_row_tiles * COLUMNS
        scales = b_scale + column // 128 * b_scale_stride
        begin = (base + HALF) & 1 if TURNS else 0  # a slot is always the same warpgroup's: STAGES is even
        weight_scale = gl.load(scales + gl.minimum(begin, n_blocks - 1))
        total = gl.zeros([64, COLUMNS], gl.float32, layout)
        for block in range(begin, n_blocks, STEP):
            slot = (base + block) % STAGES
            next_scale = gl.load(scales + gl.minimum(block + STEP, n_blocks - 1))
            mbarrier.wait(full.index(slot), ((base + block) // STAGES) & 1)
            product = gl.zeros([64, COLUMNS], gl.float32, layout)
            product = warpgroup_mma(
                slots_a.index(slot).slice(FIRST, 64, 0), slots_b.index(slot).permute((1, 0)), product, use_acc=False, is_async=True
            )
            scale = slots_s.index(slot).slice(FIRST, 64, 0).load(gl.SliceLayout(1, layout)) * weight_scale
            product = warpgroup_mma_wait(num_outstanding=0, deps=[product])
            mbarrier.arrive(empty.index(slot), count=1)
            total += product * scale.expand_dims(1)
            weight_scale = next_scale
        if TURNS and HALF == 1:
            mbarrier.wait(taken, (turn & 1) ^ 1)
            parcel.store(total)
            mbarrier.arrive(handed, count=1)
        else:
            if TURNS:
                mbarrier.wait(handed, turn & 1)
                total += parcel.load(layout)
                mbarrier.arrive(taken, count=1)
            _write(total, out, bias, row, column, n_rows, n_columns, out_stride, BIAS)
        base += n_blocks
        turn += 1


@gluon.jit(do_not_specialize=["scale_pitch", "b_scale_stride", "n_rows", "n_row_tiles", "n_tiles", "n_blocks", "ahead"])
def fp8_gemm_narrow_kernel(
    a, a_scale, b, b_scale, bias, out, scale_pitch, b_scale_stride, out_stride, n_rows, n_columns, n_row_tiles, n_tiles, n_blocks, ahead,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """All tiles, in turn over a grid of at most one program an SM. a, a_scale, b are TMA descriptors."""
    slots_a = gl.allocate_shared_memory(a.dtype, [STAGES, ROWS, 128], a.layout)
    slots_b = gl.allocate_shared_memory(b.dtype, [STAGES, COLUMNS, 128], b.layout)
    slots_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], a_scale.layout)
    parcel = gl.allocate_shared_memory(gl.float32, [64, COLUMNS], gl.SwizzledSharedLayout(2, 1, 8, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    handed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1 if ROWS == 64 else 2)
    mbarrier.init(handed, count=1)
    mbarrier.init(taken, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (b_scale, bias, out, slots_a, slots_s, slots_b, full, empty, handed, taken, parcel, b_scale_stride, out_stride,
                         n_rows, n_columns, n_row_tiles, n_tiles, n_blocks, ahead, 0, ROWS, COLUMNS, STAGES, BIAS)),
            (_multiply, (b_scale, bias, out, slots_a, slots_s, slots_b, full, empty, handed, taken, parcel, b_scale_stride, out_stride,
                         n_rows, n_columns, n_row_tiles, n_tiles, n_blocks, ahead, 1, ROWS, COLUMNS, STAGES, BIAS)),
            (_copy, (a, a_scale, b, slots_a, slots_s, slots_b, full, empty, scale_pitch, n_row_tiles, n_tiles, n_blocks, ahead,
                     ROWS, COLUMNS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def room(rows: int, columns: int, out_bytes: int) -> int:
    """Slots that shared memory holds beside the way out and the parcel, an even number."""
    beside = 64 * columns * out_bytes + (256 * columns if rows == 64 else 0) + 1024
    return (227 * 1024 - beside) // ((rows + columns) * 128 + 4 * rows) // 2 * 2


def launch(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    *, rows: int, columns: int, stages: int, ahead: bool = False,
) -> None:  # fmt: skip
    """Run ``fp8_gemm_narrow_kernel`` on operands that TMA can address, in tiles of 64 or 128 rows x 16 to 128 columns; at least one row.

    ``stages`` is what is wished for; shared memory may hold fewer. ``ahead``: weights, their scales and the bias may be read
    before the kernel launched before this one has ended.
    """
    (n_rows, width), n_columns = a.shape, b.shape[0]
    pitch = a_scale.stride(1) if a_scale.shape[1] > 1 else -(-n_rows // 16) * 16
    n_blocks, n_row_tiles = triton.cdiv(width, 128), triton.cdiv(n_rows, rows)
    n_tiles = n_row_tiles * triton.cdiv(n_columns, columns)
    read = 32 if n_rows <= 32 else rows
    fp8_gemm_narrow_kernel[(min(multiprocessors(a.device), n_tiles),)](
        matrix(a, read, 128), line(a_scale, (n_blocks - 1) * pitch + n_rows, rows), matrix(b, columns, 128), b_scale, bias, out, pitch,
        b_scale.stride(0), out.stride(0), n_rows, n_columns, n_row_tiles, n_tiles, n_blocks, int(ahead),
        ROWS=rows, COLUMNS=columns, STAGES=min(stages, room(rows, columns, out.element_size())) // 2 * 2, BIAS=bias is not None,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
