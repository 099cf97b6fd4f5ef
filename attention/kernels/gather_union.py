"""The rows that any token of a prefill chunk reads, gathered into a pool of their own, without waiting for their number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kv.tier import HostRows
from .fetch_rows import FetchConfig, copy_rows
from .gather_union_torch import check_union

_BLOCK = 1024  # positions of a program
_COPY = FetchConfig(programs=264, rows=1, warps=1)  # thousands of rows: enough of them on the way to fill the link


@triton.jit(do_not_specialize=["n", "context"])
def mark_kernel(positions, latent_table, host_table, flags, n, context, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """flags[p] = 1 for every chosen position that is somewhere."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(positions + at, mask=at < n, other=-1)
    chosen = (p >= 0) & (p < context)
    page = p // PAGE
    near = tl.load(latent_table + page, mask=chosen, other=-1)
    far = tl.load(host_table + page, mask=chosen, other=-1)
    tl.store(flags + p, 1, mask=chosen & ((near >= 0) | (far >= 0)))


@triton.jit(do_not_specialize=["context"])
def list_kernel(flags, ends, latent_table, host_table, source, target, context, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The marked positions as the source and target rows of a copy; ``ends`` is the running sum of ``flags``."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    marked = tl.load(flags + p, mask=p < context, other=0) > 0
    number = tl.load(ends + p, mask=marked, other=1) - 1
    near = tl.load(latent_table + p // PAGE, mask=marked, other=-1)
    far = tl.load(host_table + p // PAGE, mask=marked, other=-1)
    row = tl.where(near >= 0, -(near * PAGE + p % PAGE + 2), far * PAGE + p % PAGE)
    tl.store(source + number, row, mask=marked)
    tl.store(target + number, number, mask=marked)


@triton.jit(do_not_specialize=["n", "context"])
def number_kernel(positions, flags, ends, rows, n, context, BLOCK: tl.constexpr):
    """The place of every chosen position among the marked ones."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(positions + at, mask=at < n, other=-1)
    chosen = (p >= 0) & (p < context)
    marked = tl.load(flags + p, mask=chosen, other=0) > 0
    number = tl.load(ends + p, mask=marked, other=0) - 1
    tl.store(rows + at, tl.where(marked, number, -1), mask=at < n)


def gather_union(
    positions: torch.Tensor,
    latent_table_row: torch.Tensor,
    host_table_row: torch.Tensor,
    host: HostRows,
    pool: torch.Tensor,
    *,
    page_size: int,
    context: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``gather_union_torch.gather_union`` as kernels: the same arguments, results and errors; the host does not wait."""
    check_union(positions, latent_table_row, host_table_row, host, pool)
    n, bound = positions.numel(), min(positions.numel(), context)
    scratch, rows = pool.new_empty((bound, pool.shape[1])), torch.empty_like(positions)
    if n == 0:
        return scratch, rows
    flags = torch.zeros(max(context, 1), dtype=torch.int32, device=positions.device)
    tables = (latent_table_row, host_table_row)
    mark_kernel[(triton.cdiv(n, _BLOCK),)](positions, *tables, flags, n, context, PAGE=page_size, BLOCK=_BLOCK)
    ends = torch.cumsum(flags, 0, dtype=torch.int32)
    if bound:
        source, target = torch.empty((2, 1, bound), dtype=torch.int32, device=positions.device)
        blocks = triton.cdiv(context, _BLOCK)
        list_kernel[(blocks,)](flags, ends, *tables, source, target, context, PAGE=page_size, BLOCK=_BLOCK)
        copy_rows(host, pool, scratch, source, target, ends[-1:], config=_COPY)
    number_kernel[(triton.cdiv(n, _BLOCK),)](positions, flags, ends, rows, n, context, BLOCK=_BLOCK)
    return scratch, rows
