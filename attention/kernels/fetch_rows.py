"""One launch that fetches the missing latent rows of every request from the host pool, over the link, without the copy engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...parallel.kernels.overlap import early_start, enter
from ..kv.tier import HostRows
from .fetch_rows_torch import check_rows
from .host_address import argument
from .tier_most import MOST_REQUESTS

_LINE = 128  # bytes of a cache line: what one read of host memory carries at most


@dataclass(frozen=True, kw_only=True)
class FetchConfig:
    """How a fetch is launched."""

    programs: int  # in the grid
    rows: int  # a program copies at once
    warps: int  # of a program


#: every missing row of a usual step is on its way at once
_ONE = FetchConfig(programs=528, rows=1, warps=1)
#: 264 rows on the way fill the link; more of them touch more pieces of memory at a time than the device translates quickly
_SEVERAL = FetchConfig(programs=132, rows=2, warps=1)


@triton.jit
def _places(source, target, counts, ends, total, width, n, REQUESTS: tl.constexpr):
    """Source and target of the rows numbered ``n`` [ROWS]; source -1 past ``total``."""
    if REQUESTS == 1:  # their place does not depend on the count, which may still be on its way
        near = n < width
        x = tl.load(source + n, mask=near, other=-1)
        y = tl.load(target + n, mask=near, other=0)
        x = tl.where(n < total, x, -1)
    else:
        before = ends[None, :] <= n[:, None]
        request = tl.sum(before.to(tl.int32), 1)
        at = request.to(tl.int64) * width + n - tl.sum(tl.where(before, counts[None, :], 0), 1)
        x = tl.load(source + at, mask=n < total, other=-1)
        y = tl.load(target + at, mask=n < total, other=0)
    return x.to(tl.int64), y.to(tl.int64)


@triton.jit(do_not_specialize=["requests", "width"])
def fetch_rows_kernel(
    host,
    device,
    pool,
    source,
    target,
    count,
    requests,
    width,
    ROW: tl.constexpr,
    HOST_PITCH: tl.constexpr,
    DEVICE_PITCH: tl.constexpr,
    POOL_PITCH: tl.constexpr,
    UNIT: tl.constexpr,
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ROWS rows of ROW bytes a turn. Pitches and bases are multiples of UNIT bytes, which divides LINE; BLOCK >= ROW + LINE - UNIT.

    The rows of all requests are numbered through by the running sum of ``count``, so that programs have equal shares
    whoever misses. A row is read by whole lines of host memory: a line that two instructions share crosses the link twice.
    """
    enter(EARLY)
    word: tl.constexpr = min(UNIT, 4)
    kind: tl.constexpr = tl.int32 if word == 4 else tl.int16 if word == 2 else tl.int8
    column = tl.arange(0, BLOCK // word)[None, :]
    unit = column // (UNIT // word)
    if REQUESTS == 1:
        counts = tl.load(count)
        ends = counts
        total = counts
    else:
        r = tl.arange(0, REQUESTS)
        counts = tl.load(count + r, mask=r < requests, other=0)
        ends = tl.cumsum(counts, 0)
        total = tl.sum(counts, 0)
    first = tl.program_id(0) * ROWS
    x, y = _places(source, target, counts, ends, total, width, first + tl.arange(0, ROWS), REQUESTS)
    while first < total:
        first += tl.num_programs(0) * ROWS
        next_x, next_y = _places(source, target, counts, ends, total, width, first + tl.arange(0, ROWS), REQUESTS)
        begin = tl.where(x >= 0, host + x * HOST_PITCH, device - (x + 2) * DEVICE_PITCH)
        lead = (begin.to(tl.int64).to(tl.int32) & (LINE - 1)) // UNIT
        inside = (x != -1)[:, None] & (unit >= lead[:, None]) & (unit < lead[:, None] + ROW // UNIT)
        line = (begin - lead * UNIT).to(tl.pointer_type(kind))
        to = (pool + (y * POOL_PITCH - lead * UNIT)).to(tl.pointer_type(kind))
        values = tl.load(line[:, None] + column, mask=inside)
        tl.store(to[:, None] + column, values, mask=inside)
        x = next_x
        y = next_y


def fetch_rows(
    host: HostRows,
    pool: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    count: torch.Tensor,
    *,
    config: FetchConfig | None = None,
) -> None:
    """``fetch_rows_torch.fetch_rows`` as a kernel: the same arguments, results and errors.

    The grid is the same whatever the counts are, so a call can be captured in a CUDA graph. ``config`` overrides how it is
    launched.
    """
    check_rows(host, pool, source, target, count)
    copy_rows(host, pool, pool, source, target, count, config=config)


def copy_rows(
    host: HostRows,
    device: torch.Tensor,
    pool: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    count: torch.Tensor,
    *,
    config: FetchConfig | None = None,
) -> None:
    """``fetch_rows`` with a pool of its own, ``device``, for the sources on the device."""
    requests, width = source.shape
    if source.numel() == 0:
        return
    if requests > MOST_REQUESTS:
        raise ValueError(f"a fetch serves at most {MOST_REQUESTS} requests, found {requests}; split the batch")
    row = pool.shape[1]
    config = config or (_ONE if requests == 1 else _SEVERAL)
    unit = math.gcd(16, row, host.pitch, pool.stride(0), device.stride(0), host.data_ptr(), pool.data_ptr(), device.data_ptr())
    fetch_rows_kernel[(config.programs,)](
        argument(host, pool.device), device, pool, source, target, count, requests, width,
        ROW=row, HOST_PITCH=host.pitch, DEVICE_PITCH=device.stride(0), POOL_PITCH=pool.stride(0), UNIT=unit, LINE=_LINE,
        BLOCK=triton.next_power_of_2(row + _LINE - unit), REQUESTS=triton.next_power_of_2(requests),
        ROWS=config.rows, num_warps=config.warps, **early_start(pool.device),
    )  # fmt: skip
