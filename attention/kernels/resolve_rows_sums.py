"""Sums and ranks over all threads of a program with one barrier each, where Triton's reductions take three and its scans seven.

Every function has a form in plain Triton, for the interpreter, for small tensors and where tables lie in global memory. The
others go through shared memory in PTX: a *cell* is an int32 that every warp adds to, a *row of totals* has one for every 32
neighbours. None of them assumes which thread holds which element, only that each is held once (``SIZE >= THREADS``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .resolve_rows_sizes import CELLS, MIN_CELLS, SUM_CELLS
from .resolve_rows_tables import put_word

_SUM_CELLS, _MIN_CELLS, _CELLS = tl.constexpr(SUM_CELLS), tl.constexpr(MIN_CELLS), tl.constexpr(CELLS)


@triton.constexpr_function
def _operands(count: int) -> str:
    return ",".join(["=r"] * count + ["r"] * 2 * count)


@triton.constexpr_function
def _reduction(op: str, count: int) -> str:
    """PTX: ``count`` values of each thread and a cell -> the cell combined with all of them."""
    steps = [f"{op}.s32 s, s, ${i};" for i in range(count + 1, 2 * count)]
    zeros = [f"mov.b32 ${i}, 0;" for i in range(count)]
    return " ".join(
        [
            f"{{ .reg .b32 s, l; .reg .pred p; mov.b32 s, ${count};",
            *steps,
            f"redux.sync.{op}.s32 s, s, 0xffffffff; mov.u32 l, %laneid; setp.eq.u32 p, l, 0;",
            f"@p red.shared.{op}.s32 [${2 * count}], s;",
            *zeros,
            "}",
        ]
    )


@triton.constexpr_function
def _bases(count: int, rows: int) -> str:
    """PTX: ``count`` groups and the totals of ``32 * rows`` groups -> sum of the totals before each of them."""
    text = ["{ .reg .b32 l, a, u, v, w; .reg .pred p;", ".reg .b32 " + ", ".join(f"t{r}, o{r}" for r in range(rows)) + ";"]
    text += [f"mov.u32 l, %laneid; shl.b32 l, l, 2; add.s32 a, l, ${2 * count};"]
    text += [f"ld.shared.b32 t{r}, [a+{128 * r}]; mov.b32 o{r}, t{r};" for r in range(rows)]
    for step in (1, 2, 4, 8, 16):
        text += [f"shfl.sync.up.b32 u|p, t{r}, {step}, 0, 0xffffffff; @p add.s32 t{r}, t{r}, u;" for r in range(rows)]
    for r in range(rows):
        if r:
            text += [f"shfl.sync.idx.b32 u, t{r - 1}, 31, 31, 0xffffffff; add.s32 t{r}, t{r}, u;"]
        text += [f"sub.s32 o{r}, t{r}, o{r};"]
    for i in range(count):
        text += [f"and.b32 v, ${count + i}, 31; shr.u32 w, ${count + i}, 5; mov.b32 a, 0;"]
        text += [f"shfl.sync.idx.b32 u, o{r}, v, 31, 0xffffffff; setp.eq.u32 p, w, {r}; @p mov.b32 a, u;" for r in range(rows)]
        text += [f"mov.b32 l, a; mov.b32 x{i}, l;"]
    text.insert(1, ".reg .b32 " + ", ".join(f"x{i}" for i in range(count)) + ";")
    return " ".join([*text, *(f"mov.b32 ${i}, x{i};" for i in range(count)), "}"])


@triton.constexpr_function
def _whole(rows: int) -> str:
    """PTX: the totals of ``32 * rows`` groups -> their sum."""
    loads = [f"ld.shared.b32 u, [a+{128 * r}]; add.s32 s, s, u;" for r in range(rows)]
    head = "{ .reg .b32 a, u, s; mov.u32 a, %laneid; shl.b32 a, a, 2; add.s32 a, a, $1; mov.b32 s, 0;"
    return " ".join([head, *loads, "redux.sync.add.s32 $0, s, 0xffffffff; }"])


@triton.jit
def clear_cells(cells, FAST: tl.constexpr):
    """Start values of all cells; a barrier must follow."""
    if FAST:
        cell = tl.arange(0, _CELLS)
        start = tl.where(cell < _SUM_CELLS, 0, tl.where(cell < _SUM_CELLS + _MIN_CELLS, 2**31 - 1, -(2**31)))
        put_word(cells, cell, start, cell < _CELLS, True)


@triton.jit
def combine(x, cells, cell, OP: tl.constexpr, SIZE: tl.constexpr, THREADS: tl.constexpr, FAST: tl.constexpr):
    """Sum ("add"), "min" or "max" of int32 ``x`` [SIZE], which ``result`` gives after a barrier."""
    if FAST:
        PER: tl.constexpr = SIZE // THREADS
        address = tl.zeros((SIZE,), tl.int32) + (cells + 4 * cell)
        tl.inline_asm_elementwise(_reduction(OP, PER), _operands(PER), [x, address], dtype=tl.int32, is_pure=False, pack=PER)
        out = cell
    elif OP == "add":
        out = tl.sum(x, 0)
    elif OP == "min":
        out = tl.min(x, 0)
    else:
        out = tl.max(x, 0)
    return out


@triton.jit
def result(combined, cells, FAST: tl.constexpr):
    """What ``combine`` promised."""
    if FAST:
        x = tl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=r,r", [cells + 4 * combined], dtype=tl.int32, is_pure=False, pack=1)
    else:
        x = combined
    return x


@triton.jit
def ranks(x, totals, SIZE: tl.constexpr, THREADS: tl.constexpr, FAST: tl.constexpr):
    """Sum of the int32 ``x`` [SIZE] before each element, and of all. There is a barrier inside."""
    if FAST:
        ROWS: tl.constexpr = SIZE // 1024
        PER: tl.constexpr = SIZE // THREADS
        grouped = tl.reshape(x, [SIZE // 32, 32])
        group = tl.reshape(tl.broadcast_to(tl.arange(0, SIZE // 32)[:, None], [SIZE // 32, 32]), [SIZE])
        put_word(totals, tl.arange(0, SIZE // 32), tl.sum(grouped, 1), tl.full((SIZE // 32,), True, tl.int1), True)
        inner = tl.reshape(tl.cumsum(grouped, 1), [SIZE]) - x
        tl.debug_barrier()
        address = tl.zeros((SIZE,), tl.int32) + totals
        base = tl.inline_asm_elementwise(_bases(PER, ROWS), _operands(PER), [group, address], dtype=tl.int32, is_pure=False, pack=PER)
        before = base + inner
        whole = tl.inline_asm_elementwise(_whole(ROWS), "=r,r", [totals], dtype=tl.int32, is_pure=False, pack=1)
    else:
        before = tl.cumsum(x, 0) - x
        whole = tl.sum(x, 0)
    return before, whole
