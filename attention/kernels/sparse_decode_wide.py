"""Attention over selected FP8 rows for many heads, warp-specialised for Hopper: 64 heads a program, C = 512, R = 64.

Three groups of four warps. The loading group takes rows into registers, turns them into fp16 and writes them to shared
memory, two tiles of 64 keys; the scoring group multiplies queries and keys, keeps the softmax and accumulates the left half
of the output; the values group accumulates the right half. The product of the next keys is started before the values of
these are, so that the softmax runs while the matrix units are busy.

A row is divided by a power of two ``size`` near the largest of its scales, so that any fp32 scales fit fp16: scores are
multiplied by it again, and probabilities by its share of the largest size seen so far.
"""

# mypy: disable-error-code="annotation-unchecked"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .sparse_decode_device import LN_2, LOG2_E, NO_SCORE, SHIFT, head_exponent
from .sparse_decode_device import TILE as N
from .sparse_decode_rows import VARYING
from .sparse_decode_wide_load import ROOM as FP8_ROOM
from .sparse_decode_wide_load import copy_group, load_group

M = gl.constexpr(64)  # heads of a program


@gluon.jit
def start_scores(i, left, right, turns, q_left, q_right, q_turn, left_full, right_full, zero):
    """Start the scores of tile i; asynchronous."""
    stage = i % 2
    phase = (i // 2) & 1
    mbarrier.wait(right_full.index(stage), phase)
    fence_async_shared()
    s = warpgroup_mma(q_turn, turns.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma(q_right, right.index(stage).permute((1, 0)), s, is_async=True)
    mbarrier.wait(left_full.index(stage), phase)
    fence_async_shared()
    return warpgroup_mma(q_left, left.index(stage).permute((1, 0)), s, is_async=True)


@gluon.jit
def softmax(s, size, head_factor, top, total, largest, DTYPE: gl.constexpr):
    """Base-2 online softmax of one tile: weights of the rows, new maximum, decay of what was summed, its sum, largest size."""
    there = gl.expand_dims(size > 0.0, 0)
    s = gl.where(there, s * gl.expand_dims(size, 0) * gl.expand_dims(head_factor, 1), float("-inf"))
    new = gl.maximum(top, gl.max(s, 1))
    p = gl.exp2(s - gl.expand_dims(new - SHIFT, 1))
    decay = gl.exp2(top - new)
    total = total * decay + gl.sum(p, 1)
    larger = gl.maximum(largest, gl.max(size, 0))
    inverse = 1.0 / larger
    return (p * gl.expand_dims(size * inverse, 0)).to(DTYPE), new, decay * (largest * inverse), total, larger


@gluon.jit
def store_out(out, o, place, head, heads, column, LAYOUT: gl.constexpr):
    """Store 256 columns of the output, or of a part of it."""
    cols = column + gl.arange(0, 256, gl.SliceLayout(0, LAYOUT))
    gl.store(
        out + gl.expand_dims(place * 512, 1) + gl.expand_dims(cols, 0), o.to(out.dtype.element_ty), mask=gl.expand_dims(head < heads, 1)
    )


@gluon.jit
def score_group(
    blocks, factor, left, right, turns, sizes, q_left, q_right, q_turn, probs, decays, downs, left_full, left_empty, right_full,
    q_full, p_full, p_empty, sink, has_sink, out, lse, token, first_head, heads, split, splits,
    ROOM: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Scores, softmax, left half of the output."""
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LS)
    KEY: gl.constexpr = gl.SliceLayout(0, LS)
    zero = gl.full([M, N], 0.0, gl.float32, LS)
    top = gl.full([M], NO_SCORE, gl.float32, ROW)
    total = gl.full([M], 0.0, gl.float32, ROW)
    largest = 1e-30
    o = gl.full([M, 256], 0.0, gl.float32, LO)
    mbarrier.wait(q_full, 0)
    head_factor = downs.load(ROW) * (factor / ROOM)
    s = warpgroup_mma_wait(0, deps=(start_scores(0, left, right, turns, q_left, q_right, q_turn, left_full, right_full, zero),))
    p, top, decay, total, largest = softmax(s, sizes.index(0).load(KEY), head_factor, top, total, largest, probs.dtype)
    probs.store(p)
    decays.store(decay)
    fence_async_shared()
    mbarrier.arrive(p_full)
    for i in range(blocks - 1):
        s_next = start_scores(i + 1, left, right, turns, q_left, q_right, q_turn, left_full, right_full, zero)
        o_next = warpgroup_mma(probs, left.index(i % 2), o, is_async=True)
        size = sizes.index((i + 1) % 2).load(KEY)
        s = warpgroup_mma_wait(1, deps=(s_next,))
        p, top, decay, total, largest = softmax(s, size, head_factor, top, total, largest, probs.dtype)
        o = warpgroup_mma_wait(0, deps=(o_next,))
        mbarrier.arrive(left_empty.index(i % 2))
        mbarrier.wait(p_empty, i & 1)
        probs.store(p)
        decays.store(decay)
        fence_async_shared()
        mbarrier.arrive(p_full)
        o = o * gl.convert_layout(gl.expand_dims(decay, 1), LO)
    last = blocks - 1
    o = warpgroup_mma_wait(0, deps=(warpgroup_mma(probs, left.index(last % 2), o, is_async=True),))
    head = first_head + gl.arange(0, M, ROW)
    place = (token * heads + head).to(gl.int64) * splits + split
    empty = total == 0.0
    level = gl.where(empty, float("-inf"), top - SHIFT + gl.log2(gl.where(empty, 1.0, total)))
    if PARTS:
        gl.store(lse + place, level, mask=head < heads)
    else:
        gl.store(lse + place, level * LN_2, mask=head < heads)
        extra = gl.load(sink + head, mask=(head < heads) & (has_sink != 0), other=float("-inf")) * LOG2_E
        total += gl.where(empty, 0.0, gl.exp2(extra - top + SHIFT))
    weight = gl.where(empty, 0.0, largest / ROOM / gl.where(empty, 1.0, total))
    mbarrier.wait(p_empty, last & 1)
    decays.store(weight)
    mbarrier.arrive(p_full)
    weight = gl.convert_layout(gl.expand_dims(weight, 1), LO)
    head = first_head + gl.arange(0, M, gl.SliceLayout(1, LO))
    store_out(out, o * weight, (token * heads + head).to(gl.int64) * splits + split, head, heads, 0, LO)


@gluon.jit
def load_queries(q_latent, q_rope, q_left, q_right, q_turn, downs, token, first_head, heads, q_token, q_head, r_token, r_head):
    """Queries as fp16, scaled by a power of two per head into its range; the RoPE part by the same, as bf16."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    L2: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = first_head + gl.arange(0, M, gl.SliceLayout(1, L))
    q_at = q_latent + token.to(gl.int64) * q_token + gl.expand_dims(head.to(gl.int64) * q_head, 1)
    q_at = q_at + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, L)), 0)
    inside = gl.expand_dims(head < heads, 1)
    amax = gl.full([M], 0.0, gl.float32, gl.SliceLayout(1, L))
    for c in gl.static_range(4):
        q = gl.load(q_at + c * 128, mask=inside, other=0.0)
        amax = gl.maximum(amax, gl.max(gl.abs(q.to(gl.float32)), 1))
    head2 = first_head + gl.arange(0, M, gl.SliceLayout(1, L2))
    r_at = q_rope + token.to(gl.int64) * r_token + gl.expand_dims(head2.to(gl.int64) * r_head, 1)
    r = gl.load(r_at + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, L2)), 0), mask=gl.expand_dims(head2 < heads, 1), other=0.0)
    r = r.to(gl.float32)
    amax = gl.maximum(amax, gl.convert_layout(gl.max(gl.abs(r), 1), gl.SliceLayout(1, L)))
    up, down = head_exponent(amax)
    downs.store(down)
    for c in gl.static_range(4):
        q = gl.load(q_at + c * 128, mask=inside, other=0.0)
        q = (q.to(gl.float32) * gl.expand_dims(up, 1)).to(q_left.dtype)
        if c < 2:
            q_left.slice(c * 128, 128, 1).store(q)
        else:
            q_right.slice(c * 128 - 256, 128, 1).store(q)
    q_turn.store((r * gl.expand_dims(gl.convert_layout(up, gl.SliceLayout(1, L2)), 1)).to(gl.bfloat16))


@gluon.jit
def value_group(
    q_latent, q_rope, blocks, right, q_left, q_right, q_turn, probs, decays, downs, right_empty, q_full, p_full, p_empty,
    out, token, first_head, heads, split, q_token, q_head, r_token, r_head, splits,
):  # fmt: skip
    """Queries to shared memory first, then the right half of the output."""
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LO)
    load_queries(q_latent, q_rope, q_left, q_right, q_turn, downs, token, first_head, heads, q_token, q_head, r_token, r_head)
    fence_async_shared()
    mbarrier.arrive(q_full)
    o = gl.full([M, 256], 0.0, gl.float32, LO)
    for i in range(blocks):
        mbarrier.wait(p_full, i & 1)
        decay = decays.load(ROW)
        o = o * gl.expand_dims(decay, 1)
        o = warpgroup_mma_wait(0, deps=(warpgroup_mma(probs, right.index(i % 2), o, is_async=True),))
        mbarrier.arrive(right_empty.index(i % 2))
        mbarrier.arrive(p_empty)
    mbarrier.wait(p_full, blocks & 1)
    weight = decays.load(ROW)
    head = first_head + gl.arange(0, M, ROW)
    place = (token * heads + head).to(gl.int64) * splits + split
    store_out(out, o * gl.expand_dims(weight, 1), place, head, heads, 256, LO)


@gluon.jit(do_not_specialize=VARYING)
def sparse_decode_wide_kernel(
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
    PARTS: gl.constexpr,
    VALUE_REGS: gl.constexpr,
    LOAD_REGS: gl.constexpr,
):
    """One pass of online softmax over a token's split for 64 heads. Outputs as in ``epilogue`` of sparse_decode_rows."""
    gdc_wait()
    gdc_launch_dependents()
    first_head = gl.program_id(0) * M
    token = gl.program_id(1)
    split = gl.program_id(2)
    first = split * keys_per_split
    end = gl.minimum(first + keys_per_split, k)
    end = gl.minimum(end, gl.load(n_keys + token, mask=has_count != 0, other=k))
    rows += token.to(gl.int64) * rows_token
    blocks = gl.maximum(gl.cdiv(end - first, N), 1)

    FP8: gl.constexpr = pool.dtype.element_ty == gl.uint8 or pool.dtype.element_ty == gl.int8
    DTYPE: gl.constexpr = gl.float16 if FP8 else gl.bfloat16
    ROOM: gl.constexpr = FP8_ROOM if FP8 else 1.0
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_left = gl.allocate_shared_memory(DTYPE, [M, 256], WIDE)
    q_right = gl.allocate_shared_memory(DTYPE, [M, 256], WIDE)
    q_turn = gl.allocate_shared_memory(gl.bfloat16, [M, 64], WIDE)
    left = gl.allocate_shared_memory(DTYPE, [2, N, 256], WIDE)
    right = gl.allocate_shared_memory(DTYPE, [2, N, 256], WIDE)
    turns = gl.allocate_shared_memory(gl.bfloat16, [2, N, 64], WIDE)
    probs = gl.allocate_shared_memory(DTYPE, [M, N], WIDE)
    sizes = gl.allocate_shared_memory(gl.float32, [2, N], FLAT)
    decays = gl.allocate_shared_memory(gl.float32, [M], FLAT)
    downs = gl.allocate_shared_memory(gl.float32, [M], FLAT)
    left_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    left_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    right_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    right_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    p_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    p_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for stage in gl.static_range(2):
        # copies arrive by themselves, once for each of 128 threads; and once more when the sizes have been written
        mbarrier.init(left_full.index(stage), count=1 if FP8 else 128)
        mbarrier.init(left_empty.index(stage), count=1)
        mbarrier.init(right_full.index(stage), count=1 if FP8 else 129)
        mbarrier.init(right_empty.index(stage), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=1)
    gl.warp_specialize(
        [
            (score_group, (
                blocks, factor, left, right, turns, sizes, q_left, q_right, q_turn, probs, decays, downs, left_full, left_empty, right_full,
                q_full, p_full, p_empty, sink, has_sink, out, lse, token, first_head, heads, split, splits, ROOM, PARTS,
            )),
            (value_group, (
                q_latent, q_rope, blocks, right, q_left, q_right, q_turn, probs, decays, downs, right_empty, q_full, p_full, p_empty,
                out, token, first_head, heads, split, latent_token, latent_head, rope_token, rope_head, splits,
            )),
            (load_group if FP8 else copy_group, (
                pool, pool_row, n_rows, rows, first, end, blocks, left, right, turns, sizes, left_full, left_empty, right_full,
                right_empty,
            )),
        ],
        [4, 4],
        [VALUE_REGS, LOAD_REGS],
    )  # fmt: skip
