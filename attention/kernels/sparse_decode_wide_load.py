"""Rows for the kernel of many heads: FP8 rows through registers into fp16, other rows by asynchronous copies."""

# mypy: disable-error-code="annotation-unchecked"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from .sparse_decode_device import TILE as N
from .sparse_decode_device import load_rows

ROOM = gl.constexpr(32.0)  # FP8 rows are held times this, over their size: codes up to 448 times scales up to 2 still fit fp16


@gluon.jit
def row_pointers(row, pool, pool_row, n_rows):
    """Start of the rows of a tile and whether they are keys."""
    valid = (row >= 0) & (row < n_rows)
    return pool + row.to(gl.int64) * pool_row, valid


@gluon.jit
def twice(halves):
    """A 16-bit pattern, given as int16, in both halves of an int32."""
    wide = halves.to(gl.int32) & 0xFFFF
    return wide | (wide << 16)


@gluon.jit
def store_codes(codes, ratios, to):
    """fp16 of codes (4 e4m3 an int32, [N, 32]) times a ratio a row (two fp16 an int32, [N]) into ``to`` int32 [N, 64]."""
    low, high = gl.inline_asm_elementwise(
        """{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;
        mul.rn.f16x2 $0, x, $3; mul.rn.f16x2 $1, y, $3; }""",
        "=r,=r,r,r",
        [codes, gl.expand_dims(ratios, 1)],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    to.store(gl.reshape(gl.join(low, high), (N, 64)))


@gluon.jit
def load_words(base, valid, L: gl.constexpr):
    """128 bytes a row, int32 [N, 32]."""
    at = gl.expand_dims(base.to(gl.pointer_type(gl.int32)), 1) + gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, L)), 0)
    return gl.load(at, mask=gl.expand_dims(valid, 1), other=0)


@gluon.jit
def load_scales(base, valid, LS: gl.constexpr):
    """Scales fp32 [N, 4]."""
    at = gl.expand_dims((base + 512).to(gl.pointer_type(gl.float32)), 1) + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, LS)), 0)
    return gl.load(at, mask=gl.expand_dims(valid, 1), other=0.0)


@gluon.jit
def load_group(
    pool, pool_row, n_rows, rows, first, end, blocks, left, right, turns, sizes, left_full, left_empty, right_full, right_empty,
):  # fmt: skip
    """Rows of tile after tile. As soon as a part of a tile has been written, the same part of the next is asked for.

    Codes and RoPE keys stay whole 32-bit words from load to store: single bytes carried around a loop take a register each.
    The readers make the writes visible to the matrix units (a fence here would wait for the loads under way).
    """
    L: gl.constexpr = gl.DistributedLinearLayout(  # four lanes write 128 bytes of a row, eight lanes two rows: no bank conflicts
        [[0, 1], [0, 2], [0, 16], [32, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [64, 32]
    )
    LS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [32, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [64, 4]
    )
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    words: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    base, valid = row_pointers(load_rows(rows, first, end, ROW), pool, pool_row, n_rows)
    scale = load_scales(gl.convert_layout(base, gl.SliceLayout(1, LS)), gl.convert_layout(valid, gl.SliceLayout(1, LS)), LS)
    turn = load_words(base + 528, valid, L)
    code_2 = load_words(base + 256, valid, L)
    code_3 = load_words(base + 384, valid, L)
    code_0 = load_words(base, valid, L)
    code_1 = load_words(base + 128, valid, L)
    row = load_rows(rows, first + N, end, ROW)
    for i in range(blocks):
        stage = i % 2
        phase = ((i // 2) & 1) ^ 1
        bits = gl.minimum(gl.maximum(gl.max(gl.abs(scale), 1), 1e-18), 1e18).to(gl.int32, bitcast=True) & 0x7F800000
        power = 0x7F000000 - bits + (5 << 23)  # of the factor 32 / size, exact
        size = gl.where(gl.convert_layout(valid, gl.SliceLayout(1, LS)), bits.to(gl.float32, bitcast=True), -1.0)
        ratio = twice((scale * gl.expand_dims(power.to(gl.float32, bitcast=True), 1)).to(gl.float16).to(gl.int16, bitcast=True))
        even, odd = gl.split(gl.reshape(ratio, (N, 2, 2)))
        ratio_0, ratio_2 = gl.split(even)
        ratio_1, ratio_3 = gl.split(odd)
        up = gl.convert_layout((power & -65536) | (power >> 16), ROW)  # two bf16
        base, valid = row_pointers(row, pool, pool_row, n_rows)
        row = load_rows(rows, first + (i + 2) * N, end, ROW)
        to_turns = turns.index(stage)._reinterpret(gl.int32, [N, 32], words)
        to_left = left.index(stage)._reinterpret(gl.int32, [N, 128], words)
        to_right = right.index(stage)._reinterpret(gl.int32, [N, 128], words)

        mbarrier.wait(right_empty.index(stage), phase)
        scale = load_scales(gl.convert_layout(base, gl.SliceLayout(1, LS)), gl.convert_layout(valid, gl.SliceLayout(1, LS)), LS)
        sizes.index(stage).store(size)
        turned = gl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [turn, gl.expand_dims(up, 1)], dtype=gl.int32, is_pure=True, pack=1
        )
        to_turns.store(turned)
        turn = load_words(base + 528, valid, L)
        store_codes(code_2, gl.convert_layout(ratio_2, ROW), to_right.slice(0, 64, 1))
        code_2 = load_words(base + 256, valid, L)
        store_codes(code_3, gl.convert_layout(ratio_3, ROW), to_right.slice(64, 64, 1))
        code_3 = load_words(base + 384, valid, L)
        mbarrier.arrive(right_full.index(stage))
        mbarrier.wait(left_empty.index(stage), phase)
        store_codes(code_0, gl.convert_layout(ratio_0, ROW), to_left.slice(0, 64, 1))
        code_0 = load_words(base, valid, L)
        store_codes(code_1, gl.convert_layout(ratio_1, ROW), to_left.slice(64, 64, 1))
        code_1 = load_words(base + 128, valid, L)
        mbarrier.arrive(left_full.index(stage))


@gluon.jit
def copy_group(
    pool, pool_row, n_rows, rows, first, end, blocks, left, right, turns, sizes, left_full, left_empty, right_full, right_empty,
):  # fmt: skip
    """The loading group for rows that are kept as they are, copied without registers; absent keys become zeros."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    half = gl.expand_dims(gl.arange(0, 256, gl.SliceLayout(0, L)), 0)
    turn = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, L)), 0)
    row = load_rows(rows, first, end, ROW)
    for i in range(blocks):
        stage = i % 2
        phase = ((i // 2) & 1) ^ 1
        base, valid = row_pointers(row, pool, pool_row, n_rows)
        at = gl.expand_dims(base, 1)
        mask = gl.expand_dims(valid, 1)
        row = load_rows(rows, first + (i + 1) * N, end, ROW)
        mbarrier.wait(right_empty.index(stage), phase)
        async_copy.async_copy_global_to_shared(turns.index(stage), at + (turn + 512), mask=mask)
        async_copy.async_copy_global_to_shared(right.index(stage), at + (half + 256), mask=mask)
        async_copy.mbarrier_arrive(right_full.index(stage), increment_count=False)
        sizes.index(stage).store(gl.where(valid, 1.0, -1.0))
        mbarrier.arrive(right_full.index(stage))
        mbarrier.wait(left_empty.index(stage), phase)
        async_copy.async_copy_global_to_shared(left.index(stage), at + half, mask=mask)
        async_copy.mbarrier_arrive(left_full.index(stage), increment_count=False)
    async_copy.wait_group(0)
