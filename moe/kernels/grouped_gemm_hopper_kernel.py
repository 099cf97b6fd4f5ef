"""Grouped products for Hopper: one warp streams tiles in by TMA, one or two warpgroups multiply, programs stay for many tiles.

Gluon, because two things decide here that plain Triton does not offer on sm_90: the promotion of an FP8 product into its fp32
accumulator runs while the other warpgroup's product does, and the stream of weights goes on over the end of a tile, which is
what the bandwidth of small batches hangs on.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROWS = 64  # rows of one warpgroup


@gluon.constexpr_function
def _sum_layout(width, fp8):
    """Registers of a warpgroup's product."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 32 if fp8 else 16])


@gluon.constexpr_function
def _store_layout(width, fp8):
    """16 bytes a thread along the row."""
    vector = 16 if fp8 else 8
    return gl.BlockedLayout([1, vector], [32 * vector // width, width // vector], [4, 1], [1, 0])


@gluon.jit
def _tile(t, n_blocks, n_tiles, GROUP: gl.constexpr):
    """Tile number -> (row block, column tile): GROUP row blocks share their weights in the L2 while columns go by."""
    per_group = GROUP * n_tiles
    first = t // per_group * GROUP
    size = gl.minimum(n_blocks - first, GROUP)
    inside = t % per_group
    return first + inside % size, inside // size


@gluon.jit
def _produce(
    a, b, a_ring, b_ring, ready, free, block_slot, block_row, block_rows, n_blocks, n_tiles, k_steps, b_rows, half,
    CONSUMERS: gl.constexpr, PARTS: gl.constexpr, PASSES: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GATED: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """One warp: the tiles of A and B of every step, as soon as their buffers are free."""
    blocks = gl.load(n_blocks)
    step = 0
    for t in range(gl.program_id(0), blocks * n_tiles, gl.num_programs(0)):
        m, n = _tile(t, blocks, n_tiles, GROUP)
        row = gl.load(block_row + m)
        full = gl.load(block_rows + m) > ROWS * (CONSUMERS - 1)
        first = gl.load(block_slot + m) * b_rows + n * (PASSES * PARTS * BLOCK_N // (2 if GATED else 1))
        for turn in gl.static_range(PASSES):
            for k in range(k_steps):
                stage = step % STAGES
                bar = ready.index(stage)
                mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
                if CONSUMERS == 2:
                    mbarrier.expect(bar, BYTES * (2 * ROWS + PARTS * BLOCK_N) * BLOCK_K, pred=full)
                    mbarrier.expect(bar, BYTES * (ROWS + PARTS * BLOCK_N) * BLOCK_K, pred=full == 0)
                else:
                    mbarrier.expect(bar, BYTES * (ROWS + PARTS * BLOCK_N) * BLOCK_K)
                tma.async_copy_global_to_shared(a, [row, k * BLOCK_K], bar, a_ring.index(stage * CONSUMERS))
                if CONSUMERS == 2:
                    tma.async_copy_global_to_shared(a, [row + ROWS, k * BLOCK_K], bar, a_ring.index(stage * CONSUMERS + 1), pred=full)
                for part in gl.static_range(PARTS):
                    if GATED:
                        column = first + (turn + part // 2) * BLOCK_N + part % 2 * half
                    else:
                        column = first + (part // 2 + part % 2 * (PARTS // 2)) * BLOCK_N
                    tma.async_copy_global_to_shared(b, [column, k * BLOCK_K], bar, b_ring.index(stage * PARTS + part))
                step += 1


@gluon.jit
def _start(acc, a, b, FP8: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin a @ b.T, on its own for FP8, on top of acc otherwise."""
    if FP8:
        return warpgroup_mma(a, b.permute((1, 0)), gl.zeros(acc.shape, gl.float32, LAYOUT), use_acc=False, is_async=True)
    return warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)


@gluon.jit
def _finish(acc, product, scale, LEFT: gl.constexpr, FP8: gl.constexpr):
    """Wait until at most LEFT later products run; an FP8 product is scaled and added."""
    product = warpgroup_mma_wait(LEFT, deps=[product])
    if FP8:
        return acc + product * gl.expand_dims(scale, 1)
    return product


@gluon.jit
def _turn(acc, product, scale, later, a, b, FP8: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin the next part's product, on top of ``later``, then end this part's, which is scaled while the next runs."""
    following = _start(later, a, b, FP8, LAYOUT)
    return _finish(acc, product, scale, 1, FP8), following


@gluon.jit
def _multiply(
    a_ring, b_ring, ready, free, a_scales, b_scales, step, k_steps, a_pitch, row, rows, scale0, scale1,
    INDEX: gl.constexpr, CONSUMERS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    GATED: gl.constexpr, FP8: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """All steps of K of one tile, or of one pass over it: the sums of two or four parts.

    Two products run at a time, so that one is scaled while the next multiplies. Even and odd parts take the two scales in turn; four
    parts of 64 columns and two products fill the registers to the last, and in another order they spill.
    """
    local = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    acc0 = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    sa = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    s0 = sa
    s1 = sa
    for k in range(k_steps):
        stage = step % STAGES
        a = a_ring.index(stage * CONSUMERS + INDEX)
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        product = _start(acc0, a, b_ring.index(stage * PARTS), FP8, LAYOUT)
        if FP8:  # read while the product runs
            sa = gl.load(a_scales + (k * a_pitch + row) + local, mask=local < rows, other=0.0)
            s0 = sa * gl.load(b_scales + scale0 + k)
            s1 = sa * gl.load(b_scales + scale1 + k)
        acc0, product = _turn(acc0, product, s0, acc1, a, b_ring.index(stage * PARTS + 1), FP8, LAYOUT)
        if PARTS == 4:
            acc1, product = _turn(acc1, product, s1, acc2, a, b_ring.index(stage * PARTS + 2), FP8, LAYOUT)
            acc2, product = _turn(acc2, product, s0, acc3, a, b_ring.index(stage * PARTS + 3), FP8, LAYOUT)
            acc3 = _finish(acc3, product, s1, 0, FP8)
        else:
            acc1 = _finish(acc1, product, s1, 0, FP8)
        mbarrier.arrive(free.index(stage))
        step += 1
    return acc0, acc1, acc2, acc3


@gluon.jit
def _store(out, value, wide, rows, column, pitch, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BYTE: gl.constexpr):
    """The rows in use of one part, from row ``wide`` and column ``column`` on."""
    STORE: gl.constexpr = _store_layout(BLOCK_N, BYTE)
    local = gl.arange(0, ROWS, gl.SliceLayout(1, STORE))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, STORE)) + column
    target = out + gl.expand_dims((wide + local) * pitch, 1) + gl.expand_dims(columns, 0)
    gl.store(target, gl.convert_layout(value.to(out.dtype.element_ty), STORE), mask=gl.expand_dims(local < rows, 1))


@gluon.jit
def _unit(gate, up):
    return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def _magnitude(value):
    """|value|, infinite where it is NaN: a maximum passes over NaN, and the scale must show that there is one."""
    return gl.where(value == value, gl.abs(value), float("inf"))


@gluon.jit
def _scaled(value, scale, inverse):
    """value / scale as IEEE division rounds it, but for the last bit of few: a product and one correction; cut to e4m3's range."""
    inverse = gl.expand_dims(inverse, 1)
    quotient = value * inverse
    quotient += (value - quotient * gl.expand_dims(scale, 1)) * inverse
    return gl.maximum(gl.minimum(quotient, 448.0), -448.0)


@gluon.jit
def _consume(
    a_ring, b_ring, ready, free, a_scales, b_scales, out, out_scales,
    block_slot, block_row, block_rows, n_blocks, n_tiles, k_steps, a_pitch, b_pitch, half, out_pitch, out_scale_pitch,
    INDEX: gl.constexpr, CONSUMERS: gl.constexpr, PARTS: gl.constexpr, PASSES: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, GATED: gl.constexpr, QUANTISE: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """One warpgroup: ROWS rows of every tile of this program, products, then what follows them."""
    LAYOUT: gl.constexpr = _sum_layout(BLOCK_N, FP8)
    TWO: gl.constexpr = PARTS * PASSES == 4
    blocks = gl.load(n_blocks)
    step = 0
    for t in range(gl.program_id(0), blocks * n_tiles, gl.num_programs(0)):
        m, n = _tile(t, blocks, n_tiles, GROUP)
        rows = gl.load(block_rows + m) - INDEX * ROWS
        if rows > 0:
            row = gl.load(block_row + m) + INDEX * ROWS
            wide = row.to(gl.int64)
            scale0 = gl.load(block_slot + m) * b_pitch
            if GATED:
                scale0 += n * k_steps
                scale1 = scale0 + half // 128 * k_steps
            else:
                scale1 = scale0 + (n * (PARTS * BLOCK_N) + PARTS // 2 * BLOCK_N) // 128 * k_steps
                scale0 += n * (PARTS * BLOCK_N) // 128 * k_steps
            acc0, acc1, acc2, acc3 = _multiply(
                a_ring, b_ring, ready, free, a_scales, b_scales, step, k_steps, a_pitch, row, rows, scale0, scale1,
                INDEX, CONSUMERS, PARTS, STAGES, ROWS, BLOCK_N, GATED, FP8, LAYOUT,
            )  # fmt: skip
            step += k_steps
            if GATED:
                acc0 = _unit(acc0, acc1)
                if PASSES == 2:
                    acc2, acc3, none0, none1 = _multiply(
                        a_ring, b_ring, ready, free, a_scales, b_scales, step, k_steps, a_pitch, row, rows, scale0, scale1,
                        INDEX, CONSUMERS, PARTS, STAGES, ROWS, BLOCK_N, GATED, FP8, LAYOUT,
                    )  # fmt: skip
                    step += k_steps
                if TWO:
                    acc2 = _unit(acc2, acc3)
                if QUANTISE:
                    largest = gl.max(_magnitude(acc0), axis=1)
                    if TWO:
                        largest = gl.maximum(largest, gl.max(_magnitude(acc2), axis=1))
                    scale = gl.where(largest > 0, gl.div_rn(largest, gl.full_like(largest, 448.0)), 1.0)
                    local = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
                    gl.store(out_scales + n * out_scale_pitch + row + local, scale, mask=local < rows)
                    acc0 = _scaled(acc0, scale, 1.0 / scale)
                    if TWO:
                        acc2 = _scaled(acc2, scale, 1.0 / scale)
                _store(out, acc0, wide, rows, n * 128, out_pitch, ROWS, BLOCK_N, QUANTISE)
                if TWO:
                    _store(out, acc2, wide, rows, n * 128 + 64, out_pitch, ROWS, BLOCK_N, QUANTISE)
            else:
                column = n * (PARTS * BLOCK_N)
                _store(out, acc0, wide, rows, column, out_pitch, ROWS, BLOCK_N, False)
                _store(out, acc1, wide, rows, column + PARTS // 2 * BLOCK_N, out_pitch, ROWS, BLOCK_N, False)
                if PARTS == 4:
                    _store(out, acc2, wide, rows, column + BLOCK_N, out_pitch, ROWS, BLOCK_N, False)
                    _store(out, acc3, wide, rows, column + 3 * BLOCK_N, out_pitch, ROWS, BLOCK_N, False)
        else:
            for _ in range(PASSES * k_steps):
                mbarrier.wait(ready.index(step % STAGES), step // STAGES & 1)
                mbarrier.arrive(free.index(step % STAGES))
                step += 1


@gluon.jit(do_not_specialize=["n_tiles", "k_steps"])
def grouped_kernel(
    a, b, a_scales, b_scales, out, out_scales, block_slot, block_row, block_rows, n_blocks,
    n_tiles, k_steps, b_rows, half, a_pitch, b_pitch, out_pitch, out_scale_pitch,
    CONSUMERS: gl.constexpr, PARTS: gl.constexpr, PASSES: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GATED: gl.constexpr, QUANTISE: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Programs 0 .. (as many as SMs): tiles p, p + programs .. of all row blocks and column tiles."""
    BYTES: gl.constexpr = 1 if FP8 else 2
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES * CONSUMERS, ROWS, BLOCK_K], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES * PARTS, BLOCK_N, BLOCK_K], b.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    fence_async_shared()
    gdc_wait()
    gdc_launch_dependents()
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (
                a_ring, b_ring, ready, free, a_scales, b_scales, out, out_scales,
                block_slot, block_row, block_rows, n_blocks, n_tiles, k_steps, a_pitch, b_pitch, half, out_pitch, out_scale_pitch,
                0, CONSUMERS, PARTS, PASSES, STAGES, GROUP, ROWS, BLOCK_N, GATED, QUANTISE, FP8,
            )),
            (_consume, (
                a_ring, b_ring, ready, free, a_scales, b_scales, out, out_scales,
                block_slot, block_row, block_rows, n_blocks, n_tiles, k_steps, a_pitch, b_pitch, half, out_pitch, out_scale_pitch,
                1, CONSUMERS, PARTS, PASSES, STAGES, GROUP, ROWS, BLOCK_N, GATED, QUANTISE, FP8,
            )),
            (_produce, (
                a, b, a_ring, b_ring, ready, free, block_slot, block_row, block_rows, n_blocks, n_tiles, k_steps, b_rows, half,
                CONSUMERS, PARTS, PASSES, STAGES, GROUP, ROWS, BLOCK_N, BLOCK_K, GATED, BYTES,
            )),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (
                a_ring, b_ring, ready, free, a_scales, b_scales, out, out_scales,
                block_slot, block_row, block_rows, n_blocks, n_tiles, k_steps, a_pitch, b_pitch, half, out_pitch, out_scale_pitch,
                0, CONSUMERS, PARTS, PASSES, STAGES, GROUP, ROWS, BLOCK_N, GATED, QUANTISE, FP8,
            )),
            (_produce, (
                a, b, a_ring, b_ring, ready, free, block_slot, block_row, block_rows, n_blocks, n_tiles, k_steps, b_rows, half,
                CONSUMERS, PARTS, PASSES, STAGES, GROUP, ROWS, BLOCK_N, BLOCK_K, GATED, BYTES,
            )),
        ], [1], [24])  # fmt: skip
