"""MLA attention for 33 or more rows of queries: warp-specialised for Hopper's wgmma, 64 rows of queries a program.

Three groups of four warps. The producer gathers rows with cp.async into two stages of 64 keys. The scoring group multiplies
queries and keys, keeps the softmax, and accumulates the left half of the output; the values group accumulates the right half.
The scoring group starts the product of the next keys before the values of these, so that its softmax runs while the tensor
cores are busy with values. A stage is handed back in two parts, as soon as nobody needs them: the columns of the right half
with the RoPE keys first.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .sparse_prefill_units import KEYS, LN_2, LOG2_E, NO_MAX, load_queries, open_unit, row_block
from .sparse_prefill_wide_rows import produce, produce_fp8


@gluon.jit
def _scores(i, left, right, rope, q_left, q_right, q_rope, left_full, right_full, zero, LATE: gl.constexpr):
    """Start Q K^T of block i; asynchronous."""
    stage = i % 2
    turn = (i // 2) & 1
    mbarrier.wait(right_full.index(stage), turn)
    if not LATE:
        fence_async_shared()
    s = warpgroup_mma(q_rope, rope.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma(q_right, right.index(stage).permute((1, 0)), s, is_async=True)
    mbarrier.wait(left_full.index(stage), turn)
    if not LATE:
        fence_async_shared()
    return warpgroup_mma(q_left, left.index(stage).permute((1, 0)), s, is_async=True)


@gluon.jit
def _softmax(s, row, place, sees, n_rows, scale, high, total, B: gl.constexpr):
    """Base-2 online softmax of a block of scores; ``row`` tells which keys are there, ``sees`` how many a token may use."""
    there = gl.expand_dims((row >= 0) & (row < n_rows), 0)
    if B > 1:
        there = there & (gl.expand_dims(place, 0) < gl.expand_dims(sees, 1))
    s = gl.where(there, s, float("-inf"))
    new = gl.maximum(high, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - gl.expand_dims(new, 1))
    factor = gl.exp2(high - new)
    return p, new, factor, total * factor + gl.sum(p, 1)


@gluon.jit
def _store_half(out, parts, o, first, tokens, m, part, column, H, C: gl.constexpr, PAGE: gl.constexpr, B: gl.constexpr, lay: gl.constexpr):
    keep = gl.expand_dims(m < tokens * H, 1)
    cols = gl.expand_dims(column + gl.arange(0, C // 2, gl.SliceLayout(0, lay)), 0)
    at = first.to(gl.int64) * H + m
    if PAGE == 0:
        gl.store(out + (gl.expand_dims(at * C, 1) + cols), o.to(out.dtype.element_ty), mask=keep)
    elif part < 0:
        gl.store(out + (gl.expand_dims(at * C, 1) + cols), o.to(out.dtype.element_ty), mask=keep)
    else:
        at = part.to(gl.int64) * (B * H) + m
        gl.store(parts + (gl.expand_dims(at * C, 1) + cols), o, mask=keep)


@gluon.jit
def _score_group(
    rows, begin, end, n_rows, blocks, scale, left, right, rope, q_left, q_right, q_rope, probs, factors,
    left_full, left_empty, right_full, q_full, p_full, p_empty, sink, out, lse, parts, part_lse, n_keys,
    first, tokens, first_row, part, H,
    C: gl.constexpr, M: gl.constexpr, SINK: gl.constexpr, PAGE: gl.constexpr, B: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    s_lay: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_lay: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C // 2, 16])
    stat: gl.constexpr = gl.SliceLayout(1, s_lay)
    m = first_row + gl.arange(0, M, stat)
    live = m < tokens * H
    sees = m
    if B > 1:
        sees = gl.load(n_keys + first + m // H, mask=live, other=0)
    key_lay: gl.constexpr = gl.SliceLayout(0, s_lay)
    place = begin + gl.arange(0, KEYS, key_lay)
    zero = gl.full([M, KEYS], 0.0, gl.float32, s_lay)
    high = gl.full([M], NO_MAX, gl.float32, stat)
    total = gl.full([M], 0.0, gl.float32, stat)
    o = gl.full([M, C // 2], 0.0, gl.float32, o_lay)
    row = row_block(rows, place, end, PAGE)
    mbarrier.wait(q_full, 0)
    fence_async_shared()
    s_first = _scores(0, left, right, rope, q_left, q_right, q_rope, left_full, right_full, zero, LATE)
    s = warpgroup_mma_wait(0, deps=(s_first,))
    p, high, factor, total = _softmax(s, row, place, sees, n_rows, scale, high, total, B)
    probs.store(p.to(probs.dtype))
    factors.store(factor)
    fence_async_shared()
    mbarrier.arrive(p_full)
    for i in range(blocks - 1):
        s_next = _scores(i + 1, left, right, rope, q_left, q_right, q_rope, left_full, right_full, zero, LATE)
        o_next = warpgroup_mma(probs, left.index(i % 2), o, is_async=True)
        ahead = place + (i + 1) * KEYS
        row = row_block(rows, ahead, end, PAGE)
        s = warpgroup_mma_wait(1, deps=(s_next,))
        p, high, factor, total = _softmax(s, row, ahead, sees, n_rows, scale, high, total, B)
        o = warpgroup_mma_wait(0, deps=(o_next,))
        mbarrier.arrive(left_empty.index(i % 2))
        mbarrier.wait(p_empty, i & 1)
        probs.store(p.to(probs.dtype))
        factors.store(factor)
        fence_async_shared()
        mbarrier.arrive(p_full)
        o = o * gl.convert_layout(gl.expand_dims(factor, 1), o_lay)
    last = blocks - 1
    o = warpgroup_mma_wait(0, deps=(warpgroup_mma(probs, left.index(last % 2), o, is_async=True),))
    weight = total
    if SINK:
        weight += gl.exp2(gl.load(sink + m, mask=live, other=0.0) * LOG2_E - high)
    inverse = gl.where(total > 0.0, 1.0 / weight, 0.0)
    mbarrier.wait(p_empty, last & 1)
    factors.store(inverse)
    mbarrier.arrive(p_full)
    log = gl.where(total > 0.0, high + gl.log2(total), float("-inf"))
    if PAGE == 0:
        gl.store(lse + first * H + m, log * LN_2, mask=live)
    elif part < 0:
        gl.store(lse + first * H + m, log * LN_2, mask=live)
    else:
        gl.store(part_lse + part * (B * H) + m, log, mask=live)
    o = o * gl.convert_layout(gl.expand_dims(inverse, 1), o_lay)
    _store_half(out, parts, o, first, tokens, first_row + gl.arange(0, M, gl.SliceLayout(1, o_lay)), part, 0, H, C, PAGE, B, o_lay)


@gluon.jit
def _value_group(
    q_latent, q_tail, blocks, right, q_left, q_right, q_rope, probs, factors, right_empty, q_full, p_full, p_empty,
    out, parts, first, tokens, first_row, part, H, q_token, q_head, tail_token, tail_head,
    C: gl.constexpr, R: gl.constexpr, M: gl.constexpr, PAGE: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    o_lay: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C // 2, 16])
    stat: gl.constexpr = gl.SliceLayout(1, o_lay)
    lay: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = first_row + gl.arange(0, M, gl.SliceLayout(1, lay))
    load_queries(q_tail, q_rope, first, tokens, m, H, tail_token, tail_head, 0, R, lay)
    load_queries(q_latent, q_right, first, tokens, m, H, q_token, q_head, C // 2, C // 2, lay)
    load_queries(q_latent, q_left, first, tokens, m, H, q_token, q_head, 0, C // 2, lay)
    fence_async_shared()
    mbarrier.arrive(q_full)
    o = gl.full([M, C // 2], 0.0, gl.float32, o_lay)
    for i in range(blocks):
        mbarrier.wait(p_full, i & 1)
        factor = factors.load(stat)
        o = o * gl.expand_dims(factor, 1)
        o = warpgroup_mma_wait(0, deps=(warpgroup_mma(probs, right.index(i % 2), o, is_async=True),))
        mbarrier.arrive(right_empty.index(i % 2))
        mbarrier.arrive(p_empty)
    mbarrier.wait(p_full, blocks & 1)
    inverse = factors.load(stat)
    o = o * gl.expand_dims(inverse, 1)
    _store_half(out, parts, o, first, tokens, first_row + gl.arange(0, M, stat), part, C // 2, H, C, PAGE, B, o_lay)


@gluon.jit
def sparse_prefill_wide_kernel(
    q_latent, q_tail, pool, scales, tail_pool, rows, n_keys, sink, out, lse, units, parts, part_lse, n_rows, width, scale, H,
    q_token, q_head, tail_token, tail_head,
    stride: gl.constexpr, C: gl.constexpr, R: gl.constexpr, FP8: gl.constexpr, SINK: gl.constexpr, COUNTS: gl.constexpr,
    PAGE: gl.constexpr, B: gl.constexpr, LATE: gl.constexpr, VALUE_REGS: gl.constexpr, LOAD_REGS: gl.constexpr,
):  # fmt: skip
    """64 rows of queries: heads of one token, or of up to B tokens of a request. ``scale`` includes log2(e).

    ``rows`` [.., width] are a token's chosen rows (PAGE 0; ``n_keys`` of them count if COUNTS) or a page table, with the work
    in ``units`` and tokens seeing their first ``n_keys`` keys. ``pool`` is a float pool, or an FP8 pool seen as int32, with
    ``scales`` and ``tail_pool`` the same seen as fp32 and bf16; ``stride`` is a row's length in elements.
    """
    M: gl.constexpr = 64
    half: gl.constexpr = C // 2
    dtype: gl.constexpr = q_latent.dtype.element_ty
    program = gl.program_id(0)
    row_groups = (H * B + M - 1) // M
    unit = program // row_groups
    first_row = (program % row_groups) * M
    first, tokens, begin, end, rows, part = open_unit(units, rows, n_keys, width, unit, COUNTS, PAGE)
    blocks = gl.maximum((end - begin + KEYS - 1) // KEYS, 1)

    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(dtype, [M, half], wide)
    q_right = gl.allocate_shared_memory(dtype, [M, half], wide)
    q_rope = gl.allocate_shared_memory(dtype, [M, R], wide)
    left = gl.allocate_shared_memory(dtype, [2, KEYS, half], wide)
    right = gl.allocate_shared_memory(dtype, [2, KEYS, half], wide)
    rope = gl.allocate_shared_memory(dtype, [2, KEYS, R], wide)
    probs = gl.allocate_shared_memory(dtype, [M, KEYS], wide)
    factors = gl.allocate_shared_memory(gl.float32, [M], flat)
    left_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    left_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(left_full.index(stage), count=1 if LATE or FP8 else 128)  # cp.async arrives once a thread
        mbarrier.init(right_full.index(stage), count=1 if LATE or FP8 else 128)
        mbarrier.init(left_empty.index(stage), count=1)
        mbarrier.init(right_empty.index(stage), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=1)

    if FP8:
        gl.warp_specialize(
            [
                (
                    _score_group,
                    (rows, begin, end, n_rows, blocks, scale, left, right, rope, q_left, q_right, q_rope, probs, factors, left_full,
                     left_empty, right_full, q_full, p_full, p_empty, sink, out, lse, parts, part_lse, n_keys, first, tokens, first_row,
                     part, H, C, M, SINK, PAGE, B, LATE),
                ),
                (
                    _value_group,
                    (q_latent, q_tail, blocks, right, q_left, q_right, q_rope, probs, factors, right_empty, q_full, p_full, p_empty,
                     out, parts, first, tokens, first_row, part, H, q_token, q_head, tail_token, tail_head, C, R, M, PAGE, B),
                ),
                (
                    produce_fp8,
                    (pool, scales, tail_pool, rows, begin, end, n_rows, blocks, left, right, rope, left_full, left_empty, right_full,
                     right_empty, stride, C, R, PAGE, LATE),
                ),
            ],
            [4, 4],
            [VALUE_REGS, LOAD_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _score_group,
                    (rows, begin, end, n_rows, blocks, scale, left, right, rope, q_left, q_right, q_rope, probs, factors, left_full,
                     left_empty, right_full, q_full, p_full, p_empty, sink, out, lse, parts, part_lse, n_keys, first, tokens, first_row,
                     part, H, C, M, SINK, PAGE, B, LATE),
                ),
                (
                    _value_group,
                    (q_latent, q_tail, blocks, right, q_left, q_right, q_rope, probs, factors, right_empty, q_full, p_full, p_empty,
                     out, parts, first, tokens, first_row, part, H, q_token, q_head, tail_token, tail_head, C, R, M, PAGE, B),
                ),
                (
                    produce,
                    (pool, rows, begin, end, n_rows, blocks, left, right, rope, left_full, left_empty, right_full, right_empty,
                     stride, C, R, PAGE, LATE),
                ),
            ],
            [4, 4],
            [VALUE_REGS, LOAD_REGS],
        )  # fmt: skip
