"""Attention over selected FP8 rows for few heads, written for Hopper's warpgroup matrix units: C = 512, R = 64.

Two groups of four warps take turns at tiles of 64 keys, each with a softmax and an output of its own, which are joined at
the end; a third group keeps four tiles of rows on their way.

The problem is transposed: keys (and output columns) are the 64 rows that a warpgroup product needs, heads its narrow side,
so 16 heads cost 16 columns and not 64. Codes go from shared memory to registers, become fp16 there and are the left
operand as they are; no dequantised copy is ever written. To make both loads wide and free of bank conflicts, the latent
columns are renamed inside a chunk of 128 (the queries alike), and the output columns renamed back when stored.
"""

# mypy: disable-error-code="annotation-unchecked"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .sparse_decode_device import LN_2, LOG2_E, SHIFT, TILE, head_exponent
from .sparse_decode_few_tiles import attend, load_group
from .sparse_decode_rows import VARYING


@gluon.jit
def second_group(
    rows, first, end, n_rows, tiles, factor, codes, turns, scales, q_wide, q_turn, downs, weights, peaks, full, empty, q_full,
    stats, done, joined, HB: gl.constexpr,
):  # fmt: skip
    """The odd tiles; the results go where rows were, once no group needs any more."""
    acc, top, total, largest = attend(
        rows, first, end, n_rows, tiles, factor, codes, turns, scales, q_wide, q_turn, downs, weights, peaks, full, empty, q_full, 1, HB
    )
    stats.index(0).store(top)
    stats.index(1).store(total)
    stats.index(2).store(gl.full((HB,), 1.0, gl.float32, top.type.layout) * largest)
    mbarrier.wait(done, 0)
    place = codes.index(0)._reinterpret(gl.float32, [4, 128, HB], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for c in gl.static_range(4):
        place.index(c).store(acc[c])
    mbarrier.arrive(joined)


@gluon.jit
def first_group(
    rows, first, end, n_rows, tiles, factor, codes, turns, scales, q_wide, q_turn, downs, weights, peaks, full, empty, q_full,
    stats, done, joined, q_latent, q_rope, latent_token, latent_head, rope_token, rope_head,
    sink, has_sink, out, lse, token, first_head, heads, split, splits, PARTS: gl.constexpr, HB: gl.constexpr,
):  # fmt: skip
    """Queries to shared memory, the even tiles, then the join of both groups and the output."""
    LQ: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    head = first_head + gl.arange(0, HB, gl.SliceLayout(1, LQ))
    inside = (head < heads)[:, None]
    q_at = q_latent + token.to(gl.int64) * latent_token + (head.to(gl.int64) * latent_head)[:, None]
    q = gl.load(q_at + gl.arange(0, 512, gl.SliceLayout(0, LQ))[None, :], mask=inside, other=0.0).to(gl.float32)
    r_at = q_rope + token.to(gl.int64) * rope_token + (head.to(gl.int64) * rope_head)[:, None]
    r = gl.load(r_at + gl.arange(0, 64, gl.SliceLayout(0, LQ))[None, :], mask=inside, other=0.0).to(gl.float32)
    up, down = head_exponent(gl.maximum(gl.max(gl.abs(q), 1), gl.max(gl.abs(r), 1)))
    q = gl.permute(gl.reshape((q * up[:, None]).to(gl.float16), (HB, 4, 4, 8, 2, 2)), (0, 1, 3, 4, 2, 5))
    q_wide.index(0).store(gl.reshape(q, (HB, 512)))
    q_turn.store((r * up[:, None]).to(gl.bfloat16))
    downs.store(down)
    fence_async_shared()
    mbarrier.arrive(q_full)
    acc, top, total, largest = attend(
        rows, first, end, n_rows, tiles, factor, codes, turns, scales, q_wide, q_turn, downs, weights, peaks, full, empty, q_full, 0, HB
    )
    mbarrier.arrive(done)
    mbarrier.wait(joined, 0)
    HEAD: gl.constexpr = top.type.layout
    other = stats.index(0).load(HEAD)
    new = gl.maximum(top, other)
    ours = gl.exp2(top - new)
    theirs = gl.exp2(other - new)
    total = total * ours + stats.index(1).load(HEAD) * theirs
    head = first_head + gl.arange(0, HB, HEAD)
    inside = head < heads
    empty_row = total == 0.0
    level = gl.where(empty_row, float("-inf"), new - SHIFT + gl.log2(gl.where(empty_row, 1.0, total)))
    place = (token * heads + head).to(gl.int64) * splits + split
    if PARTS:
        gl.store(lse + place, level, mask=inside)
    else:
        gl.store(lse + place, level * LN_2, mask=inside)
        extra = gl.load(sink + head, mask=inside & (has_sink != 0), other=float("-inf")) * LOG2_E
        total += gl.where(empty_row, 0.0, gl.exp2(extra - new + SHIFT))
    inverse = gl.where(empty_row, 0.0, 1.0 / gl.where(empty_row, 1.0, total))
    ours = (ours * inverse * largest)[None, :]
    theirs = (theirs * inverse * stats.index(2).load(HEAD))[None, :]
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, 4], [0, 1])
    head = first_head + gl.arange(0, HB, gl.SliceLayout(0, OUT))
    to = out + (((token * heads + head).to(gl.int64) * splits + split) * 512)[None, :]
    to = to + gl.arange(0, 128, gl.SliceLayout(1, OUT))[:, None]
    kept = codes.index(0)._reinterpret(gl.float32, [4, 128, HB], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for c in gl.static_range(4):
        o = acc[c] * ours + kept.index(c).load(acc[c].type.layout) * theirs
        o = gl.permute(gl.reshape(o.to(out.dtype.element_ty), (2, 4, 2, 8, HB)), (1, 3, 0, 2, 4))  # real names of the columns
        o = gl.convert_layout(gl.reshape(o, (128, HB)), OUT)
        gl.store(to + c * 128, o, mask=(head < heads)[None, :] & (gl.arange(0, 128, gl.SliceLayout(1, OUT)) >= 0)[:, None])


@gluon.jit(do_not_specialize=VARYING)
def sparse_decode_few_kernel(
    q_latent,
    q_rope,
    pool,
    rows,
    n_keys,
    sink,
    out,
    lse,
    has_sink,
    has_count,
    n_rows,
    k,
    heads,
    splits,
    keys_per_split,
    factor,
    latent_token,
    latent_head,
    rope_token,
    rope_head,
    pool_row,
    rows_token,
    HB: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    SECOND_REGS: gl.constexpr,
    LOAD_REGS: gl.constexpr,
):
    """One pass of online softmax over a token's split for HB heads (16). Outputs as in ``epilogue`` of sparse_decode_rows."""
    gdc_wait()
    gdc_launch_dependents()
    token = gl.program_id(0)
    first_head = gl.program_id(1) * HB
    split = gl.program_id(2)
    first = split * keys_per_split
    end = gl.minimum(first + keys_per_split, k)
    end = gl.minimum(end, gl.load(n_keys + token, mask=has_count != 0, other=k))
    rows += token.to(gl.int64) * rows_token
    tiles = gl.cdiv(gl.maximum(end - first, 0), TILE)

    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    codes = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, 512], gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
    turns = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 64], WIDE)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, TILE, 4], FLAT)
    q_wide = gl.allocate_shared_memory(gl.float16, [1, HB, 512], WIDE)
    q_turn = gl.allocate_shared_memory(gl.bfloat16, [HB, 64], WIDE)
    downs = gl.allocate_shared_memory(gl.float32, [HB], LINE)
    stats = gl.allocate_shared_memory(gl.float32, [3, HB], LINE)
    peaks = ()
    weights = ()
    for _ in gl.static_range(2):
        peaks = peaks + (gl.allocate_shared_memory(gl.float32, [4, HB], FLAT),)
        group = ()
        for _c in gl.static_range(4):  # apart, or the compiler puts barriers between the stores
            group = group + (gl.allocate_shared_memory(gl.float16, [TILE, HB], gl.NVMMASharedLayout(2 * HB, 16)),)
        weights = weights + (group,)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    done = gl.allocate_shared_memory(gl.int64, [1], BAR)
    joined = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=128)  # every loading thread arrives, when its copies have landed
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(done, count=1)
    mbarrier.init(joined, count=1)
    gl.warp_specialize(
        [
            (first_group, (
                rows, first, end, n_rows, tiles, factor, codes, turns, scales, q_wide, q_turn, downs, weights[0], peaks[0],
                full, empty, q_full, stats, done, joined, q_latent, q_rope, latent_token, latent_head, rope_token, rope_head,
                sink, has_sink, out, lse, token, first_head, heads, split, splits, PARTS, HB,
            )),
            (second_group, (
                rows, first, end, n_rows, tiles, factor, codes, turns, scales, q_wide, q_turn, downs, weights[1], peaks[1],
                full, empty, q_full, stats, done, joined, HB,
            )),
            (load_group, (pool, pool_row, n_rows, rows, first, end, tiles, codes, turns, scales, full, empty)),
        ],
        [4, 4],
        [SECOND_REGS, LOAD_REGS],
    )  # fmt: skip
