"""The gathering group of ``sparse_prefill_wide``: rows of two stages, each filled in two halves of its columns."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from .sparse_prefill_units import GROUP, KEYS, row_block
from .sparse_prefill_widen import load_scales, load_words, store_scaled


@gluon.jit
def _fill(part, pointers, keep):
    async_copy.async_copy_global_to_shared(part, pointers, mask=gl.expand_dims(keep, 1))


@gluon.jit
def produce(
    pool, rows, begin, end, n_rows, blocks, left, right, rope, left_full, left_empty, right_full, right_empty,
    stride: gl.constexpr, C: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """Gather the rows of each block of keys. Absent keys become zeros: NaN in a row nobody chose must not reach a product."""
    lay: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    place = begin + gl.arange(0, KEYS, gl.SliceLayout(1, lay))
    half: gl.constexpr = C // 2
    cols = gl.expand_dims(gl.arange(0, half, gl.SliceLayout(0, lay)), 0)
    rope_cols = gl.expand_dims(gl.arange(0, R, gl.SliceLayout(0, lay)), 0)
    row = row_block(rows, place, end, PAGE)
    for i in range(blocks):
        stage = i % 2
        turn = (i // 2) & 1
        keep = (row >= 0) & (row < n_rows)
        start = pool + gl.expand_dims(row.to(gl.int64) * stride, 1)
        row = row_block(rows, place + (i + 1) * KEYS, end, PAGE)
        mbarrier.wait(right_empty.index(stage), turn ^ 1)
        _fill(rope.index(stage), start + (C + rope_cols), keep)
        _fill(right.index(stage), start + (half + cols), keep)
        if LATE:
            async_copy.commit_group()
        else:
            async_copy.mbarrier_arrive(right_full.index(stage), increment_count=False)
        mbarrier.wait(left_empty.index(stage), turn ^ 1)
        _fill(left.index(stage), start + cols, keep)
        if LATE:
            async_copy.commit_group()
            async_copy.wait_group(1)
            fence_async_shared()
            mbarrier.arrive(right_full.index(stage))
            async_copy.wait_group(0)
            fence_async_shared()
            mbarrier.arrive(left_full.index(stage))
        else:
            async_copy.mbarrier_arrive(left_full.index(stage), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def produce_fp8(
    pool, scales, tail_pool, rows, begin, end, n_rows, blocks, left, right, rope, left_full, left_empty, right_full, right_empty,
    stride: gl.constexpr, C: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """Gather FP8 rows (words of four bytes) through registers, a block ahead, and dequantise them on the way."""
    lay: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    tail_lay: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    words: gl.constexpr = GROUP // 4
    place = begin + gl.arange(0, KEYS, gl.SliceLayout(1, lay))
    cols = gl.expand_dims(gl.arange(0, words, gl.SliceLayout(0, lay)), 0)
    tail_cols = gl.expand_dims(C // 2 + 2 * (C // GROUP) + gl.arange(0, R, gl.SliceLayout(0, tail_lay)), 0)
    row = row_block(rows, place, end, PAGE)
    there = (row >= 0) & (row < n_rows)
    word2 = load_words(pool, row, there, stride, cols + 2 * words)
    word3 = load_words(pool, row, there, stride, cols + 3 * words)
    f0, f1, f2, f3 = load_scales(scales, row, there, stride, C, lay)
    word0 = load_words(pool, row, there, stride, cols)
    word1 = load_words(pool, row, there, stride, cols + words)
    ahead = row_block(rows, place + KEYS, end, PAGE)
    for i in range(blocks):
        stage = i % 2
        turn = (i // 2) & 1
        mbarrier.wait(right_empty.index(stage), turn ^ 1)
        tail_row = gl.convert_layout(row, gl.SliceLayout(1, tail_lay))
        start = tail_pool + gl.expand_dims(tail_row.to(gl.int64) * (2 * stride), 1)
        _fill(rope.index(stage), start + tail_cols, (tail_row >= 0) & (tail_row < n_rows))
        async_copy.commit_group()
        row = ahead
        there = (row >= 0) & (row < n_rows)
        store_scaled(right.index(stage), 0, word2, f2)
        store_scaled(right.index(stage), GROUP, word3, f3)
        word2 = load_words(pool, row, there, stride, cols + 2 * words)
        word3 = load_words(pool, row, there, stride, cols + 3 * words)
        n0, n1, f2, f3 = load_scales(scales, row, there, stride, C, lay)
        ahead = row_block(rows, place + (i + 2) * KEYS, end, PAGE)
        async_copy.wait_group(0)
        if LATE:
            fence_async_shared()
        mbarrier.arrive(right_full.index(stage))
        mbarrier.wait(left_empty.index(stage), turn ^ 1)
        store_scaled(left.index(stage), 0, word0, f0)
        store_scaled(left.index(stage), GROUP, word1, f1)
        word0 = load_words(pool, row, there, stride, cols)
        word1 = load_words(pool, row, there, stride, cols + words)
        f0 = n0
        f1 = n1
        if LATE:
            fence_async_shared()
        mbarrier.arrive(left_full.index(stage))
