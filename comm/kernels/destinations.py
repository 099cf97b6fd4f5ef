"""Where tokens go: bits of their ranks, or of the choices that are a rank's first, and how many rows that makes."""

from __future__ import annotations

import triton
import triton.language as tl

_COUNTED = tl.constexpr(128)  # tokens whose rows are counted at once


@triton.jit
def destinations(ids, token, there, active, takers, n_ranks, slots_per_rank, K: tl.constexpr, MANY: tl.constexpr):
    """int32 [N] of the tokens ``token`` [N]: bits of their ranks among ``takers``; MANY: of the choices that are a rank's first."""
    bits = token * 0
    for j in tl.static_range(K):
        chosen = tl.load(ids + token.to(tl.int64) * K + j, mask=there, other=-1).to(tl.int32)
        valid = (chosen >= 0) & (chosen < n_ranks * slots_per_rank)
        rank = tl.where(valid, chosen // slots_per_rank, 0)
        if MANY:
            first = valid & (tl.load(active + rank) != 0)
            for i in tl.static_range(j):
                before = tl.load(ids + token.to(tl.int64) * K + i, mask=there, other=-1).to(tl.int32)
                first = first & ((before < 0) | (before // slots_per_rank != rank))
            bits |= first.to(tl.int32) << j
        else:
            bits |= tl.where(valid, 1 << rank, 0)
    return bits if MANY else bits & takers


@triton.jit
def count_rows(
    ids, sent, active, program, n, takers, may, me, n_ranks, slots_per_rank,
    TOKENS: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Add the rows that this program stores for every other rank to ``sent``; while its first tokens are on their way."""
    at, lane = tl.arange(0, _COUNTED), tl.arange(0, RANKS)
    first, rows = program * 0, lane * 0
    while (program + first // TOKENS * tl.num_programs(0)) * TOKENS < n:
        token = (program + (first + at) // TOKENS * tl.num_programs(0)) * TOKENS + at % TOKENS
        bits = destinations(ids, token, token < n, active, takers, n_ranks, slots_per_rank, K, MANY)
        if MANY:
            for j in range(0, K):
                chosen = tl.load(ids + token.to(tl.int64) * K + j, mask=token < n, other=0).to(tl.int32)
                rank = tl.where(chosen >= 0, chosen // slots_per_rank, 0)
                hit = may & ((bits >> j) & 1 != 0) & (rank != me)
                tl.atomic_add(sent + rank, (at * 0 + 1).to(tl.int64), mask=hit, sem="relaxed", scope="gpu")
        else:
            for rank in range(0, n_ranks):
                rows += tl.where(lane == rank, tl.sum((bits >> rank) & 1, 0), 0)
        first += _COUNTED
    if not MANY:
        tl.atomic_add(sent + lane, rows.to(tl.int64), mask=(rows > 0) & (lane != me), sem="relaxed", scope="gpu")
