"""A tile of FP8 rows under few heads: its copies, scores, softmax and weighted sum. See sparse_decode_few."""

# mypy: disable-error-code="annotation-unchecked"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .sparse_decode_device import NO_SCORE, SHIFT, TILE, load_rows

_TINY = gl.constexpr(1e-30)


@gluon.jit
def key_operand(codes, ROWS: gl.constexpr, LOAD: gl.constexpr, OPERAND: gl.constexpr):
    """fp16 [ROWS, 128] of fp8 codes in shared memory, columns renamed: 32 t + 4 i + 2 a + b becomes 16 i + 8 a + 2 t + b."""
    wide = codes.load(LOAD).to(gl.float16)
    named = gl.permute(gl.reshape(wide, (ROWS, 4, 8, 2, 2)), (0, 2, 3, 1, 4))
    return gl.convert_layout(gl.reshape(named, (ROWS, 128)), OPERAND)


@gluon.jit
def value_operand(codes, KEYS: gl.constexpr, LOAD: gl.constexpr, OPERAND: gl.constexpr):
    """fp16 [128, KEYS], the transpose; columns renamed: 32 w + 4 g + 2 d + c becomes 64 d + 16 w + 8 c + g."""
    wide = codes.load(LOAD).to(gl.float16)
    named = gl.permute(gl.reshape(wide, (KEYS, 4, 8, 2, 2)), (3, 1, 4, 2, 0))
    return gl.convert_layout(gl.reshape(named, (128, KEYS)), OPERAND)


@gluon.jit
def load_group(pool, pool_row, n_rows, rows, first, end, tiles, codes, turns, scales, full, empty):
    """Keep copies under way: codes [TILE, 512], RoPE keys [TILE, 64] bf16 and scales [TILE, 4] of a tile; zeros where there is no key."""
    STAGES: gl.constexpr = codes.shape[0]
    LC: gl.constexpr = gl.BlockedLayout([1, 16], [2, 16], [4, 1], [1, 0])
    LT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    row_c = load_rows(rows, first, end, gl.SliceLayout(1, LC))
    row_t = load_rows(rows, first, end, gl.SliceLayout(1, LT))
    row_s = load_rows(rows, first, end, gl.SliceLayout(1, LS))
    for tile in range(tiles):
        stage = tile % STAGES
        at = pool + (row_c.to(gl.int64) * pool_row)[:, None] + gl.arange(0, 512, gl.SliceLayout(0, LC))[None, :]
        at_c = at.to(gl.pointer_type(gl.float8e4nv))
        valid_c = ((row_c >= 0) & (row_c < n_rows))[:, None]
        at = (pool + (row_t.to(gl.int64) * pool_row + 528)).to(gl.pointer_type(gl.bfloat16))
        at_t = at[:, None] + gl.arange(0, 64, gl.SliceLayout(0, LT))[None, :]
        valid_t = ((row_t >= 0) & (row_t < n_rows))[:, None]
        at = (pool + (row_s.to(gl.int64) * pool_row + 512)).to(gl.pointer_type(gl.float32))
        at_s = at[:, None] + gl.arange(0, 4, gl.SliceLayout(0, LS))[None, :]
        valid_s = ((row_s >= 0) & (row_s < n_rows))[:, None]
        ahead = first + (tile + 1) * TILE
        row_c = load_rows(rows, ahead, end, gl.SliceLayout(1, LC))
        row_t = load_rows(rows, ahead, end, gl.SliceLayout(1, LT))
        row_s = load_rows(rows, ahead, end, gl.SliceLayout(1, LS))
        mbarrier.wait(empty.index(stage), ((tile // STAGES) & 1) ^ 1)
        async_copy.async_copy_global_to_shared(codes.index(stage), at_c, mask=valid_c)
        async_copy.async_copy_global_to_shared(turns.index(stage), at_t, mask=valid_t)
        async_copy.async_copy_global_to_shared(scales.index(stage), at_s, mask=valid_s)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def attend(
    rows, first, end, n_rows, tiles, factor, codes, turns, scales, q_wide, q_turn, downs, weights, peaks, full, empty, q_full,
    GROUP: gl.constexpr, HB: gl.constexpr,
):  # fmt: skip
    """Every second tile, from tile GROUP on: output chunks [128, HB] (columns renamed), maximum, sum and largest scale."""
    STAGES: gl.constexpr = codes.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HB, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LK: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]], [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 128]
    )
    LV: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0], [32, 0]], [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]], [[0, 32], [0, 64]], [], [64, 128]
    )
    LW: gl.constexpr = gl.DistributedLinearLayout(  # all scales of the tile in every warp
        [[0, 1], [0, 2], [32, 0]], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[0, 0], [0, 0]], [], [64, 4]
    )
    LP: gl.constexpr = gl.DistributedLinearLayout(  # what all warps found, in every thread
        [[1, 0], [2, 0], [0, 1], [0, 8]], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, 16]
    )
    KEY: gl.constexpr = gl.SliceLayout(1, MMA)
    acc = ()
    for _ in gl.static_range(4):
        acc = acc + (gl.zeros((128, HB), gl.float32, MMA),)
    top = gl.full((HB,), NO_SCORE, gl.float32, gl.SliceLayout(0, MMA))
    total = gl.zeros((TILE, HB), gl.float32, MMA)
    largest = _TINY + 0.0
    row = load_rows(rows, first + GROUP * TILE, end, KEY)
    mbarrier.wait(q_full, 0)
    fence_async_shared()
    factors = (downs.load(gl.SliceLayout(0, MMA)) * factor)[None, :]
    for tile in range(GROUP, tiles, 2):
        stage = tile % STAGES
        here = codes.index(stage)
        # index 0, in a way that keeps 36 operand addresses from being computed before the loop, and then spilled
        queries = q_wide.index(tile >> 20)
        zero = gl.zeros((TILE, HB), gl.float32, MMA)
        valid = ((row >= 0) & (row < n_rows))[:, None]
        row = load_rows(rows, first + (tile + 2) * TILE, end, KEY)
        mbarrier.wait(full.index(stage), (tile // STAGES) & 1)
        # one product at a time is under way, while the operand of the next is made: two would run one by one anyway
        a = turns.index(stage).load(OPERAND)
        flying = warpgroup_mma(a, q_turn.permute((1, 0)), zero, use_acc=False, is_async=True)
        a = key_operand(here.slice(0, 128, 1), TILE, LK, OPERAND)
        score = warpgroup_mma_wait(0, (flying,))
        flying = warpgroup_mma(a, queries.slice(0, 128, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        for c in gl.static_range(1, 4):
            factor_of = scales.index(stage).slice(c - 1, 1, 1).load(MMA)
            a = key_operand(here.slice(c * 128, 128, 1), TILE, LK, OPERAND)
            part = warpgroup_mma_wait(0, (flying,))
            flying = warpgroup_mma(a, queries.slice(c * 128, 128, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
            score += part * factor_of
        wide = scales.index(stage).load(LW)
        larger = gl.maximum(largest, gl.max(gl.max(gl.abs(wide), 1), 0))
        factor_of = scales.index(stage).slice(3, 1, 1).load(MMA)
        a = value_operand(here.slice(0, 128, 1), TILE, LV, OPERAND)
        score += warpgroup_mma_wait(0, (flying,)) * factor_of
        score = gl.where(valid, score * factors, float("-inf"))
        # the maximum over keys: within warps first, so that shared memory and its barrier are needed once
        peaks.store(gl.max(gl.reshape(score, (4, 16, HB)), 1))
        new = gl.maximum(top, gl.convert_layout(gl.max(peaks.load(LP), 0), gl.SliceLayout(0, MMA)))
        p = gl.exp2(score - new[None, :] + SHIFT)
        decay = gl.exp2(top - new)
        total = total * decay[None, :] + p
        top = new
        inverse = 1.0 / larger
        for c in gl.static_range(4):
            factor_of = scales.index(stage).slice(c, 1, 1).load(MMA)
            weights[c].store((p * (factor_of * inverse)).to(gl.float16))
        fence_async_shared()
        gl.thread_barrier()
        decay = (decay * (largest * inverse))[None, :]
        largest = larger
        decayed = ()
        for c in gl.static_range(4):
            decayed = decayed + (acc[c] * decay,)
        flying = warpgroup_mma(a, weights[0], decayed[0], is_async=True)
        acc = ()
        for c in gl.static_range(1, 4):
            a = value_operand(here.slice(c * 128, 128, 1), TILE, LV, OPERAND)
            acc = acc + (warpgroup_mma_wait(0, (flying,)),)
            flying = warpgroup_mma(a, weights[c], decayed[c], is_async=True)
        mbarrier.arrive(empty.index(stage))
        acc = acc + (warpgroup_mma_wait(0, (flying,)),)
    return acc, top, gl.sum(total, 0), largest
