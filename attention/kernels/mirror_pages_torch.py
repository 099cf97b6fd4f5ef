"""Whole pages of latent rows between device pools and host pools, in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..kv.tier import HostRows


@dataclass(frozen=True, kw_only=True)
class PoolPairs:
    """Both pools of every layer of a rank, for copies of a page in all layers at once. Made by ``pool_pairs``."""

    pools: tuple[torch.Tensor, ...]  # uint8 [n_rows, row_bytes], views of the layers' latent pools
    hosts: tuple[HostRows, ...]  # the layers' parts of the host pool
    offsets: torch.Tensor  # int64 [2, L] on the pools' device: bytes from the first layer's pool and host rows to a layer's
    unit: int  # largest power of two up to 16 that divides all addresses


def pool_pairs(pools: Sequence[torch.Tensor], hosts: Sequence[HostRows]) -> PoolPairs:
    """Pair the pools of all layers.

    Raises:
        ValueError: no layer, not as many hosts as pools, or layers that differ in row bytes, pitch or dtype.
    """
    if not pools or len(pools) != len(hosts):
        raise ValueError(f"each layer needs a device pool and host rows, found {len(pools)} and {len(hosts)}")
    for pool, host in zip(pools, hosts, strict=True):
        check_pools(pool, host)
    shapes = {(pool.shape[1], pool.stride(0), host.pitch, pool.device) for pool, host in zip(pools, hosts, strict=True)}
    if len(shapes) > 1:
        raise ValueError(f"layers must agree in row bytes, pitches and device, found {sorted(map(str, shapes))}; copy them one by one")
    offsets = [[pool.data_ptr() - pools[0].data_ptr() for pool in pools], [host.data_ptr() - hosts[0].data_ptr() for host in hosts]]
    return PoolPairs(
        pools=tuple(pools),
        hosts=tuple(hosts),
        offsets=torch.tensor(offsets, dtype=torch.int64).to(pools[0].device),
        unit=math.gcd(16, *(pool.data_ptr() for pool in pools), *(host.data_ptr() for host in hosts)),
    )


def check_pools(pool: torch.Tensor, host: HostRows) -> None:
    """Refuse pools whose rows are not the same bytes.

    Raises:
        ValueError: what was found.
    """
    if pool.dtype != torch.uint8 or pool.dim() != 2 or pool.stride(1) != 1:
        raise ValueError(f"pool must be uint8 [n_rows, row_bytes] with adjacent bytes, found {pool.dtype} {list(pool.shape)}; view it so")
    if host.row_bytes != pool.shape[1]:
        raise ValueError(f"host rows hold {host.row_bytes} bytes and device rows {pool.shape[1]}; both pools need one row layout")


def check_pages(first: torch.Tensor, second: torch.Tensor) -> None:
    """Refuse page lists that are not alike.

    Raises:
        ValueError: what was found.
    """
    if first.shape != second.shape or first.dim() != 1:
        raise ValueError(f"the two page lists must be [n], found {list(first.shape)} and {list(second.shape)}")
    for pages in (first, second):
        if pages.dtype != torch.int32 or not pages.is_contiguous():
            raise ValueError(f"page lists must be contiguous int32, found {pages.dtype} with strides {pages.stride()}")


def mirror_pages(pool: torch.Tensor, host: HostRows, device_pages: torch.Tensor, host_pages: torch.Tensor, *, page_size: int) -> None:
    """Copy whole pages of one layer from the device to the host.

    Args:
        pool: uint8 [n_rows, row_bytes], the layer's latent pool.
        host: the layer's part of the host pool, written in place; the gap behind a row is left alone.
        device_pages: int32 [n]; a pair with a negative page is passed over.
        host_pages: int32 [n], where each goes; each once.
        page_size: rows of a page.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_pools(pool, host)
    check_pages(device_pages, host_pages)
    rows, places = _rows(device_pages, host_pages, page_size)
    host.bytes[places.to(host.bytes.device), : host.row_bytes] = pool[rows].to(host.bytes.device)


def restore_pages(host: HostRows, pool: torch.Tensor, host_pages: torch.Tensor, device_pages: torch.Tensor, *, page_size: int) -> None:
    """``mirror_pages`` the other way: whole pages of one layer from the host to the device."""
    check_pools(pool, host)
    check_pages(host_pages, device_pages)
    rows, places = _rows(device_pages, host_pages, page_size)
    pool[rows] = host.bytes[places.to(host.bytes.device), : host.row_bytes].to(pool.device)


def mirror_layers(pairs: PoolPairs, device_pages: torch.Tensor, host_pages: torch.Tensor, *, page_size: int) -> None:
    """``mirror_pages`` in every layer."""
    for pool, host in zip(pairs.pools, pairs.hosts, strict=True):
        mirror_pages(pool, host, device_pages, host_pages, page_size=page_size)


def restore_layers(pairs: PoolPairs, host_pages: torch.Tensor, device_pages: torch.Tensor, *, page_size: int) -> None:
    """``restore_pages`` in every layer."""
    for pool, host in zip(pairs.pools, pairs.hosts, strict=True):
        restore_pages(host, pool, host_pages, device_pages, page_size=page_size)


def _rows(device_pages: torch.Tensor, host_pages: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the device pool and of the host pool, int64 [n * page_size] each."""
    live = (device_pages >= 0) & (host_pages >= 0)
    offset = torch.arange(page_size, device=device_pages.device)
    device, host = ((pages[live].long()[:, None] * page_size + offset).flatten() for pages in (device_pages, host_pages))
    return device, host
