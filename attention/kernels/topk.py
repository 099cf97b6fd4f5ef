"""Exact top-k of long score rows as Triton kernels, with the cache rows of the chosen positions.

A row of up to ``CAPACITY`` scores fits the registers of one program: the k-th highest score is found there by bisection over
order-preserving integer keys, counting the keys above each probe. A longer row is first thinned. A jittered sample of it gives
a *pivot* that a few times ``k`` scores should reach; one pass over the row keeps those, in order of position, and the
bisection runs on them. Nothing rests on the guess being good: when fewer than ``k`` or more than ``CAPACITY`` scores reach the
pivot (long runs of equal scores, or a sample that misled), the same bisection runs over the whole row in memory.

Few rows are cut into parts, a program each; a part learns from the counts that the parts before it publish where its
survivors go, and a third launch chooses. Many rows take one program each. Only integers are added, so the order of arrival
changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...parallel.kernels.overlap import early_start, enter
from .topk_choice import choose, keep_survivors, load_scores, locate, sample_pivot, short_row, value_of, whole_row
from .topk_plan import TopkPlan, plan_for

_PARTS = 64  # least room for the counts of a row's parts: programs are compiled by it, and up to 128 k scores a row it is this


@triton.jit(do_not_specialize=["max_context", "table_stride"])
def topk_start_kernel(
    logits, logits_stride, limit, k, max_context, page_table, table_stride, token_row, out, out_rows, pivots, published,
    PAGE: tl.constexpr, CAPACITY: tl.constexpr, SAMPLE: tl.constexpr, GROUP: tl.constexpr, K_BLOCK: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (T): finish rows of up to ``CAPACITY`` scores; of longer ones the pivot, and counters at zero for ``topk_scan_kernel``."""
    enter(EARLY)
    row = tl.program_id(0).to(tl.int64)
    end = tl.minimum(tl.load(limit + row), max_context)
    scores = logits + row * logits_stride
    if end > CAPACITY:
        tl.store(published + row * PARTS + tl.arange(0, PARTS), tl.zeros((PARTS,), tl.int32))
        tl.store(pivots + row, sample_pivot(scores, end, k, SAMPLE, GROUP, CAPACITY))
    else:
        pages = page_table + tl.load(token_row + row).to(tl.int64) * table_stride
        out += row * k
        out_rows += row * k
        if end <= k:
            whole_row(end, k, out, out_rows, pages, PAGE, K_BLOCK)
        else:
            short_row(scores, end, k, out, CAPACITY, CAPACITY)
            locate(k, out, out_rows, pages, PAGE, K_BLOCK)


@triton.jit(do_not_specialize=["max_context", "n_parts"])
def topk_scan_kernel(
    logits, logits_stride, limit, max_context, pivots, published, found, places, n_parts,
    CAPACITY: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (T * n_parts), the parts of a row in succession: keep what reaches the pivot.

    A part waits for the counts of the parts before it. Programs start in the order of their numbers, so those run already.
    """
    enter(EARLY)
    row = (tl.program_id(0) // n_parts).to(tl.int64)
    part = tl.program_id(0) % n_parts
    end = tl.minimum(tl.load(limit + row), max_context)
    start = part * BLOCK
    if (end > CAPACITY) & (start < end):
        HALF: tl.constexpr = BLOCK // 2
        scores = logits + row * logits_stride
        low = load_scores(scores, start, end, HALF)
        high = load_scores(scores, start + HALF, end, HALF)
        pivot = value_of(tl.load(pivots + row))
        published += row * PARTS
        count = tl.sum((low >= pivot).to(tl.int32) + (high >= pivot).to(tl.int32), 0)
        tl.atomic_xchg(published + part, count + 1, sem="relaxed")  # 0 says: not known yet
        others = tl.arange(0, PARTS)
        counts = tl.load(published + others, mask=others < part, other=1, volatile=True)
        while tl.min(counts, 0) == 0:
            counts = tl.load(published + others, mask=others < part, other=1, volatile=True)
        if count > 0:
            row_of_found = row * CAPACITY
            before = tl.sum(counts - 1, 0)
            keep_survivors(low, high, start, pivot, found + row_of_found, places + row_of_found, before, CAPACITY, HALF)


@triton.jit(do_not_specialize=["max_context", "table_stride"])
def topk_finish_kernel(
    logits, logits_stride, limit, k, max_context, page_table, table_stride, token_row, out, out_rows, pivots, published, found, places,
    PAGE: tl.constexpr, CAPACITY: tl.constexpr, K_BLOCK: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, EMIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (T): choose among the survivors of a long row."""
    enter(EARLY)
    row = tl.program_id(0).to(tl.int64)
    end = tl.minimum(tl.load(limit + row), max_context)
    if end > CAPACITY:
        counts = tl.load(published + row * PARTS + tl.arange(0, PARTS))
        total = tl.sum(tl.maximum(counts - 1, 0), 0)
        pages = page_table + tl.load(token_row + row).to(tl.int64) * table_stride
        scores = logits + row * logits_stride
        out += row * k
        found += row * CAPACITY
        places += row * CAPACITY
        choose(scores, end, tl.load(pivots + row), total, found, places, k, out, CAPACITY, BLOCK, EMIT)
        locate(k, out, out_rows + row * k, pages, PAGE, K_BLOCK)


@triton.jit(do_not_specialize=["max_context", "table_stride", "n_rows"])
def topk_rows_kernel(
    logits, logits_stride, limit, k, max_context, page_table, table_stride, token_row, out, out_rows, found, places, n_rows,
    PAGE: tl.constexpr, CAPACITY: tl.constexpr, SAMPLE: tl.constexpr, GROUP: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    EMIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Any grid: each program takes every grid-th row from beginning to end, and keeps its survivors in a place of its own."""
    enter(EARLY)
    HALF: tl.constexpr = BLOCK // 2
    found += tl.program_id(0).to(tl.int64) * CAPACITY
    places += tl.program_id(0).to(tl.int64) * CAPACITY
    for number in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row = tl.full((), 0, tl.int64) + number
        end = tl.minimum(tl.load(limit + row), max_context)
        scores = logits + row * logits_stride
        pages = page_table + tl.load(token_row + row).to(tl.int64) * table_stride
        chosen = out + row * k
        if end <= k:
            whole_row(end, k, chosen, out_rows + row * k, pages, PAGE, K_BLOCK)
        else:
            if end <= CAPACITY:
                short_row(scores, end, k, chosen, CAPACITY, EMIT)
            else:
                pivot = sample_pivot(scores, end, k, SAMPLE, GROUP, CAPACITY)
                score = value_of(pivot)
                total = end * 0
                low = load_scores(scores, 0, end, HALF)
                high = load_scores(scores, HALF, end, HALF)
                for start in range(0, end, BLOCK):
                    next_low = load_scores(scores, start + BLOCK, end, HALF)
                    next_high = load_scores(scores, start + BLOCK + HALF, end, HALF)
                    total = keep_survivors(low, high, start, score, found, places, total, CAPACITY, HALF)
                    low = next_low
                    high = next_high
                tl.debug_barrier()
                choose(scores, end, pivot, total, found, places, k, chosen, CAPACITY, BLOCK, EMIT)
            locate(k, chosen, out_rows + row * k, pages, PAGE, K_BLOCK)
            tl.debug_barrier()  # the survivors have been read before the next row's overwrite them


def select_rows(
    logits: torch.Tensor,
    limit: torch.Tensor,
    k: int,
    page_table: torch.Tensor,
    token_row: torch.Tensor,
    *,
    page_size: int,
    max_context: int,
    plan: TopkPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the ``k`` highest of the first ``limit`` scores of every row, and the cache rows they lie in.

    Equal scores are decided for the lower position; 0.0 equals -0.0, NaN counts as -inf. Positions ascend; a row with fewer
    than ``k`` scores ends in -1. What lies past a row's limit is not read for its value.

    Args:
        logits: fp32 [T, >= max_context], elements of a row adjacent, rows any number of elements apart.
        limit: int32 [T], in 0..max_context.
        k: 1..4096.
        page_table: int32 [R, P], page of every ``page_size`` positions of a request.
        token_row: int32 or int64 [T], row of ``page_table`` of each score row.
        page_size: positions a page.
        max_context: bound on ``limit`` known to the host; with T it sets the grid.
        plan: launch settings; ``plan_for`` the shape by default.

    Returns:
        positions int32 [T, k] and rows int32 [T, k], row = page * page_size + offset in the page.

    Raises:
        ValueError: ``k`` out of range, or logits that are not fp32 rows of ``max_context``.
    """
    if not 1 <= k <= 4096:
        raise ValueError(f"top-k of {k}: the kernel chooses 1 to 4096 positions a row")
    if logits.dtype != torch.float32 or logits.shape[1] < max_context or (logits.stride(1) != 1 and logits.shape[1] > 1):
        given_instead = f"{logits.dtype} {tuple(logits.shape)} strides {logits.stride()}"
        raise ValueError(f"top-k needs fp32 score rows of {max_context} adjacent elements, got {given_instead}; copy them to such a tensor")
    count = logits.shape[0]
    out = torch.empty((2, count, k), dtype=torch.int32, device=logits.device)
    if count == 0:
        return out[0], out[1]
    plan = plan_for(count, max_context, k) if plan is None else plan
    given = (logits, logits.stride(0), limit, k, max_context, page_table, page_table.stride(0), token_row, out[0], out[1])
    fixed = {"PAGE": page_size, "CAPACITY": plan.capacity, "K_BLOCK": triton.next_power_of_2(k)}
    start = early_start(logits.device)
    sampling = {"SAMPLE": plan.sample, "GROUP": plan.group}
    emit = min(plan.emit, plan.capacity)
    if plan.by_rows:
        programs = min(count, plan.programs)
        kept = torch.empty((2, programs, plan.capacity), dtype=torch.int32, device=logits.device)
        found = (kept[0].view(torch.float32), kept[1])
        topk_rows_kernel[(programs,)](
            *given, *found, count, BLOCK=plan.block, EMIT=emit, **fixed, **start, **sampling, num_warps=plan.warps, maxnreg=plan.registers
        )
        return out[0], out[1]
    n_parts = triton.cdiv(max_context, plan.block)
    width = max(_PARTS, triton.next_power_of_2(n_parts))
    counters = torch.empty(count * (width + 1), dtype=torch.int32, device=logits.device)
    published, pivots = counters, counters[count * width :]
    topk_start_kernel[(count,)](*given, pivots, published, PARTS=width, **fixed, **start, **sampling, num_warps=plan.row_warps)
    if max_context > plan.capacity:
        kept = torch.empty((2, count, plan.capacity), dtype=torch.int32, device=logits.device)
        found = (kept[0].view(torch.float32), kept[1])
        topk_scan_kernel[(count * n_parts,)](
            logits, logits.stride(0), limit, max_context, pivots, published, *found, n_parts,
            CAPACITY=plan.capacity, PARTS=width, BLOCK=plan.block, num_warps=plan.warps, **start,
        )  # fmt: skip
        topk_finish_kernel[(count,)](
            *given, pivots, published, *found, PARTS=width, BLOCK=plan.row_block, EMIT=emit, **fixed, **start, num_warps=plan.row_warps
        )
    return out[0], out[1]
