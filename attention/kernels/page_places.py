"""Where the pages of a step's requests are, in one launch: it runs once a step, for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .page_places_torch import PagePlaces

_BLOCK = 1024  # pages of a program


@triton.jit(do_not_specialize=["width"])
def page_places_kernel(
    device_page, host_page, moving, page_table, table_stride, slots, positions, latent_table, host_table, moved, write_rows, width,
    PAGE: tl.constexpr, EVERYWHERE: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R, pages / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    logical = tl.load(page_table + row * table_stride + at, mask=there, other=0)
    latent = tl.load(device_page + logical, mask=there, other=-1)
    tl.store(latent_table + row * width + at, latent, mask=there)
    if EVERYWHERE:
        host = tl.load(host_page + logical, mask=there, other=-1)
        tl.store(host_table + row * width + at, host, mask=there)
        if tl.program_id(1) == 0:
            tl.store(moved + row, tl.load(moving + tl.load(slots + row)))
    if WRITES:
        position = tl.load(positions + row)
        rows = latent.to(tl.int64) * PAGE + position % PAGE
        tl.store(write_rows + row + tl.zeros((BLOCK,), tl.int32), rows, mask=there & (at == position // PAGE))


def page_places(
    device_page: torch.Tensor,
    host_page: torch.Tensor,
    moving: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None,
    *,
    page_size: int,
    everywhere: bool,
) -> PagePlaces:
    """``page_places_torch.page_places`` as one kernel: the same arguments and results."""
    requests, width = page_table.shape
    if page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    tables = torch.empty((1 + everywhere, requests, width), dtype=torch.int32, device=page_table.device)
    moved = torch.empty(requests if everywhere else 0, dtype=torch.int8, device=page_table.device)
    rows = None if positions is None else torch.empty(requests, dtype=torch.int64, device=page_table.device)
    if requests and width:
        page_places_kernel[(requests, triton.cdiv(width, _BLOCK))](
            device_page, host_page, moving, page_table, page_table.stride(0), slots, positions, tables[0], tables[-1], moved, rows, width,
            PAGE=page_size, EVERYWHERE=everywhere, WRITES=positions is not None, BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        )  # fmt: skip
    return PagePlaces(tables[0], tables[1] if everywhere else None, moved if everywhere else None, rows)
