"""What one program of the Hopper kernels works on: which tokens, which keys, and where a key's row is."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
NO_MAX = gl.constexpr(-1.0e30)  # finite, so that a block without keys gives exp2(-inf - NO_MAX) = 0 and no NaN
KEYS = gl.constexpr(64)  # of a stage
GROUP = gl.constexpr(128)  # latent columns that share a scale in FP8 rows


@gluon.jit
def open_unit(units, rows, n_keys, width, unit, COUNTS: gl.constexpr, PAGE: gl.constexpr):
    """(first token, tokens, first key, end of keys, list of its rows or page table, part of the output or -1 for all of it).

    PAGE 0: a token and the rows it chose, ``rows`` [T, width]; ``units``, if any, is one number, 0 for nothing to do. Else a unit of
    ``dense_decode_plan`` and a page table.
    """
    if PAGE == 0:
        end = width
        if COUNTS:
            end = gl.minimum(gl.load(n_keys + unit), width)
        first = unit
        tokens = unit * 0 + 1
        if units is not None:
            tokens = gl.load(units)
            end = end * tokens
        begin = unit * 0
        part = unit * 0 - 1
        start = rows + unit.to(gl.int64) * width
    else:
        units += unit * 8
        first = gl.load(units)
        tokens = gl.load(units + 1)
        begin = gl.load(units + 2)
        end = gl.load(units + 3)
        start = rows + gl.load(units + 5).to(gl.int64) * width
        part = gl.load(units + 6)
    return first, tokens, begin, end, start, part


@gluon.jit
def row_block(rows, place, end, PAGE: gl.constexpr):
    """Pool rows of keys ``place``; -1 from ``end`` on."""
    if PAGE == 0:
        row = gl.load(rows + place, mask=place < end, other=-1)
    else:
        page = gl.load(rows + place // PAGE, mask=place < end, other=-1)
        row = gl.where(page >= 0, page * PAGE + place % PAGE, -1)
    return row


@gluon.jit
def load_queries(source, target, first, tokens, m, H, token_stride, head_stride, column, W: gl.constexpr, lay: gl.constexpr):
    """Row m of ``target`` is head m % H of token first + m // H; columns ``column`` to ``column`` + W."""
    j = m // H
    head = m - j * H
    cols = gl.expand_dims(column + gl.arange(0, W, gl.SliceLayout(0, lay)), 0)
    at = (first + j).to(gl.int64) * token_stride + head.to(gl.int64) * head_stride
    target.store(gl.load(source + gl.expand_dims(at, 1) + cols, mask=gl.expand_dims(j < tokens, 1), other=0.0))


@gluon.jit
def store_columns(target, o0, o1, o2, o3, keep, lay: gl.constexpr):
    """Four groups of latent columns of a transposed result, to the rows that ``target`` points to."""
    at = target + gl.expand_dims(gl.arange(0, GROUP, gl.SliceLayout(1, lay)), 1)
    gl.store(at, o0.to(target.dtype.element_ty), mask=keep)
    gl.store(at + GROUP, o1.to(target.dtype.element_ty), mask=keep)
    gl.store(at + 2 * GROUP, o2.to(target.dtype.element_ty), mask=keep)
    gl.store(at + 3 * GROUP, o3.to(target.dtype.element_ty), mask=keep)
