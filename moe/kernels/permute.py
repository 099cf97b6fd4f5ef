"""Rows of a grouped product, sorted by (slot, token) on the device.

A counting sort without atomics: one program a slot walks over all choices, ranks its own by a running sum, and writes them
behind the padded segments of the slots before it. Nothing is read back by the host, so a layout can be made in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...parallel.kernels.overlap import early_start, enter
from .permute_torch import Permutation, RowBlocks, check_block, check_slots, max_row_blocks

_SINGLE = 4096  # choices that one launch ranks and counts
_PAIRS = 128  # choices few enough to compare each with each
_TILES = (16, _PAIRS, 1024, _SINGLE)


@triton.jit
def _write_blocks(block_slot, block_row, block_rows, slot, start, rows, first_block, BLOCK: tl.constexpr):
    """Blocks first_block .. of the ``rows`` rows of a slot from row ``start`` on."""
    lane = tl.arange(0, 32)
    n_blocks = tl.cdiv(rows, BLOCK)
    for first in range(0, n_blocks, 32):
        b = first + lane
        kept = b < n_blocks
        tl.store(block_slot + first_block + b, tl.zeros((32,), tl.int32) + slot, mask=kept)
        tl.store(block_row + first_block + b, start + b * BLOCK, mask=kept)
        tl.store(block_rows + first_block + b, tl.minimum(rows - b * BLOCK, BLOCK), mask=kept)


@triton.jit
def _close_blocks(block_slot, block_row, block_rows, n_blocks, used, bound):
    """The count of used blocks, and the unused entries behind them."""
    tl.store(n_blocks, used)
    lane = tl.arange(0, 256)
    for first in range(used, bound, 256):
        b = first + lane
        tl.store(block_slot + b, tl.full((256,), -1, tl.int32), mask=b < bound)
        tl.store(block_row + b, tl.zeros((256,), tl.int32), mask=b < bound)
        tl.store(block_rows + b, tl.zeros((256,), tl.int32), mask=b < bound)


@triton.jit
def _load_slots(slots, first, n, n_slots, TILE: tl.constexpr):
    """(choice numbers, their slots: n_slots for those without one, -1 behind the last choice)."""
    index = first + tl.arange(0, TILE)
    found = tl.load(slots + index, mask=index < n, other=0)
    return index, tl.where(index < n, tl.where((found < 0) | (found >= n_slots), n_slots, found), -1)


@triton.jit(do_not_specialize=["n", "n_slots"])
def permute_count_kernel(slots, counts, n, n_slots, TILE: tl.constexpr, EARLY: tl.constexpr):
    """Program s: the choices of slot s; program n_slots: those without a slot."""
    enter(EARLY)
    slot = tl.program_id(0)
    total = tl.zeros((TILE,), tl.int32)
    for first in range(0, n, TILE):
        _, found = _load_slots(slots, first, n, n_slots, TILE)
        total += (found == slot).to(tl.int32)
    tl.store(counts + slot, tl.sum(total))


@triton.jit(do_not_specialize=["n", "n_slots", "bound"])
def permute_place_kernel(
    slots, counts, offsets, sorted_index, place, block_slot, block_row, block_rows, n_blocks, n, n_slots, bound,
    COUNT: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program s: rows and blocks of slot s; program n_slots: choices without a slot, and what lies behind the last row.

    COUNT says where the rows of the slots before come from: "read" from ``counts``, or counted here, for few choices: "bins" by a
    histogram, "pairs" by comparing every choice with every other (one whose rank among its slot's is a multiple of BLOCK opens a block).
    """
    enter(EARLY)
    slot = tl.program_id(0)
    if COUNT == "pairs":
        index, found = _load_slots(slots, 0, n, n_slots, TILE)
        earlier = (found[:, None] == found[None, :]) & (index[None, :] < index[:, None])
        opens = tl.sum(earlier.to(tl.int32), axis=1) % BLOCK == 0
        start = tl.sum((opens & (found >= 0) & (found < slot)).to(tl.int32)) * BLOCK
        mine = tl.sum((found == slot).to(tl.int32))
    else:
        bins = tl.arange(0, SLOTS)
        if COUNT == "bins":
            index, found = _load_slots(slots, 0, n, n_slots, TILE)
            every = tl.histogram(tl.maximum(found, 0), SLOTS, mask=found >= 0)
        else:
            every = tl.load(counts + bins, mask=bins <= n_slots, other=0)
        start = tl.sum(tl.where(bins < slot, tl.cdiv(every, BLOCK) * BLOCK, 0))
        mine = tl.sum(tl.where(bins == slot, every, 0))
    tl.store(offsets + slot, start)
    if COUNT != "read":
        tl.store(counts + slot, mine)
    none = slot == n_slots
    row = start
    for first in range(0, n, TILE):
        index, found = _load_slots(slots, first, n, n_slots, TILE)
        hit = found == slot
        ones = hit.to(tl.int32)
        hits = tl.sum(ones)
        if hits > 0:
            where = row + tl.cumsum(ones, 0) - 1
            tl.store(place + index, tl.where(none, -1, where), mask=hit)
            tl.store(sorted_index + where, index, mask=hit & (slot < n_slots))
        row += hits
    if none:
        _close_blocks(block_slot, block_row, block_rows, n_blocks, start // BLOCK, bound)
        lane = tl.arange(0, 1024)
        for first in range(start, bound * BLOCK, 1024):
            tl.store(sorted_index + first + lane, tl.full((1024,), -1, tl.int32), mask=first + lane < bound * BLOCK)
    else:
        _write_blocks(block_slot, block_row, block_rows, slot, start, mine, start // BLOCK, BLOCK)
        behind = row + tl.arange(0, BLOCK)
        tl.store(sorted_index + behind, tl.full((BLOCK,), -1, tl.int32), mask=behind < start + tl.cdiv(mine, BLOCK) * BLOCK)


@triton.jit(do_not_specialize=["n_slots", "bound", "stride"])
def segment_blocks_kernel(
    counts, block_slot, block_row, block_rows, n_blocks, n_slots, bound, stride,
    STRIDED: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program s: blocks of slot s; program n_slots: the unused entries."""
    enter(EARLY)
    slot = tl.program_id(0)
    bins = tl.arange(0, SLOTS)
    every = tl.load(counts + bins, mask=bins < n_slots, other=0).to(tl.int32)
    before = bins < slot
    first_block = tl.sum(tl.where(before, tl.cdiv(every, BLOCK), 0))
    if slot == n_slots:
        _close_blocks(block_slot, block_row, block_rows, n_blocks, first_block, bound)
    else:
        start = slot * stride if STRIDED else tl.sum(tl.where(before, every, 0))
        rows = tl.sum(tl.where(bins == slot, every, 0))
        _write_blocks(block_slot, block_row, block_rows, slot, start, rows, first_block, BLOCK)


def _pieces(sizes: list[int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """int32 tensors of these sizes in one allocation, each on 16 bytes: ten small allocations cost more than the kernels here."""
    padded = [-(-size // 4) * 4 for size in sizes]
    pieces = torch.empty(sum(padded), dtype=torch.int32, device=device).split(padded)
    return tuple(piece if len(piece) == size else piece[:size] for piece, size in zip(pieces, sizes, strict=True))


def segment_blocks(counts: torch.Tensor, n_rows: int, block: int, *, stride: int | None = None) -> RowBlocks:
    """Row blocks of rows that lie sorted by slot already.

    Args:
        counts: int32 or int64 [S] on the device, rows of each slot.
        n_rows: the host's bound of their sum.
        block: rows of a block.
        stride: distance between the first rows of neighbouring slots; None where segments follow each other without a gap.

    Raises:
        ValueError: no kernel has this block.
    """
    check_block(block)
    n_slots = counts.shape[0]
    bound = max_row_blocks(n_rows, n_slots, block)
    block_slot, block_row, block_rows, n_blocks = _pieces([bound, bound, bound, 1], counts.device)
    segment_blocks_kernel[(n_slots + 1,)](
        counts, block_slot, block_row, block_rows, n_blocks, n_slots, bound, stride or 0,
        STRIDED=stride is not None, SLOTS=triton.next_power_of_2(n_slots), BLOCK=block, num_warps=2,
        **early_start(counts.device),
    )  # fmt: skip
    return RowBlocks(block=block, block_slot=block_slot, block_row=block_row, block_rows=block_rows, n_blocks=n_blocks)


def permute(slots: torch.Tensor, n_slots: int, *, block: int) -> Permutation:
    """Sort the choices of tokens by (slot, token), each slot's rows padded to whole blocks. One launch up to 4096 choices, else two.

    Args:
        slots: int32 [T, k] contiguous; numbers outside 0 .. n_slots - 1 (-1 by custom) are choices of nobody.
        n_slots: slots of this rank.
        block: rows of a block.

    Raises:
        ValueError: ``slots`` is of another type or shape, or no kernel has this block.
    """
    check_slots(slots, n_slots, block)
    n, device = slots.numel(), slots.device
    bound = max_row_blocks(n, n_slots, block)
    sizes = [bound, bound, bound, 1, n_slots + 1, n_slots + 1, bound * block]
    block_slot, block_row, block_rows, n_blocks, offsets, counts, sorted_index = _pieces(sizes, device)
    place = torch.empty_like(slots)
    single = n <= _SINGLE
    tile = next(size for size in _TILES if n <= size or size == _SINGLE)  # few sizes, few compiles
    warps = 1 if tile <= 16 else 4 if tile <= 1024 else 8
    if not single:
        permute_count_kernel[(n_slots + 1,)](slots, counts, n, n_slots, TILE=tile, num_warps=warps, **early_start(device))
    permute_place_kernel[(n_slots + 1,)](
        slots, counts, offsets, sorted_index, place, block_slot, block_row, block_rows, n_blocks, n, n_slots, bound,
        COUNT="pairs" if n <= _PAIRS else "bins" if single else "read", SLOTS=triton.next_power_of_2(n_slots + 1), TILE=tile,
        BLOCK=block, num_warps=warps, **early_start(device),
    )  # fmt: skip
    return Permutation(
        block=block, block_slot=block_slot, block_row=block_row, block_rows=block_rows, n_blocks=n_blocks,
        k=slots.shape[1], sorted_index=sorted_index, place=place, offsets=offsets, counts=counts,
    )  # fmt: skip
