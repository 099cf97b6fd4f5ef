"""The two ends of a decode step as one kernel each, where plain PyTorch takes some twenty launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .step_edges_torch import StepEntry

_COLUMNS = 1024  # pages that one program looks up
_FETCH = 256  # values of 8 bytes that one program fetches


@triton.jit
def step_enter_kernel(
    slots, starts, page_at, page, tokens, token_stride, pages, width, used, page_size, n_rows,
    ids, table, write_rows, ends, limit,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (B, ceil(used / COLUMNS)). Every program patches what it copies; the first of a row also makes its other values."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, start = tl.load(slots + row), tl.load(starts + row)
    every = tl.arange(0, ROWS)
    at = tl.load(page_at + every, mask=every < n_rows, other=-1)
    new = tl.load(page + every, mask=every < n_rows, other=-1).to(tl.int32)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    copied = tl.load(pages + slot * width + column, mask=column < used, other=0)
    tl.store(table + row * used + column, copied, mask=column < used)
    # The copy may have read a place before or after it changed: the change is written over it either way.
    tl.debug_barrier()
    place = at - slot * width
    mine = (place >= part * COLUMNS) & (place < tl.minimum(used, (part + 1) * COLUMNS)) & (at >= 0)
    tl.store(table + row * used + place, new, mask=mine)
    if part == 0:
        tl.store(pages + tl.load(page_at + row), tl.load(page + row).to(tl.int32))
        known = tl.load(pages + slot * width + start // page_size)
        changed = tl.max(tl.where((place == start // page_size) & (at >= 0), new, -1), 0)
        first = tl.where(changed >= 0, changed, known).to(tl.int64)
        tl.store(write_rows + row, first * page_size + start % page_size)
        tl.store(ids + row, tl.load(tokens + slot * token_stride + start).to(tl.int64))
        tl.store(ends + row, start + 1)
        tl.store(limit + row, (start + 1).to(tl.int32))


@triton.jit
def step_fetch_kernel(lanes, lane_stride, n_lanes, counter, block, size, WIDTH: tl.constexpr):
    """Grid (ceil(size / WIDTH)): a lane of pinned memory into device memory, where the other kernels read it."""
    lane = tl.load(counter) % n_lanes
    value = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(block + value, tl.load(lanes + lane * lane_stride + value, mask=value < size, other=0), mask=value < size)


@triton.jit
def step_leave_kernel(found, slots, starts, tokens, token_stride, lanes, lane_stride, n_lanes, counter, n_rows, ROWS: tl.constexpr):
    """Grid (1): every row's token to its place in the token table and in pinned memory."""
    row = tl.arange(0, ROWS)
    real = row < n_rows
    step = tl.load(counter)
    token = tl.load(found + row, mask=real, other=0)
    slot, start = tl.load(slots + row, mask=real, other=0), tl.load(starts + row, mask=real, other=0)
    tl.store(tokens + slot * token_stride + start + 1, token.to(tl.int32), mask=real)
    tl.store(lanes + (step % n_lanes) * lane_stride + row, token, mask=real)
    tl.debug_barrier()  # every thread has read the counter
    tl.store(counter, step + 1)


@triton.jit
def step_places_kernel(at, values, moving_at, moving, flat, flags, stamp, n, ADVANCE: tl.constexpr, WIDTH: tl.constexpr):
    """Grid (1): changes of the tier tables, and the number of the step."""
    every = tl.arange(0, WIDTH)
    real = every < n
    place = tl.load(at + every, mask=real, other=0)
    tl.store(flat + place, tl.load(values + every, mask=real, other=0).to(tl.int32), mask=real)
    slot = tl.load(moving_at + every, mask=real, other=0)
    tl.store(flags + slot, tl.load(moving + every, mask=real, other=0).to(tl.int8), mask=real)
    if ADVANCE:
        tl.store(stamp, tl.load(stamp) + 1)


def enter_step(
    slots: torch.Tensor,
    starts: torch.Tensor,
    page_at: torch.Tensor,
    page: torch.Tensor,
    tokens: torch.Tensor,
    pages: torch.Tensor,
    *,
    page_size: int,
    used: int,
) -> StepEntry:
    """See ``step_edges_torch.enter_step``. All tensors contiguous."""
    n, device = len(slots), slots.device
    if not all(x.is_contiguous() for x in (slots, starts, page_at, page)):
        raise ValueError("slots, starts, page_at and page must be contiguous; call .contiguous() on them")
    whole = torch.empty((3, n), dtype=torch.int64, device=device)
    table = torch.empty((n, used), dtype=torch.int32, device=device)
    limit = torch.empty(n, dtype=torch.int32, device=device)
    columns = min(_COLUMNS, triton.next_power_of_2(used))
    step_enter_kernel[(n, triton.cdiv(used, columns))](
        slots, starts, page_at, page, tokens, tokens.stride(0), pages, pages.stride(0), used, page_size, n,
        whole[0], table, whole[1], whole[2], limit,
        ROWS=triton.next_power_of_2(n), COLUMNS=columns,
    )  # fmt: skip
    return StepEntry(whole[0], table, whole[1], whole[2], limit)


def put_places(
    at: torch.Tensor,
    values: torch.Tensor,
    moving_at: torch.Tensor,
    moving: torch.Tensor,
    flat: torch.Tensor,
    flags: torch.Tensor,
    stamp: torch.Tensor,
    *,
    advance: bool,
) -> None:
    """See ``step_edges_torch.put_places``. All tensors contiguous, those of changes of one length."""
    n = len(at)
    step_places_kernel[(1,)](at, values, moving_at, moving, flat, flags, stamp, n, ADVANCE=advance, WIDTH=triton.next_power_of_2(n))


def fetch_inputs(lanes: torch.Tensor, counter: torch.Tensor, block: torch.Tensor) -> None:
    """See ``step_edges_torch.fetch_inputs``."""
    size = len(block)
    step_fetch_kernel[(triton.cdiv(size, _FETCH),)](lanes, lanes.stride(0), len(lanes), counter, block, size, WIDTH=_FETCH, num_warps=4)


def leave_step(
    found: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, tokens: torch.Tensor, lanes: torch.Tensor, counter: torch.Tensor
) -> None:
    """See ``step_edges_torch.leave_step``."""
    n = len(found)
    step_leave_kernel[(1,)](
        found, slots, starts, tokens, tokens.stride(0), lanes, lanes.stride(0), len(lanes), counter, n, ROWS=triton.next_power_of_2(n)
    )
