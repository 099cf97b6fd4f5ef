"""What ``step_edges`` computes, in plain PyTorch: the two ends of a decode step, around the model."""

from __future__ import annotations

from typing import NamedTuple

import torch


class StepEntry(NamedTuple):
    """What the model needs of a decode step of B rows."""

    ids: torch.Tensor  # [B] int64, token at every row's position
    page_table: torch.Tensor  # [B, used] int32, pages of every row
    write_rows: torch.Tensor  # [B] int64, cache row of every row's position
    ends: torch.Tensor  # [B] int64, position + 1
    limit: torch.Tensor  # [B] int32, the same


def enter_step(
    slots: torch.Tensor,
    starts: torch.Tensor,
    page_at: torch.Tensor,
    page: torch.Tensor,
    tokens: torch.Tensor,
    pages: torch.Tensor,
    *,
    page_size: int,
    used: int,
) -> StepEntry:
    """Assign new pages, then look up what the rows of a decode step read.

    Args:
        slots: [B] int64, row of the tables of every row.
        starts: [B] int64, its position, below ``used * page_size``.
        page_at: [B] int64, places in the flat ``pages`` that change before anything is read; one may come several times, with
            one value.
        page: [B] int64, what they change to.
        tokens: [S, L] int32, token table.
        pages: [S, P] int32, page table; changed in place.
        page_size: rows a page.
        used: pages of a row that are looked up, at most P.
    """
    pages.view(-1).scatter_(0, page_at, page.int())
    table = pages[:, :used].index_select(0, slots)
    first = table.gather(1, (starts // page_size).unsqueeze(1)).squeeze(1).long()
    ends = starts + 1
    return StepEntry(tokens[slots, starts].long(), table, first * page_size + starts % page_size, ends, ends.int())


def put_places(
    at: torch.Tensor,
    values: torch.Tensor,
    moving_at: torch.Tensor,
    moving: torch.Tensor,
    flat: torch.Tensor,
    flags: torch.Tensor,
    stamp: torch.Tensor,
    *,
    advance: bool,
) -> None:
    """Change the tables of pages, in place.

    Args:
        at: [M] int64, places in ``flat`` that change; one may come several times, with one value.
        values: [M] int64, what they become.
        moving_at: [M] int64, places in ``flags`` that change.
        moving: [M] int64, 0 or 1.
        flat: int32 [n].
        flags: int8 [S].
        stamp: int32 [1], rises by one if ``advance``.
    """
    flat.scatter_(0, at, values.int())
    flags.scatter_(0, moving_at, moving.to(torch.int8))
    if advance:
        stamp += 1


def fetch_inputs(lanes: torch.Tensor, counter: torch.Tensor, block: torch.Tensor) -> None:
    """Fill ``block`` [n] int64 from the beginning of a row of ``lanes`` [K, >= n] int64, pinned: row ``counter`` [1] modulo K."""
    block.copy_(lanes[int(counter) % len(lanes), : len(block)])


def leave_step(
    found: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, tokens: torch.Tensor, lanes: torch.Tensor, counter: torch.Tensor
) -> None:
    """Write the sampled tokens ``found`` [B] int64 into the token table, after the rows' positions, and into their lane.

    ``tokens`` [S, L] int32; ``slots`` and ``starts`` as in ``enter_step``; ``lanes`` [K, >= B] int64, pinned, of which row
    ``counter`` [1] modulo K takes the tokens. ``counter`` rises by one.
    """
    tokens[slots, starts + 1] = found.int()
    lanes[int(counter) % len(lanes), : len(found)] = found
    counter += 1
