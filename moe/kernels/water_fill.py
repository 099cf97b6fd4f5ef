"""Water filling on the device (``moe/eplb/choice/water.py``): a program a layer splits its experts' tokens over their replicas.

The experts of a row have no rank in common and fill these at once, in registers: a tile of ROW experts x ranks. The level of an
expert is found from below the number of ranks that it reaches: over all its ranks first, then without those that stand higher
than that, until none does (Michelot's projection, 1986). What an expert put where is kept in the output; every thread reads what
it wrote itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .water_fill_torch import ROW, DeviceSeats


@triton.jit
def fill_kernel(
    counts, slot, expert, single, n_rows, x, sweeps,
    E: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (layers). RANKS is R rounded up to a power of two; CHUNK lone experts are counted at a time."""
    layer = tl.program_id(0).to(tl.int64)
    r, g = tl.arange(0, RANKS), tl.arange(0, ROWS)
    loads = tl.zeros((RANKS,), tl.float32)
    for first in range(0, E, CHUNK):
        e = first + tl.arange(0, CHUNK)
        rank = tl.load(single + layer * E + e, mask=e < E, other=-1)
        tokens = tl.load(counts + layer * E + e, mask=e < E, other=0).to(tl.float32)
        loads += tl.sum(tl.where(rank[:, None] == r[None, :], tokens[:, None], 0.0), 0)
    rows = tl.load(n_rows + layer)
    at = g[:, None] * R + r[None, :]
    inside = (r < R)[None, :]
    for turn in range(sweeps + 1):  # the first deals evenly
        for row in range(rows):
            base = (layer * C + row) * ROWS
            there = tl.load(slot + base * R + at, mask=inside, other=-1) >= 0
            name = tl.load(expert + base + g)
            tokens = tl.load(counts + layer * E + name, mask=name >= 0, other=0).to(tl.float32)
            if turn == 0:
                found = tl.sum(there.to(tl.float32), 1)
                new = tl.where(there, (tokens / tl.maximum(found, 1.0))[:, None], 0.0)
                loads += tl.sum(new, 0)
            else:
                old = tl.load(x + base * R + at, mask=inside, other=0.0)
                others = loads[None, :] - old
                reached = there
                level = tl.zeros((ROWS,), tl.float32)
                more = 1
                while more > 0:
                    n = tl.sum(reached.to(tl.float32), 1)
                    level = (tl.sum(tl.where(reached, others, 0.0), 1) + tokens) / tl.maximum(n, 1.0)
                    below = reached & (others < level[:, None])
                    # With tokens, the lowest rank stays; without, nobody need be reached.
                    more = tl.sum(tl.where(tokens > 0, tl.sum((reached & ~below).to(tl.int32), 1), 0), 0)
                    reached = tl.where((tokens > 0)[:, None], below, reached)
                new = tl.where(reached & (tokens > 0)[:, None], tl.maximum(level[:, None] - others, 0.0), 0.0)
                loads += tl.sum(new - old, 0)
            tl.store(x + base * R + at, new, mask=inside)


@triton.jit
def ways_kernel(x, slot, expert, table, phase, E: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
                RANKS: tl.constexpr, WAYS: tl.constexpr, WAYS_BLOCK: tl.constexpr):  # fmt: skip
    """Grid (layers * C * ROWS): an expert's ways."""
    program = tl.program_id(0).to(tl.int64)
    name = tl.load(expert + program)
    if name < 0:
        return
    r, w = tl.arange(0, RANKS), tl.arange(0, WAYS_BLOCK)
    there = tl.load(slot + program * R + r, mask=r < R, other=-1) >= 0
    part = tl.load(x + program * R + r, mask=r < R, other=0.0)
    part = tl.where(tl.sum(part, 0) > 0, part, there.to(tl.float32))
    stop = tl.cumsum(part / tl.sum(part, 0), 0)
    place = (w.to(tl.float32) + phase) / WAYS
    rank = tl.sum(((stop[None, :] <= place[:, None]) & (r < R)[None, :]).to(tl.int32), 1)
    rank = tl.minimum(rank, tl.max(tl.where(there, r, 0), 0))
    chosen = tl.load(slot + program * R + rank)
    layer = program // (C * ROWS)
    tl.store(table + (layer * E + name) * WAYS + w, chosen, mask=w < WAYS)


def fill_ranks(counts: torch.Tensor, seats: DeviceSeats, *, n_ranks: int, sweeps: int = 16) -> torch.Tensor:
    """See ``water_fill_torch.fill_ranks``; no host sync. What rows that are not in use hold is left to chance."""
    layers, depth = seats.expert.shape[:2]
    x = torch.empty((layers, depth, ROW, n_ranks), dtype=torch.float32, device=counts.device)
    ranks = triton.next_power_of_2(n_ranks)
    fill_kernel[(layers,)](
        counts, seats.slot, seats.expert, seats.single, seats.n_rows, x, sweeps, E=counts.shape[1], R=n_ranks, C=depth, ROWS=ROW,
        RANKS=ranks, CHUNK=max(1, min(32, 4096 // ranks)), num_warps=1 if ranks <= 64 else 2 if ranks <= 128 else 4,
    )  # fmt: skip
    return x


def write_ways(x: torch.Tensor, seats: DeviceSeats, table: torch.Tensor, *, phase: float = 0.0) -> None:
    """See ``water_fill_torch.write_ways``; no host sync."""
    layers, depth, _, n_ranks = x.shape
    ways_kernel[(layers * depth * ROW,)](
        x, seats.slot, seats.expert, table, phase, E=table.shape[1], R=n_ranks, C=depth, ROWS=ROW,
        RANKS=triton.next_power_of_2(n_ranks), WAYS=table.shape[2], WAYS_BLOCK=triton.next_power_of_2(table.shape[2]), num_warps=1,
    )  # fmt: skip
