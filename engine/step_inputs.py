"""What a captured decode step reads: one block of int64 values, filled on the host and sent in one copy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..attention.kv.tier import NOWHERE
from .offload.tier_places import TierPlaces
from .plan import I64, StepPlan
from .sampling.sample_rows import SampleRows

_HEAD = 2  # values before the columns: rows that exist, and one that keeps the columns aligned
_COLUMNS = ("slots", "starts", "page_at", "page", "random", "penalised")
_MOVES = ("place_at", "place", "moving_at", "moving")  # columns of their own length, with offloading


def block_size(batch: int, moves: int = 0) -> int:
    """Values of the block of ``batch`` rows and ``moves`` changes of each kind of tier table."""
    return _HEAD + len(_COLUMNS) * batch + len(_MOVES) * moves


def move_room(batch: int) -> int:
    """Changes of each kind of tier table that the block of ``batch`` rows has room for: more than its rows bring about."""
    return batch + 16


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """Views of the block on the device, each of ``batch`` rows. Rows past ``n_valid`` are padding."""

    n_valid: torch.Tensor  # [1] int32, rows that exist
    slots: torch.Tensor  # [B] int64, request slot of every row; padding has the spare slot
    starts: torch.Tensor  # [B] int64, position of the token that is computed; padding has 0
    page_at: torch.Tensor  # [B] int64, places in the flat page table that get a page before the step
    page: torch.Tensor  # [B] int64, those pages
    random: torch.Tensor  # [B] int64, rows that draw; for sampling after the graph
    penalised: torch.Tensor  # [B] int64, rows with penalties; for sampling after the graph
    place_at: torch.Tensor  # [M] int64, places in the flat tier tables that change before the step; M is 0 without offloading
    place: torch.Tensor  # [M] int64, what they become
    moving_at: torch.Tensor  # [M] int64, slots whose flag changes
    moving: torch.Tensor  # [M] int64, what it becomes

    @classmethod
    def views(cls, block: torch.Tensor, batch: int, moves: int = 0) -> StepInputs:
        """Views of the int64 ``block``, which ``pack`` fills."""
        columns = block[_HEAD : block_size(batch)].view(len(_COLUMNS), batch)
        found = dict(zip(_COLUMNS, columns.unbind(0), strict=True))
        changes = block[block_size(batch) : block_size(batch, moves)].view(len(_MOVES), moves)
        found |= dict(zip(_MOVES, changes.unbind(0), strict=True))
        # The low half of the first value: little-endian, as CUDA is.
        return cls(n_valid=block[:1].view(torch.int32)[:1], **found)


@dataclass(frozen=True, kw_only=True)
class InputLayout:
    """What padding points at."""

    spare_slot: int  # a row of the tables that no request has
    table_width: int  # pages of a row of the page table
    dummy_page: int  # the page that padding writes
    places: TierPlaces | None = None  # with offloading

    def moves(self, batch: int) -> int:
        """Changes of each kind of tier table that the block has room for."""
        return 0 if self.places is None else move_room(batch)

    def fits(self, plan: StepPlan, batch: int) -> bool:
        """Whether the pages and moves of ``plan`` have room in the block; otherwise all of them are applied before."""
        if len(plan.pages) > batch or len(plan.new_ints) or len(plan.hot_pages):
            return False
        return max(len(plan.device_pages) + len(plan.host_pages), len(plan.moving)) <= self.moves(batch)

    def pack(self, block: I64, plan: StepPlan, rows: SampleRows | None, batch: int) -> None:
        """Write the step of pure decode rows ``plan`` into the block [>= block_size(batch)]; what no row needs is left as it is."""
        n = plan.n_rows
        block[0] = n
        slots, starts, page_at, page, random, penalised = block[_HEAD : block_size(batch)].reshape(len(_COLUMNS), batch)
        slots[:n], slots[n:] = plan.slots, self.spare_slot
        starts[:n], starts[n:] = plan.starts, 0
        fits = self.fits(plan, batch)
        p = len(plan.pages) if fits else 0
        page_at[p:], page[p:] = self.spare_slot * self.table_width, self.dummy_page
        if p:
            page_at[:p] = plan.pages[:, 0].astype(np.int64) * self.table_width + plan.pages[:, 1]
            page[:p] = plan.pages[:, 2]
        if self.places is not None:
            self._pack_moves(block, plan if fits else StepPlan(step=plan.step), batch, self.places)
        if rows is not None:
            random[: len(rows.random)] = rows.random
            penalised[: len(rows.penalised)] = rows.penalised

    def _pack_moves(self, block: I64, plan: StepPlan, batch: int, places: TierPlaces) -> None:
        moves = self.moves(batch)
        changes = block[block_size(batch) : block_size(batch, moves)].reshape(len(_MOVES), moves)
        changes[0], changes[1], changes[2], changes[3] = places.idle_place, NOWHERE, places.spare_slot, 0
        if plan.n_moves:
            at, values = places.changes(plan)
            changes[0, : len(at)], changes[1, : len(at)] = at, values
            m = len(plan.moving)
            changes[2, :m], changes[3, :m] = plan.moving[:, 0], plan.moving[:, 1]
