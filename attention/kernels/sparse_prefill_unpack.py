"""FP8 rows dequantised once for many tokens that choose among them, instead of once a token.

Rows are taken in runs of 64. Runs that are chosen at all get a slot in a bf16 workspace, in ascending order; when there are more
than slots, the workspace stays unused and a gate, which kernels read, says so: nothing is read back by the host.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..kv.layout import n_scales
from .sparse_prefill_tile import load_latent

_RUN = 64  # rows of a slot
_CHUNK = 1024  # runs a program numbers
_MOST = 4096  # slots: 302 MB of bf16 rows


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """Rows in float, and the same choice as row numbers of them."""

    pool: torch.Tensor  # [slots * 64, C + R]
    rows: torch.Tensor  # int32, as the rows that were given
    fits: torch.Tensor | None  # int32 [1]: 1 if every chosen row is in ``pool``; None if it always is
    fails: torch.Tensor | None  # int32 [1]: the opposite


@triton.jit
def _mark(rows, flags, total, n_rows, N: tl.constexpr):
    """Flag the runs of chosen rows. Neighbours in a list are often of one run: only the first of them looks."""
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    row = tl.load(rows + at, mask=at < total, other=-1)
    before = tl.load(rows + at - 1, mask=(at > 0) & (at < total), other=-1)
    new = (row >= 0) & (row < n_rows) & ((at == 0) | (before < 0) | (before >= n_rows) | (before // 64 != row // 64))
    known = tl.load(flags + row // 64, mask=new, other=1)
    tl.store(flags + row // 64, 1, mask=new & (known == 0))


@triton.jit
def _count(flags, sums, n_runs, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(sums + tl.program_id(0), tl.sum(tl.load(flags + at, mask=at < n_runs, other=0)))


@triton.jit
def _number(flags, sums, slots, runs, gate, n_runs, n_slots, N: tl.constexpr, CHUNKS: tl.constexpr):
    """``slots`` [n_runs] of flagged runs (-1: none), ``runs`` [n_slots] of slots (-1: none), gate (fits, fails, used slots)."""
    chunk = tl.program_id(0)
    other = tl.arange(0, CHUNKS)
    counts = tl.load(sums + other, mask=other < tl.num_programs(0), other=0)
    at = chunk * N + tl.arange(0, N)
    flag = tl.load(flags + at, mask=at < n_runs, other=0)
    slot = tl.sum(tl.where(other < chunk, counts, 0)) + tl.cumsum(flag, 0) - 1
    tl.store(slots + at, tl.where(flag > 0, slot, -1), mask=at < n_runs)
    tl.store(runs + slot, at, mask=(flag > 0) & (slot < n_slots))
    if chunk == 0:
        used = tl.sum(counts)
        tl.store(gate, (used <= n_slots).to(tl.int32))
        tl.store(gate + 1, (used > n_slots).to(tl.int32))
        tl.store(gate + 2, used)


@triton.jit
def _fill(
    codes, scales, tails, runs, gate, out, n_rows, code_stride, scale_stride, tail_stride,
    C: tl.constexpr, R: tl.constexpr, TAIL: tl.constexpr, G: tl.constexpr, W: tl.constexpr, RP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N rows of a slot; a slot's last rows may lie past the pool and give zeros."""
    slot = tl.program_id(0) // (64 // N)
    if (tl.load(gate) != 0) & (slot < tl.load(gate + 2)):
        within = tl.program_id(0) % (64 // N) * N + tl.arange(0, N)
        row = tl.load(runs + slot).to(tl.int64) * 64 + within
        there = row < n_rows
        latent = load_latent(codes, scales, row, there, code_stride, scale_stride, C, G, W, N, True, out.dtype.element_ty)
        tail = tl.arange(0, RP)
        turned = tl.load(
            tails + (row * tail_stride)[:, None] + (TAIL + tail)[None, :], mask=there[:, None] & (tail < R)[None, :], other=0.0
        )
        column = tl.arange(0, G * W)
        at = out + ((slot * 64 + within).to(tl.int64) * (C + R))[:, None]
        tl.store(at + column[None, :], latent, mask=(column < C)[None, :])
        tl.store(at + (C + tail)[None, :], turned.to(out.dtype.element_ty), mask=(tail < R)[None, :])


@triton.jit
def _rename(rows, slots, renamed, total, n_rows, N: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    row = tl.load(rows + at, mask=at < total, other=-1)
    there = (row >= 0) & (row < n_rows)
    slot = tl.load(slots + row // 64, mask=there, other=0)
    tl.store(renamed + at, tl.where(there, slot * 64 + row % 64, -1), mask=at < total)


def unpack(pool: torch.Tensor, rows: torch.Tensor, latent: int, rope: int, dtype: torch.dtype) -> Unpacked:
    """The rows of an FP8 ``pool`` that ``rows`` (int32, contiguous) name, dequantised to ``dtype``."""
    device, n_rows, total = pool.device, len(pool), rows.numel()
    n_runs = max(1, triton.cdiv(n_rows, _RUN))
    n_slots = min(n_runs, _MOST)
    chunks = triton.cdiv(n_runs, _CHUNK)
    flags = torch.zeros(n_runs, dtype=torch.int32, device=device)
    sums = torch.empty(chunks, dtype=torch.int32, device=device)
    slots = torch.empty(n_runs, dtype=torch.int32, device=device)
    runs = torch.empty(n_slots, dtype=torch.int32, device=device)
    gate = torch.empty(3, dtype=torch.int32, device=device)
    out = torch.empty((n_slots * _RUN, latent + rope), dtype=dtype, device=device)
    renamed = torch.empty_like(rows)
    codes, scales, tails = pool.view(torch.float8_e4m3fn), pool.view(torch.float32), pool.view(torch.bfloat16)
    _mark[(triton.cdiv(total, 2048),)](rows, flags, total, n_rows, N=2048, num_warps=8)
    _count[(chunks,)](flags, sums, n_runs, N=_CHUNK)
    _number[(chunks,)](flags, sums, slots, runs, gate, n_runs, n_slots, N=_CHUNK, CHUNKS=max(16, triton.next_power_of_2(chunks)))
    _fill[(n_slots * _RUN // 16,)](
        codes, scales, tails, runs, gate, out, n_rows, codes.stride(0), scales.stride(0), tails.stride(0),
        C=latent, R=rope, TAIL=(latent + 4 * n_scales(latent)) // 2, G=triton.next_power_of_2(n_scales(latent)),
        W=min(128, triton.next_power_of_2(latent)), RP=max(16, triton.next_power_of_2(rope)), N=16, num_warps=4,
    )  # fmt: skip
    _rename[(triton.cdiv(total, 2048),)](rows, slots, renamed, total, n_rows, N=2048, num_warps=8)
    always = n_runs <= n_slots
    return Unpacked(pool=out, rows=renamed, fits=None if always else gate[:1], fails=None if always else gate[1:2])
