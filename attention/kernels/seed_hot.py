"""A hot buffer's first content, from what the last tokens of a prompt chose: one Triton program for the request.

The rows of positions are walked from the newest to the oldest. Which positions are seeded already is asked of a sparse set, as
in ``resolve_rows``: hot row b of position p stands at scratch[p], and counts where hot row b holds p.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .seed_hot_torch import Seeds


@triton.jit(do_not_specialize=["slot", "n_rows"])
def seed_hot_kernel(
    positions, n_rows, k, slot, latent_row, host_row, hot_pages, hot_positions, hot_stamps, stamp, scratch, source, target, count, order,
    H: tl.constexpr, PAGE: tl.constexpr, RESIDENT: tl.constexpr, N: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (1). ``N``, ``PAGES``: powers of two that ``k`` and ``H`` fit; ``order`` [H]: scratch."""
    HOT: tl.constexpr = H * PAGE
    where = slot.to(tl.int64) if slot.dtype.is_int() else tl.load(slot)
    hot_pages += where * H
    hot_positions += where * HOT
    hot_stamps += where * HOT
    now = tl.load(stamp)
    for start in range(0, HOT, BLOCK):
        hot = start + tl.arange(0, BLOCK)
        tl.store(hot_positions + hot, tl.full((BLOCK,), -1, tl.int32), mask=hot < HOT)
    page_number = tl.arange(0, PAGES)
    leased = (tl.load(hot_pages + page_number, mask=page_number < H, other=-1) >= 0).to(tl.int32)
    tl.store(order + tl.cumsum(leased, 0) - 1, page_number, mask=leased != 0)
    room = tl.sum(leased, 0) * PAGE
    tl.debug_barrier()
    entry = tl.arange(0, N)
    n = room * 0
    age = n
    while (n < room) & (age < n_rows):
        p = tl.load(positions + (n_rows - 1 - age).to(tl.int64) * k + entry, mask=entry < k, other=-1)
        some = p >= 0
        device_page = tl.load(latent_row + p // PAGE, mask=some, other=-1)
        host_page = tl.load(host_row + p // PAGE, mask=some, other=-1)
        if RESIDENT:
            some = some & ((device_page >= 0) | (host_page >= 0))
        else:
            some = some & (device_page < 0) & (host_page >= 0)
        at = tl.load(scratch + p, mask=some, other=-1)
        there = some & (at >= 0) & (at < HOT)
        new = some & ~(there & (tl.load(hot_positions + tl.where(there, at, 0), mask=there, other=-1) == p))
        tl.debug_barrier()
        tl.store(scratch + p, HOT + entry, mask=new)
        tl.debug_barrier()
        leads = new & (tl.load(scratch + p, mask=new, other=-1) == HOT + entry)
        one = leads.to(tl.int32)
        number = n + tl.cumsum(one, 0) - one
        taken = leads & (number < room)
        page = tl.load(order + number // PAGE, mask=taken, other=0)
        hot_row = page * PAGE + number % PAGE
        tl.debug_barrier()
        tl.store(scratch + p, hot_row, mask=taken)
        tl.store(hot_positions + hot_row, p, mask=taken)
        tl.store(hot_stamps + hot_row, tl.maximum(now - age, 0), mask=taken)
        from_device = -(device_page * PAGE + p % PAGE) - 2
        tl.store(source + number, tl.where(device_page >= 0, from_device, host_page * PAGE + p % PAGE), mask=taken)
        tl.store(target + number, tl.load(hot_pages + page, mask=taken, other=0) * PAGE + number % PAGE, mask=taken)
        tl.debug_barrier()
        n = tl.minimum(n + tl.sum(one, 0), room)
        age += 1
    tl.store(count, n)


def seed_hot(
    positions: torch.Tensor,
    slot: int | torch.Tensor,
    latent_table_row: torch.Tensor,
    host_table_row: torch.Tensor,
    hot_pages: torch.Tensor,
    hot_positions: torch.Tensor,
    hot_stamps: torch.Tensor,
    stamp: torch.Tensor,
    scratch: torch.Tensor,
    *,
    page_size: int,
    seed_resident: bool = True,
) -> Seeds:
    """Fill a slot's hot buffer with what the last tokens of its request chose, the newest token's choice first, until it is full.

    What the buffer held before is forgotten. The n-th position seeded takes the n-th leased hot row. Its stamp is that of this
    step less the age of the youngest token that chose it (0 for the last row), but at least 0, so that old choices give way first.

    Args:
        positions: int32 [W, k], contiguous; what the last W tokens of one request chose, oldest token first, ascending in a row;
            -1 for none, anywhere.
        slot: the request's row of the hot tables, an int or an int64 tensor of one element.
        latent_table_row: int32 [P], device page of each page of the request, -1 absent.
        host_table_row: int32 [P], host page, -1 for one without a finished copy.
        hot_pages: int32 [S + 1, H], device pages leased to a slot, -1 none.
        hot_positions: int32 [S + 1, H * page_size]. Row ``slot`` is written.
        hot_stamps: int32 [S + 1, H * page_size]. Row ``slot`` is written where a position is seeded.
        stamp: int32 [1], number of this step.
        scratch: int32 [>= 1, >= P * page_size], any content.
        page_size: rows a page.
        seed_resident: seed positions whose page is on the device too (for pages that will be dropped), from there.

    Positions in no page on the device and in no finished host page are passed over.
    """
    lease, width, k = hot_pages.shape[1], hot_positions.shape[1], positions.shape[1]
    copies = torch.empty((2, 1, width), dtype=torch.int32, device=positions.device)
    more = torch.empty(1 + lease, dtype=torch.int32, device=positions.device)
    seed_hot_kernel[(1,)](
        positions, positions.shape[0], k, slot, latent_table_row, host_table_row, hot_pages, hot_positions, hot_stamps, stamp, scratch,
        copies[0], copies[1], more, more[1:],
        H=lease, PAGE=page_size, RESIDENT=seed_resident, N=triton.next_power_of_2(k), PAGES=triton.next_power_of_2(lease),
        BLOCK=min(1024, triton.next_power_of_2(width)), num_warps=16 if k > 512 else 4,
    )  # fmt: skip
    return Seeds(source=copies[0], target=copies[1], count=more[:1])
