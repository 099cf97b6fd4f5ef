"""MLA attention over FP8 rows for up to 32 rows of queries: keys stand on the long side of Hopper's wgmma, heads on the short one.

64 keys are the rows of S^T = K Q^T, and 64 latent columns the rows of O^T = V^T P^T, so that no work goes to absent heads. One
group of four warps computes; the others gather rows into two stages of shared memory and widen them on the way, without their
scales (the values of e4m3 are exact in bf16): the scales multiply scores and probabilities instead.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .sparse_prefill_units import GROUP, KEYS, LN_2, LOG2_E, NO_MAX, load_queries, open_unit, row_block, store_columns
from .sparse_prefill_widen import widen


@gluon.jit
def _load_words(pool, row, n_rows, stride: gl.constexpr, cols):
    keep = gl.expand_dims((row >= 0) & (row < n_rows), 1)
    return gl.load(pool + gl.expand_dims(row.to(gl.int64) * stride, 1) + cols, mask=keep, other=0)


@gluon.jit
def _widen_rows(
    pool, rows, begin, end, n_rows, blocks, keys, tails, full, empty,
    stride: gl.constexpr, C: gl.constexpr, R: gl.constexpr, FENCE: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Gather FP8 rows (words of four bytes) through registers, a block ahead, and widen them on the way to shared memory."""
    warps: gl.constexpr = gl.num_warps()
    lay: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [warps, 1], [1, 0])
    tail_lay: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [warps, 1], [1, 0])
    pairs: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    place = begin + gl.arange(0, KEYS, gl.SliceLayout(1, lay))
    groups: gl.constexpr = C // GROUP
    words: gl.constexpr = GROUP // 4
    cols = gl.expand_dims(gl.arange(0, words, gl.SliceLayout(0, lay)), 0)
    tail_cols = gl.expand_dims(C // 4 + groups + gl.arange(0, R // 2, gl.SliceLayout(0, tail_lay)), 0)
    row = row_block(rows, place, end, PAGE)
    tail = _load_words(pool, gl.convert_layout(row, gl.SliceLayout(1, tail_lay)), n_rows, stride, tail_cols)
    word0 = _load_words(pool, row, n_rows, stride, cols)
    word1 = _load_words(pool, row, n_rows, stride, cols + words)
    word2 = _load_words(pool, row, n_rows, stride, cols + 2 * words)
    word3 = _load_words(pool, row, n_rows, stride, cols + 3 * words)
    row = row_block(rows, place + KEYS, end, PAGE)
    for i in range(blocks):
        stage = i % 2
        mbarrier.wait(empty.index(stage), ((i // 2) & 1) ^ 1)
        tails.index(stage)._reinterpret(gl.int32, [KEYS, R // 2], pairs).store(tail)
        tail = _load_words(pool, gl.convert_layout(row, gl.SliceLayout(1, tail_lay)), n_rows, stride, tail_cols)
        keys.index(stage * groups)._reinterpret(gl.int32, [KEYS, GROUP // 2], pairs).store(widen(word0))
        word0 = _load_words(pool, row, n_rows, stride, cols)
        keys.index(stage * groups + 1)._reinterpret(gl.int32, [KEYS, GROUP // 2], pairs).store(widen(word1))
        word1 = _load_words(pool, row, n_rows, stride, cols + words)
        keys.index(stage * groups + 2)._reinterpret(gl.int32, [KEYS, GROUP // 2], pairs).store(widen(word2))
        word2 = _load_words(pool, row, n_rows, stride, cols + 2 * words)
        keys.index(stage * groups + 3)._reinterpret(gl.int32, [KEYS, GROUP // 2], pairs).store(widen(word3))
        word3 = _load_words(pool, row, n_rows, stride, cols + 3 * words)
        row = row_block(rows, place + (i + 2) * KEYS, end, PAGE)
        if FENCE:
            fence_async_shared()
        mbarrier.arrive(full.index(stage))


@gluon.jit
def _scale_of(scales, row, n_rows, stride: gl.constexpr, C: gl.constexpr, g: gl.constexpr):
    return gl.load(scales + row.to(gl.int64) * stride + (C // 4 + g), mask=(row >= 0) & (row < n_rows), other=0.0)


@gluon.jit
def _compute(
    scales, rows, begin, end, n_rows, blocks, scale, keys, tails, q, q_tail, probs, full, empty, sink, out, lse, parts, part_lse, n_keys,
    unit, first, tokens, first_row, part, H,
    stride: gl.constexpr, C: gl.constexpr, M: gl.constexpr, SINK: gl.constexpr, FENCE: gl.constexpr, PAGE: gl.constexpr,
    B: gl.constexpr,
):  # fmt: skip
    lay: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    key_lay: gl.constexpr = gl.SliceLayout(1, lay)
    head_lay: gl.constexpr = gl.SliceLayout(0, lay)
    groups: gl.constexpr = C // GROUP
    place = begin + gl.arange(0, KEYS, key_lay)
    m = first_row + gl.arange(0, M, head_lay)
    j = m // H
    head = m - j * H
    live = j < tokens
    token = first + j
    if B > 1:
        sees = gl.load(n_keys + token, mask=live, other=0)
    zero = gl.full([KEYS, M], 0.0, gl.float32, lay)
    high = gl.full([M], NO_MAX, gl.float32, head_lay)
    shares = zero  # sums of probabilities, not yet added up over the keys of a block
    o0 = gl.full([GROUP, M], 0.0, gl.float32, lay)
    o1 = o0
    o2 = o0
    o3 = o0
    row = row_block(rows, place, end, PAGE)
    f0 = _scale_of(scales, row, n_rows, stride, C, 0)
    f1 = _scale_of(scales, row, n_rows, stride, C, 1)
    f2 = _scale_of(scales, row, n_rows, stride, C, 2)
    f3 = _scale_of(scales, row, n_rows, stride, C, 3)
    for i in range(blocks):
        stage = i % 2
        tile = stage * groups
        there = (row >= 0) & (row < n_rows)
        mbarrier.wait(full.index(stage), (i // 2) & 1)
        if not FENCE:
            fence_async_shared()
        s = warpgroup_mma(tails.index(stage), q_tail.permute((1, 0)), zero, use_acc=False, is_async=True)
        row = row_block(rows, place + (i + 1) * KEYS, end, PAGE)
        s0 = warpgroup_mma(keys.index(tile), q.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        s1 = warpgroup_mma(keys.index(tile + 1), q.index(1).permute((1, 0)), zero, use_acc=False, is_async=True)
        s2 = warpgroup_mma(keys.index(tile + 2), q.index(2).permute((1, 0)), zero, use_acc=False, is_async=True)
        s3 = warpgroup_mma(keys.index(tile + 3), q.index(3).permute((1, 0)), zero, use_acc=False, is_async=True)
        s, s0, s1, s2, s3 = warpgroup_mma_wait(0, deps=(s, s0, s1, s2, s3))
        s += s0 * gl.expand_dims(f0, 1) + s1 * gl.expand_dims(f1, 1) + s2 * gl.expand_dims(f2, 1) + s3 * gl.expand_dims(f3, 1)
        seen = gl.expand_dims(there, 1)
        if B > 1:
            seen = seen & (gl.expand_dims(place + i * KEYS, 1) < gl.expand_dims(sees, 0))
        s = gl.where(seen, s, float("-inf"))
        new = gl.maximum(high, gl.max(s, 0) * scale)
        p = gl.exp2(s * scale - gl.expand_dims(new, 0))
        factor = gl.exp2(high - new)
        high = new
        shares = shares * gl.expand_dims(factor, 0) + p
        probs.index(0).store((p * gl.expand_dims(f0, 1)).to(probs.dtype))
        probs.index(1).store((p * gl.expand_dims(f1, 1)).to(probs.dtype))
        probs.index(2).store((p * gl.expand_dims(f2, 1)).to(probs.dtype))
        probs.index(3).store((p * gl.expand_dims(f3, 1)).to(probs.dtype))
        fence_async_shared()
        factor = gl.expand_dims(factor, 0)
        o0 = warpgroup_mma(keys.index(tile).permute((1, 0)), probs.index(0), o0 * factor, is_async=True)
        o1 = warpgroup_mma(keys.index(tile + 1).permute((1, 0)), probs.index(1), o1 * factor, is_async=True)
        o2 = warpgroup_mma(keys.index(tile + 2).permute((1, 0)), probs.index(2), o2 * factor, is_async=True)
        o3 = warpgroup_mma(keys.index(tile + 3).permute((1, 0)), probs.index(3), o3 * factor, is_async=True)
        f0 = _scale_of(scales, row, n_rows, stride, C, 0)
        f1 = _scale_of(scales, row, n_rows, stride, C, 1)
        f2 = _scale_of(scales, row, n_rows, stride, C, 2)
        f3 = _scale_of(scales, row, n_rows, stride, C, 3)
        o0, o1, o2, o3 = warpgroup_mma_wait(0, deps=(o0, o1, o2, o3))
        mbarrier.arrive(empty.index(stage))
    total = gl.sum(shares, 0)
    weight = total
    if SINK:
        weight += gl.exp2(gl.load(sink + head, mask=live, other=0.0) * LOG2_E - high)
    inverse = gl.expand_dims(gl.where(total > 0.0, 1.0 / weight, 0.0), 0)
    o0 = o0 * inverse
    o1 = o1 * inverse
    o2 = o2 * inverse
    o3 = o3 * inverse
    log = gl.where(total > 0.0, high + gl.log2(total), float("-inf"))
    keep = gl.expand_dims(live, 0)
    at = (token * H + head).to(gl.int64)
    if PAGE == 0:
        gl.store(lse + at, log * LN_2, mask=live)
        store_columns(out + gl.expand_dims(at * C, 0), o0, o1, o2, o3, keep, lay)
    elif part < 0:
        gl.store(lse + at, log * LN_2, mask=live)
        store_columns(out + gl.expand_dims(at * C, 0), o0, o1, o2, o3, keep, lay)
    else:
        at = part.to(gl.int64) * (B * H) + m
        gl.store(part_lse + at, log, mask=live)
        store_columns(parts + gl.expand_dims(at * C, 0), o0, o1, o2, o3, keep, lay)


@gluon.jit
def sparse_prefill_few_kernel(
    q_latent, q_tail, pool, scales, rows, n_keys, sink, out, lse, units, parts, part_lse, n_rows, width, scale, H,
    q_token, q_head, tail_token, tail_head,
    stride: gl.constexpr, C: gl.constexpr, R: gl.constexpr, M: gl.constexpr, SINK: gl.constexpr, COUNTS: gl.constexpr,
    PAGE: gl.constexpr, B: gl.constexpr, FENCE: gl.constexpr, LOAD_WARPS: gl.constexpr, LOAD_REGS: gl.constexpr,
):  # fmt: skip
    """M rows of queries: heads of one token, or of up to B tokens of a request. ``scale`` includes log2(e); C is 512.

    ``rows`` [.., width] are a token's chosen rows (PAGE 0; ``n_keys`` of them count if COUNTS) or a page table, with the work
    in ``units`` and tokens seeing their first ``n_keys`` keys. ``pool`` is the FP8 pool seen as int32, ``scales`` the same seen as
    fp32; ``stride`` is a row's length in such elements.
    """
    dtype: gl.constexpr = q_latent.dtype.element_ty
    groups: gl.constexpr = C // GROUP
    program = gl.program_id(0)
    row_groups = (H * B + M - 1) // M
    unit = program // row_groups
    first_row = (program % row_groups) * M
    first, tokens, begin, end, rows, part = open_unit(units, rows, n_keys, width, unit, COUNTS, PAGE)
    blocks = (end - begin + KEYS - 1) // KEYS

    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    thin: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * M, element_bitwidth=16, rank=2)
    q = gl.allocate_shared_memory(dtype, [groups, M, GROUP], wide)
    q_rope = gl.allocate_shared_memory(dtype, [M, R], wide)
    keys = gl.allocate_shared_memory(dtype, [2 * groups, KEYS, GROUP], wide)
    tails = gl.allocate_shared_memory(dtype, [2, KEYS, R], wide)
    probs = gl.allocate_shared_memory(dtype, [groups, KEYS, M], thin)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    lay: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = first_row + gl.arange(0, M, gl.SliceLayout(1, lay))
    for g in gl.static_range(groups):
        load_queries(q_latent, q.index(g), first, tokens, m, H, q_token, q_head, g * GROUP, GROUP, lay)
    load_queries(q_tail, q_rope, first, tokens, m, H, tail_token, tail_head, 0, R, lay)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _compute,
                (scales, rows, begin, end, n_rows, blocks, scale, keys, tails, q, q_rope, probs, full, empty, sink, out, lse, parts,
                 part_lse, n_keys, unit, first, tokens, first_row, part, H, stride, C, M, SINK, FENCE, PAGE, B),
            ),
            (_widen_rows, (pool, rows, begin, end, n_rows, blocks, keys, tails, full, empty, stride, C, R, FENCE, PAGE)),
        ],
        [LOAD_WARPS],
        [LOAD_REGS],
    )  # fmt: skip
