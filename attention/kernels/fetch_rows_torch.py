"""Copies of chosen latent rows into the hot rows of the device pool, in plain PyTorch."""

from __future__ import annotations

import torch

from ..kv.tier import HostRows


def check_rows(host: HostRows, pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor, count: torch.Tensor) -> None:
    """Refuse what ``fetch_rows`` cannot take, from shapes and dtypes alone.

    Raises:
        ValueError: a shape or dtype is wrong, or host and device rows differ in width.
    """
    if pool.dtype != torch.uint8 or pool.dim() != 2 or pool.stride(1) != 1:
        raise ValueError(f"pool must be uint8 [n_rows, row_bytes] with adjacent bytes, found {pool.dtype} {list(pool.shape)}; view it so")
    if host.row_bytes != pool.shape[1]:
        raise ValueError(f"host rows hold {host.row_bytes} bytes and device rows {pool.shape[1]}; both pools need one row layout")
    if source.shape != target.shape or source.dim() != 2 or count.shape != source.shape[:1]:
        raise ValueError(
            "source and target must be [R, n] and count [R], "
            f"found {list(source.shape)}, {list(target.shape)} and {list(count.shape)}; allocate them together"
        )
    for name, tensor in (("source", source), ("target", target), ("count", count)):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32, found {tensor.dtype} with strides {tensor.stride()}")


def copy_rows(
    host: HostRows, device: torch.Tensor, pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor, count: torch.Tensor
) -> None:
    """``fetch_rows`` with a pool of its own, ``device``, for the sources on the device."""
    live = torch.arange(source.shape[1], device=source.device) < count[:, None]
    source, target = source[live].long(), target[live].long()
    far, near = source >= 0, source <= -2
    pool[target[near]] = device[-(source[near] + 2)]
    pool[target[far]] = host.bytes[source[far].to(host.bytes.device), : host.row_bytes].to(pool.device)


def fetch_rows(host: HostRows, pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor, count: torch.Tensor) -> None:
    """Copy the rows that a step misses into the device pool.

    Args:
        host: one layer's part of the host pool.
        pool: uint8 [n_rows, row_bytes], the layer's latent pool, written in place.
        source: int32 [R, n]; a row of the host pool if >= 0, row ``-(x + 2)`` of ``pool`` if <= -2, nothing to copy if -1. A
            row of the pool that is read is not also written.
        target: int32 [R, n], rows of ``pool``, each named once.
        count: int32 [R], leading entries of each request that count; those behind may hold anything.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_rows(host, pool, source, target, count)
    copy_rows(host, pool, pool, source, target, count)
