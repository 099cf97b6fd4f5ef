"""Whole pages of latent rows between device pools and host pools: one launch a layer, or one for all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..kv.tier import HostRows
from .host_address import argument
from .mirror_pages_torch import PoolPairs, check_pages, check_pools


@dataclass(frozen=True, kw_only=True)
class PagesConfig:
    """How a copy of pages is launched."""

    programs: int  # in the grid
    block: int  # words of 4 bytes (less where rows start at odd places) that a program copies at once
    warps: int  # of a program


#: mirrors run beside a step and leave it the other processors; two write at 93% of the link's bandwidth
_MIRROR = PagesConfig(programs=2, block=4096, warps=8)
#: reads wait for a round trip: 32 programs have enough on the way
_RESTORE = PagesConfig(programs=32, block=4096, warps=8)


@triton.jit(do_not_specialize=["n_pages", "n_layers"])
def copy_pages_kernel(
    source,
    target,
    source_offsets,
    target_offsets,
    source_pages,
    target_pages,
    n_pages,
    n_layers,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    SOURCE_PITCH: tl.constexpr,
    TARGET_PITCH: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYERED: tl.constexpr,
):
    """A page is PIECES pieces of PIECE adjacent bytes, at the two pitches; all are multiples of UNIT bytes. BLOCK words a turn."""
    word: tl.constexpr = min(UNIT, 4)
    kind: tl.constexpr = tl.int32 if word == 4 else tl.int16 if word == 2 else tl.int8
    parts: tl.constexpr = (PIECE * PIECES // word + BLOCK - 1) // BLOCK
    part = tl.program_id(0)
    n_parts = n_layers * n_pages * parts
    while part < n_parts:
        page = part // parts % n_pages
        at = part % parts * BLOCK + tl.arange(0, BLOCK)
        first = tl.load(source_pages + page).to(tl.int64)
        second = tl.load(target_pages + page).to(tl.int64)
        inside = (at < PIECE * PIECES // word) & (first >= 0) & (second >= 0)
        from_ = source + first * (SOURCE_PITCH * PIECES)
        to = target + second * (TARGET_PITCH * PIECES)
        if LAYERED:
            layer = part // parts // n_pages
            from_ += tl.load(source_offsets + layer) // UNIT * UNIT
            to += tl.load(target_offsets + layer) // UNIT * UNIT
        piece = at // (PIECE // word)
        within = at % (PIECE // word)
        values = tl.load(from_.to(tl.pointer_type(kind)) + (piece * (SOURCE_PITCH // word) + within), mask=inside)
        tl.store(to.to(tl.pointer_type(kind)) + (piece * (TARGET_PITCH // word) + within), values, mask=inside)
        part += tl.num_programs(0)


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One end of a copy."""

    memory: Any  # what Triton takes for the address of the first layer's rows
    pitch: int  # bytes from row to row
    pages: torch.Tensor  # int32 [n]
    offsets: torch.Tensor | None  # int64 [L], bytes to the rows of each layer; None: one layer only
    unit: int  # bytes that divide every address and width of the copy


def mirror_pages(
    pool: torch.Tensor,
    host: HostRows,
    device_pages: torch.Tensor,
    host_pages: torch.Tensor,
    *,
    page_size: int,
    config: PagesConfig | None = None,
) -> None:
    """``mirror_pages_torch.mirror_pages`` as a kernel: the same arguments, results and errors."""
    check_pools(pool, host)
    check_pages(device_pages, host_pages)
    near, far = _sides(pool, host, device_pages, host_pages)
    _copy(near, far, pool.shape[1], page_size, config or _MIRROR)


def restore_pages(
    host: HostRows,
    pool: torch.Tensor,
    host_pages: torch.Tensor,
    device_pages: torch.Tensor,
    *,
    page_size: int,
    config: PagesConfig | None = None,
) -> None:
    """``mirror_pages_torch.restore_pages`` as a kernel: the same arguments, results and errors."""
    check_pools(pool, host)
    check_pages(host_pages, device_pages)
    near, far = _sides(pool, host, device_pages, host_pages)
    _copy(far, near, pool.shape[1], page_size, config or _RESTORE)


def mirror_layers(
    pairs: PoolPairs, device_pages: torch.Tensor, host_pages: torch.Tensor, *, page_size: int, config: PagesConfig | None = None
) -> None:
    """``mirror_pages`` in every layer, in one launch."""
    check_pages(device_pages, host_pages)
    near, far = _sides(pairs.pools[0], pairs.hosts[0], device_pages, host_pages, pairs)
    _copy(near, far, pairs.pools[0].shape[1], page_size, config or _MIRROR)


def restore_layers(
    pairs: PoolPairs, host_pages: torch.Tensor, device_pages: torch.Tensor, *, page_size: int, config: PagesConfig | None = None
) -> None:
    """``restore_pages`` in every layer, in one launch."""
    check_pages(host_pages, device_pages)
    near, far = _sides(pairs.pools[0], pairs.hosts[0], device_pages, host_pages, pairs)
    _copy(far, near, pairs.pools[0].shape[1], page_size, config or _RESTORE)


def _sides(
    pool: torch.Tensor, host: HostRows, device_pages: torch.Tensor, host_pages: torch.Tensor, pairs: PoolPairs | None = None
) -> tuple[_Side, _Side]:
    """The device's end and the host's, of one layer or of all in ``pairs``."""
    near, far = (None, None) if pairs is None else (pairs.offsets[0], pairs.offsets[1])
    unit = math.gcd(16, pool.data_ptr(), host.data_ptr()) if pairs is None else pairs.unit
    unit = math.gcd(unit, pool.shape[1], pool.stride(0), host.pitch)
    return (
        _Side(memory=pool, pitch=pool.stride(0), pages=device_pages, offsets=near, unit=unit),
        _Side(memory=argument(host, pool.device), pitch=host.pitch, pages=host_pages, offsets=far, unit=unit),
    )


def _copy(source: _Side, target: _Side, row: int, page_size: int, config: PagesConfig) -> None:
    """Launch; pages without gaps are copied as one piece."""
    n_pages = source.pages.numel()
    if n_pages == 0:
        return
    whole = source.pitch == target.pitch == row
    piece, pieces, growth = (row * page_size, 1, page_size) if whole else (row, page_size, 1)
    copy_pages_kernel[(config.programs,)](
        source.memory, target.memory, source.offsets, target.offsets, source.pages, target.pages, n_pages,
        1 if source.offsets is None else source.offsets.numel(),
        PIECE=piece, PIECES=pieces, SOURCE_PITCH=source.pitch * growth, TARGET_PITCH=target.pitch * growth,
        UNIT=source.unit, BLOCK=config.block, LAYERED=source.offsets is not None, num_warps=config.warps,
    )  # fmt: skip
