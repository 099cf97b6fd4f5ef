"""MLA attention over float rows for up to 16 rows of queries: keys stand on the long side of Hopper's wgmma, heads on the short one.

With 8 or 16 heads a tile of queries would fill an eighth or a quarter of wgmma's 64 rows. Here 64 keys are the rows of
S^T = K Q^T, and 64 latent columns the rows of O^T = V^T P^T, so that no work goes to absent heads. Two groups of four warps take
turns at the blocks of keys, each with sums of its own, which are joined at the end; another group gathers rows into two stages.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .sparse_prefill_units import GROUP, KEYS, LN_2, LOG2_E, NO_MAX, load_queries, open_unit, row_block, store_columns


@gluon.jit
def _copy_rows(
    pool, rows, begin, end, n_rows, blocks, keys, tails, absent, absent_full, full, empty,
    stride: gl.constexpr, C: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Gather float rows with cp.async. Absent keys become zeros: NaN in a row nobody chose must not reach a product."""
    warps: gl.constexpr = gl.num_warps()
    lay: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
    place = begin + gl.arange(0, KEYS, gl.SliceLayout(1, lay))
    cols = gl.expand_dims(gl.arange(0, GROUP, gl.SliceLayout(0, lay)), 0)
    tail_cols = gl.expand_dims(gl.arange(0, R, gl.SliceLayout(0, lay)), 0)
    groups: gl.constexpr = C // GROUP
    row = row_block(rows, place, end, PAGE)
    for i in range(blocks):
        stage = i % 2
        there = (row >= 0) & (row < n_rows)
        keep = gl.expand_dims(there, 1)
        start = pool + gl.expand_dims(row.to(gl.int64) * stride, 1)
        row = row_block(rows, place + (i + 1) * KEYS, end, PAGE)
        mbarrier.wait(empty.index(2 * stage), ((i // 2) & 1) ^ 1)
        absent.index(stage).store(gl.where(there, 0.0, float("-inf")))
        mbarrier.arrive(absent_full.index(stage))
        for g in gl.static_range(groups):
            if g == groups // 2:
                mbarrier.wait(empty.index(2 * stage + 1), ((i // 2) & 1) ^ 1)
            async_copy.async_copy_global_to_shared(keys.index(stage * groups + g), start + (g * GROUP + cols), mask=keep)
        async_copy.async_copy_global_to_shared(tails.index(stage), start + (C + tail_cols), mask=keep)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def _attend(
    begin, blocks, scale, keys, tails, q, q_tail, probs, absent, absent_full, full, empty, n_keys, first, tokens, first_row, H,
    C: gl.constexpr, M: gl.constexpr, B: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Every second block, from block HALF on, whose keys always stand in stage HALF: base-2 maximum, sum and four groups of O^T."""
    lay: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    key_lay: gl.constexpr = gl.SliceLayout(1, lay)
    head_lay: gl.constexpr = gl.SliceLayout(0, lay)
    groups: gl.constexpr = C // GROUP
    place = begin + gl.arange(0, KEYS, key_lay)
    m = first_row + gl.arange(0, M, head_lay)
    j = m // H
    live = j < tokens
    if B > 1:
        sees = gl.load(n_keys + first + j, mask=live, other=0)
    zero = gl.full([KEYS, M], 0.0, gl.float32, lay)
    high = gl.full([M], NO_MAX, gl.float32, head_lay)
    shares = zero  # sums of probabilities, not yet added up over the keys of a block
    o0 = gl.full([GROUP, M], 0.0, gl.float32, lay)
    o1 = o0
    o2 = o0
    o3 = o0
    for i in range(HALF, blocks, 2):
        # always HALF, but the compiler must not see it: it would keep the addresses of all tiles in registers
        stage = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1) % 2
        tile = stage * groups
        mbarrier.wait(full.index(stage), (i // 2) & 1)
        fence_async_shared()
        s = warpgroup_mma(tails.index(stage), q_tail.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(absent_full.index(stage), (i // 2) & 1)
        gone = gl.expand_dims(absent.index(stage).load(key_lay), 1)
        for g in gl.static_range(groups):
            s = warpgroup_mma(keys.index(tile + g), q.index(g).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        s = s + gone
        if B > 1:
            s = gl.where(gl.expand_dims(place + i * KEYS, 1) < gl.expand_dims(sees, 0), s, float("-inf"))
        new = gl.maximum(high, gl.max(s, 0) * scale)
        p = gl.exp2(s * scale - gl.expand_dims(new, 0))
        factor = gl.exp2(high - new)
        high = new
        shares = shares * gl.expand_dims(factor, 0) + p
        probs.index(HALF).store(p.to(probs.dtype))
        fence_async_shared()
        factor = gl.expand_dims(factor, 0)
        o0 = warpgroup_mma(keys.index(tile).permute((1, 0)), probs.index(HALF), o0 * factor, is_async=True)
        o1 = warpgroup_mma(keys.index(tile + 1).permute((1, 0)), probs.index(HALF), o1 * factor, is_async=True)
        o2 = warpgroup_mma(keys.index(tile + 2).permute((1, 0)), probs.index(HALF), o2 * factor, is_async=True)
        o3 = warpgroup_mma(keys.index(tile + 3).permute((1, 0)), probs.index(HALF), o3 * factor, is_async=True)
        o0, o1 = warpgroup_mma_wait(2, deps=(o0, o1))
        mbarrier.arrive(empty.index(2 * stage))
        o2, o3 = warpgroup_mma_wait(0, deps=(o2, o3))
        mbarrier.arrive(empty.index(2 * stage + 1))
    return high, gl.sum(shares, 0), o0, o1, o2, o3


@gluon.jit
def _second(
    begin, blocks, scale, keys, tails, q, q_tail, probs, absent, absent_full, full, empty, n_keys, first, tokens, first_row, H,
    merge_o, merge_stat, merge_full,
    C: gl.constexpr, M: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    high, total, o0, o1, o2, o3 = _attend(
        begin, blocks, scale, keys, tails, q, q_tail, probs, absent, absent_full, full, empty, n_keys, first, tokens, first_row, H,
        C, M, B, 1,
    )  # fmt: skip
    merge_stat.index(0).store(high)
    merge_stat.index(1).store(total)
    merge_o.index(0).store(o0)
    merge_o.index(1).store(o1)
    merge_o.index(2).store(o2)
    merge_o.index(3).store(o3)
    mbarrier.arrive(merge_full)


@gluon.jit
def _first(
    begin, blocks, scale, keys, tails, q, q_tail, probs, absent, absent_full, full, empty, n_keys, first, tokens, first_row, H,
    merge_o, merge_stat, merge_full, sink, out, lse, parts, part_lse, part,
    C: gl.constexpr, M: gl.constexpr, B: gl.constexpr, SINK: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    high, total, o0, o1, o2, o3 = _attend(
        begin, blocks, scale, keys, tails, q, q_tail, probs, absent, absent_full, full, empty, n_keys, first, tokens, first_row, H,
        C, M, B, 0,
    )  # fmt: skip
    lay: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    head_lay: gl.constexpr = gl.SliceLayout(0, lay)
    m = first_row + gl.arange(0, M, head_lay)
    j = m // H
    head = m - j * H
    live = j < tokens
    token = first + j
    mbarrier.wait(merge_full, 0)
    other = merge_stat.index(0).load(head_lay)
    top = gl.maximum(high, other)
    mine = gl.exp2(high - top)
    theirs = gl.exp2(other - top)
    total = total * mine + merge_stat.index(1).load(head_lay) * theirs
    high = top
    mine = gl.expand_dims(mine, 0)
    theirs = gl.expand_dims(theirs, 0)
    o0 = o0 * mine + merge_o.index(0).load(lay) * theirs
    o1 = o1 * mine + merge_o.index(1).load(lay) * theirs
    o2 = o2 * mine + merge_o.index(2).load(lay) * theirs
    o3 = o3 * mine + merge_o.index(3).load(lay) * theirs
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
def sparse_prefill_pair_kernel(
    q_latent, q_tail, pool, rows, n_keys, sink, out, lse, units, parts, part_lse, n_rows, width, scale, H,
    q_token, q_head, tail_token, tail_head,
    stride: gl.constexpr, C: gl.constexpr, R: gl.constexpr, M: gl.constexpr, SINK: gl.constexpr, COUNTS: gl.constexpr,
    PAGE: gl.constexpr, B: gl.constexpr, LOAD_WARPS: gl.constexpr, LOAD_REGS: gl.constexpr, REGS: gl.constexpr,
):  # fmt: skip
    """M rows of queries: heads of one token, or of up to B tokens of a request. ``scale`` includes log2(e); C is 512.

    ``rows`` [.., width] are a token's chosen rows (PAGE 0; ``n_keys`` of them count if COUNTS) or a page table, with the work
    in ``units`` and tokens seeing their first ``n_keys`` keys. ``stride`` is a pool row's length in elements.
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
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    thin: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * M, element_bitwidth=16, rank=2)
    q = gl.allocate_shared_memory(dtype, [groups, M, GROUP], wide)
    q_rope = gl.allocate_shared_memory(dtype, [M, R], wide)
    keys = gl.allocate_shared_memory(dtype, [2 * groups, KEYS, GROUP], wide)
    tails = gl.allocate_shared_memory(dtype, [2, KEYS, R], wide)
    probs = gl.allocate_shared_memory(dtype, [2, KEYS, M], thin)
    absent = gl.allocate_shared_memory(gl.float32, [2, KEYS], flat)
    absent_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    merge_o = gl.allocate_shared_memory(gl.float32, [groups, GROUP, M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    merge_stat = gl.allocate_shared_memory(gl.float32, [2, M], flat)
    merge_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())  # of a stage's first and second half
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=32 * LOAD_WARPS)  # cp.async arrives once a thread
        mbarrier.init(empty.index(2 * stage), count=1)
        mbarrier.init(empty.index(2 * stage + 1), count=1)
        mbarrier.init(absent_full.index(stage), count=1)
    mbarrier.init(merge_full, count=1)
    lay: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = first_row + gl.arange(0, M, gl.SliceLayout(1, lay))
    for g in gl.static_range(groups):
        load_queries(q_latent, q.index(g), first, tokens, m, H, q_token, q_head, g * GROUP, GROUP, lay)
    load_queries(q_tail, q_rope, first, tokens, m, H, tail_token, tail_head, 0, R, lay)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _first,
                (begin, blocks, scale, keys, tails, q, q_rope, probs, absent, absent_full, full, empty, n_keys, first, tokens,
                 first_row, H, merge_o, merge_stat, merge_full, sink, out, lse, parts, part_lse, part, C, M, B, SINK, PAGE),
            ),
            (
                _second,
                (begin, blocks, scale, keys, tails, q, q_rope, probs, absent, absent_full, full, empty, n_keys, first, tokens,
                 first_row, H, merge_o, merge_stat, merge_full, C, M, B),
            ),
            (_copy_rows, (pool, rows, begin, end, n_rows, blocks, keys, tails, absent, absent_full, full, empty, stride, C, R, PAGE)),
        ],
        [4, LOAD_WARPS],
        [REGS, LOAD_REGS],
    )  # fmt: skip
