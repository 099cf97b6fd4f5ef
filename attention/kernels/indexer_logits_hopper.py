"""The lightning indexer's logits over FP8 or FP4 keys in pages of 64, for Hopper: TMA, wgmma and specialised warps.

A persistent grid shares out all the pages of a step evenly. One warp fetches keys (a ring of page buffers) and queries; one to
three warpgroups multiply and reduce. Keys are the rows of the product, heads its columns, so that the sum over heads stays within
four lanes. Several warpgroups share a page (each has other queries) or take turns (each has other pages). FP4 keys are unpacked
to e4m3 in the registers of each warpgroup that multiplies them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .indexer_logits_units import PAGE, place, share_of_few, share_of_many, unit_at
from .indexer_logits_unpack import key_scale, tables, unpack

WIDTH = gl.constexpr(128)
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _produce(
    fetch, step, memory,
    H: gl.constexpr, QB: gl.constexpr, STEP: gl.constexpr, STEP_WIDE: gl.constexpr, HAS_START: gl.constexpr,
):  # fmt: skip
    """The fetching warp: queries of each unit, then its pages, as buffers come free. Page numbers are read 32 at a time, ahead."""
    keys, scales, queries, page_table, table_stride = fetch
    token_row, limit, start, n_tokens, token, skip, left = step
    k_mem, s_mem, q_mem, k_full, k_empty, q_full, q_empty = memory
    STAGES: gl.constexpr = k_mem.shape[0]
    SLOTS: gl.constexpr = q_full.shape[0]
    GROUPS: gl.constexpr = q_mem.shape[0] // SLOTS
    KEY_BYTES: gl.constexpr = k_mem.shape[2]
    SCALES_AT: gl.constexpr = PAGE * KEY_BYTES // 256
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    ring = gl.to_tensor(0)
    unit = gl.to_tensor(0)
    while left > 0:
        row, count, first, pages = unit_at(token, n_tokens, token_row, limit, start, STEP, STEP_WIDE, HAS_START)
        take = gl.minimum(pages - skip, left)
        if take > 0:
            table = page_table + row.to(gl.int64) * table_stride + first + skip
            following = gl.load(table + lanes, mask=lanes < take, other=0)
            slot, parity = place(unit, SLOTS)
            mbarrier.wait(q_empty.index(slot), parity ^ 1)
            mbarrier.expect(q_full.index(slot), GROUPS * QB * H * WIDTH)
            for g in gl.static_range(GROUPS):
                tma.async_copy_global_to_shared(queries, [(token + g * QB) * H, 0], q_full.index(slot), q_mem.index(slot * GROUPS + g))
            unit += 1
            for base in range(0, take, 32):
                ids = following
                following = gl.load(table + base + 32 + lanes, mask=base + 32 + lanes < take, other=0)
                for i in range(base, gl.minimum(base + 32, take)):
                    page = gl.sum(gl.where(lanes == i - base, ids, 0), 0)
                    stage, parity = place(ring + i, STAGES)
                    mbarrier.wait(k_empty.index(stage), parity ^ 1)
                    mbarrier.expect(k_full.index(stage), PAGE * (KEY_BYTES + 4))
                    key_row = page * (PAGE + PAGE * 4 // KEY_BYTES)  # a page ends with the rows that its scales fill
                    tma.async_copy_global_to_shared(keys, [key_row, 0], k_full.index(stage), k_mem.index(stage))
                    scale_row = page * (SCALES_AT + 1) + SCALES_AT
                    tma.async_copy_global_to_shared(scales, [scale_row, 0], k_full.index(stage), s_mem.index(stage))
            ring += take
            left -= take
        skip = 0
        token += count


@gluon.jit
def _over_heads(parts, QB: gl.constexpr, H: gl.constexpr):
    """Sums over heads of [keys, QB * H], as [keys, QB].

    Four lanes share a row, each has two of every eight columns. With two or four tokens the lanes' sums are transposed among
    them, so that a lane ends with its part instead of all with everything. The order of additions is the same either way.
    """
    lanes = parts.reshape([PAGE, QB, H // 8, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([PAGE, QB, 4, H // 4])
    four = gl.sum(lanes, 3)
    if QB == 4:
        per_four: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0]],
            lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            warp_bases=[[16, 0, 0], [32, 0, 0]],
            block_bases=[],
            shape=[PAGE, 4, 4],
        )
        four = gl.convert_layout(four, per_four)
    elif QB == 2:
        per_two: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[0, 0, 1], [0, 0, 2]],
            lane_bases=[[0, 1, 0], [8, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            warp_bases=[[16, 0, 0], [32, 0, 0]],
            block_bases=[],
            shape=[PAGE, 2, 4],
        )
        four = gl.convert_layout(four, per_two)
    return gl.sum(gl.sum(four.reshape([PAGE, QB, 2, 2]), 2), 2)


@gluon.jit
def _unpacked(memory, number, low, high, PRODUCT: gl.constexpr, RESULT: gl.constexpr):
    """FP4 keys and scales of a page, in registers; its buffer is free then."""
    k_mem, s_mem, q_mem, k_full, k_empty, q_full, q_empty = memory
    stage, parity = place(number, k_mem.shape[0])
    mbarrier.wait(k_full.index(stage), parity)
    words = s_mem.index(stage)._reinterpret(gl.int32, [PAGE], FLAT)
    keys = unpack(k_mem.index(stage), words, low, high, PRODUCT)
    scale = key_scale(words.load(gl.SliceLayout(1, RESULT)))
    mbarrier.arrive(k_empty.index(stage), count=1)
    return keys, scale


@gluon.jit
def _consume(
    give, step, memory, ME: gl.constexpr, KEY_WAYS: gl.constexpr,
    H: gl.constexpr, QB: gl.constexpr, STEP: gl.constexpr, STEP_WIDE: gl.constexpr, HAS_START: gl.constexpr,
):  # fmt: skip
    """Warpgroup ``ME``: products of its queries with its pages, weighted ReLU and sum over heads, logits to memory.

    A ring buffer always belongs to the same warpgroups (``KEY_WAYS`` divides their number): parity then tells its uses apart.
    """
    weights, out, out_stride = give
    token_row, limit, start, n_tokens, token, skip, left = step
    k_mem, s_mem, q_mem, k_full, k_empty, q_full, q_empty = memory
    STAGES: gl.constexpr = k_mem.shape[0]
    SLOTS: gl.constexpr = q_full.shape[0]
    GROUPS: gl.constexpr = q_mem.shape[0] // SLOTS
    KEY_WAY: gl.constexpr = ME % KEY_WAYS
    GROUP: gl.constexpr = ME // KEY_WAYS
    FP4: gl.constexpr = k_mem.shape[2] != WIDTH
    N: gl.constexpr = QB * H
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    acc = gl.zeros([PAGE, N], gl.float32, layout)
    result: gl.constexpr = _over_heads(acc, QB, H).type.layout
    key = gl.arange(0, PAGE, gl.SliceLayout(1, result))
    query = gl.arange(0, QB, gl.SliceLayout(0, result)) + GROUP * QB
    column = gl.arange(0, N, gl.SliceLayout(0, layout)) + GROUP * N
    if FP4:
        low, high = tables()
    ring = gl.to_tensor(0)
    unit = gl.to_tensor(0)
    while left > 0:
        row, count, first, pages = unit_at(token, n_tokens, token_row, limit, start, STEP, STEP_WIDE, HAS_START)
        take = gl.minimum(pages - skip, left)
        if take > 0:
            at = token.to(gl.int64) * H + column
            weight = 0.5 * gl.load(weights + at, mask=at < n_tokens.to(gl.int64) * H, other=0.0)
            end = gl.load(limit + token + query, mask=query < count, other=0)
            to = out + (token + query).to(gl.int64)[None, :] * out_stride + key[:, None]
            slot, parity = place(unit, SLOTS)
            mbarrier.wait(q_full.index(slot), parity)
            q = q_mem.index(slot * GROUPS + GROUP).permute((1, 0))
            for i in range((KEY_WAY + KEY_WAYS - ring % KEY_WAYS) % KEY_WAYS, take, KEY_WAYS):
                if FP4:
                    keys, scale = _unpacked(memory, ring + i, low, high, layout, result)
                    acc = warpgroup_mma(keys, q, acc, use_acc=False, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=[acc])
                else:
                    stage, parity = place(ring + i, STAGES)
                    mbarrier.wait(k_full.index(stage), parity)
                    acc = warpgroup_mma(k_mem.index(stage), q, acc, use_acc=False, is_async=True)
                    scale = s_mem.index(stage)._reinterpret(gl.float32, [PAGE], FLAT).load(gl.SliceLayout(1, result))
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    mbarrier.arrive(k_empty.index(stage), count=1)
                parts = (acc + gl.abs(acc)) * weight[None, :]  # twice the ReLU, exactly; half the weights
                logit = _over_heads(parts, QB, H) * scale[:, None]
                at_key = (first + skip + i) * PAGE
                gl.store(to + at_key, logit, mask=(at_key + key)[:, None] < end[None, :])
            mbarrier.arrive(q_empty.index(slot), count=1)
            unit += 1
            ring += take
            left -= take
        skip = 0
        token += count


@gluon.jit(do_not_specialize=["table_stride", "out_stride", "n_tokens"])
def indexer_logits_kernel(
    keys, scales, queries, weights, page_table, table_stride, token_row, limit, start, out, out_stride, n_tokens,
    H: gl.constexpr, QB: gl.constexpr, KEY_WAYS: gl.constexpr, QUERY_WAYS: gl.constexpr,
    STEP: gl.constexpr, STEP_WIDE: gl.constexpr, HAS_START: gl.constexpr,
    VECTOR: gl.constexpr, SINGLE: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    REGISTERS: gl.constexpr, FETCHING: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The work is counted in pages over *units*: up to STEP tokens of one request, which read its keys together."""
    WAYS: gl.constexpr = KEY_WAYS * QUERY_WAYS
    # barriers and buffers
    k_mem = gl.allocate_shared_memory(keys.dtype, [STAGES, PAGE, keys.block_type.shape[1]], keys.layout)
    s_mem = gl.allocate_shared_memory(scales.dtype, [STAGES, 1, PAGE], scales.layout)
    q_mem = gl.allocate_shared_memory(gl.float8e4nv, [SLOTS * QUERY_WAYS, QB * H, WIDTH], queries.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=QUERY_WAYS)
    for i in gl.static_range(SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=WAYS)
    fence_async_shared()  # the copy engine, which completes these barriers, must see them initialised
    # the launch may overlap the end of the kernel before: nothing of memory may be read or written above this line
    gdc_wait()
    gdc_launch_dependents()
    if SINGLE:
        token, skip, left = share_of_few(n_tokens, token_row, limit, start, STEP, HAS_START, VECTOR)
    else:
        token, skip, left = share_of_many(n_tokens, token_row, limit, start, STEP, HAS_START, VECTOR)
    gl.thread_barrier()  # what the partitions are handed lies where slower warps may still read the sums above
    step = (token_row, limit, start, n_tokens, token, skip, left)
    memory = (k_mem, s_mem, q_mem, k_full, k_empty, q_full, q_empty)
    fetch = (keys, scales, queries, page_table, table_stride)
    give = (weights, out, out_stride)
    if WAYS == 1:
        gl.warp_specialize(
            [
                (_consume, (give, step, memory, 0, KEY_WAYS, H, QB, STEP, STEP_WIDE, HAS_START)),
                (_produce, (fetch, step, memory, H, QB, STEP, STEP_WIDE, HAS_START)),
            ],
            [1],
            [FETCHING],
        )
    elif WAYS == 2:
        gl.warp_specialize(
            [
                (_consume, (give, step, memory, 0, KEY_WAYS, H, QB, STEP, STEP_WIDE, HAS_START)),
                (_consume, (give, step, memory, 1, KEY_WAYS, H, QB, STEP, STEP_WIDE, HAS_START)),
                (_produce, (fetch, step, memory, H, QB, STEP, STEP_WIDE, HAS_START)),
            ],
            [4, 1],
            [REGISTERS, FETCHING],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (give, step, memory, 0, KEY_WAYS, H, QB, STEP, STEP_WIDE, HAS_START)),
                (_consume, (give, step, memory, 1, KEY_WAYS, H, QB, STEP, STEP_WIDE, HAS_START)),
                (_consume, (give, step, memory, 2, KEY_WAYS, H, QB, STEP, STEP_WIDE, HAS_START)),
                (_produce, (fetch, step, memory, H, QB, STEP, STEP_WIDE, HAS_START)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, FETCHING],
        )
