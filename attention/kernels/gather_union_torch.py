"""The rows that any token of a prefill chunk reads, gathered into a pool of their own, in plain PyTorch."""

from __future__ import annotations

import torch

from ..kv.tier import HostRows


def check_union(
    positions: torch.Tensor, latent_table_row: torch.Tensor, host_table_row: torch.Tensor, host: HostRows, pool: torch.Tensor
) -> None:
    """Refuse what ``gather_union`` cannot take, from shapes and dtypes alone.

    Raises:
        ValueError: what was found.
    """
    if pool.dtype != torch.uint8 or pool.dim() != 2 or pool.stride(1) != 1 or host.row_bytes != pool.shape[1]:
        raise ValueError(
            f"pool must be uint8 [n_rows, {host.row_bytes}] as the host rows are, found {pool.dtype} {list(pool.shape)}; view it so"
        )
    if positions.dim() != 2:
        raise ValueError(f"positions must be [T, k], found {list(positions.shape)}")
    if latent_table_row.dim() != 1 or latent_table_row.shape != host_table_row.shape:
        raise ValueError(f"the table rows must be [P], found {list(latent_table_row.shape)} and {list(host_table_row.shape)}")
    for name, tensor in (("positions", positions), ("latent_table_row", latent_table_row), ("host_table_row", host_table_row)):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32, found {tensor.dtype} with strides {tensor.stride()}")


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
    """Gather the union of the positions chosen by the tokens of one request, in ascending order of position.

    Args:
        positions: int32 [T, k], positions below ``context``; negative: none. Any order, with repetitions.
        latent_table_row: int32 [P], device page of each page of the request, -1: absent.
        host_table_row: int32 [P], host page, -1: none. A page on the device is read there.
        host: one layer's part of the host pool.
        pool: uint8 [n_rows, row_bytes], the layer's latent pool.
        page_size: rows of a page.
        context: keys of the request, at most P * page_size.

    Returns:
        A pool, uint8 [min(T * k, context), row_bytes], whose first rows are the union and whose others hold anything, and
        rows of it, int32 [T, k], where ``positions`` are; -1 where there is no position, or its page is nowhere.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_union(positions, latent_table_row, host_table_row, host, pool)
    scratch = pool.new_empty((min(positions.numel(), context), pool.shape[1]))
    rows = torch.full_like(positions, -1)
    page = (positions.clamp(min=0) // page_size).long()
    found = (positions >= 0) & ((latent_table_row[page] >= 0) | (host_table_row[page] >= 0))
    union, number = torch.unique(positions[found], return_inverse=True)
    rows[found] = number.to(torch.int32)
    page, offset = union.long() // page_size, union.long() % page_size
    near = latent_table_row[page] >= 0
    place = torch.where(near, latent_table_row[page], host_table_row[page]).long() * page_size + offset
    union_rows = scratch[: union.numel()]
    union_rows[near] = pool[place[near]]
    union_rows[~near] = host.bytes[place[~near].to(host.bytes.device), : host.row_bytes].to(pool.device)
    return scratch, rows
