"""What a captured decode step reads: one block of int64 values, filled on the host and sent in one copy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .plan import I64, StepPlan
from .sampling.sample_rows import SampleRows

_HEAD = 2  # values before the columns: rows that exist, and one that keeps the columns aligned
_COLUMNS = ("slots", "starts", "page_at", "page", "random", "penalised")


def block_size(batch: int) -> int:
    """Values of the block of ``batch`` rows."""
    return _HEAD + len(_COLUMNS) * batch


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

    @classmethod
    def views(cls, block: torch.Tensor, batch: int) -> StepInputs:
        """Views of the int64 ``block``, which ``pack`` fills."""
        columns = block[_HEAD : block_size(batch)].view(len(_COLUMNS), batch)
        found = dict(zip(_COLUMNS, columns.unbind(0), strict=True))
        # The low half of the first value: little-endian, as CUDA is.
        return cls(n_valid=block[:1].view(torch.int32)[:1], **found)


@dataclass(frozen=True, kw_only=True)
class InputLayout:
    """What padding points at."""

    spare_slot: int  # a row of the tables that no request has
    table_width: int  # pages of a row of the page table
    dummy_page: int  # the page that padding writes

    def fits(self, plan: StepPlan, batch: int) -> bool:
        """Whether the pages that ``plan`` assigns have room in the block; otherwise they are assigned before."""
        return len(plan.pages) <= batch and not len(plan.new_ints)

    def pack(self, block: I64, plan: StepPlan, rows: SampleRows | None, batch: int) -> None:
        """Write the step of pure decode rows ``plan`` into the block [>= block_size(batch)]; what no row needs is left as it is."""
        n = plan.n_rows
        block[0] = n
        slots, starts, page_at, page, random, penalised = block[_HEAD : block_size(batch)].reshape(len(_COLUMNS), batch)
        slots[:n], slots[n:] = plan.slots, self.spare_slot
        starts[:n], starts[n:] = plan.starts, 0
        p = len(plan.pages) if self.fits(plan, batch) else 0
        page_at[p:], page[p:] = self.spare_slot * self.table_width, self.dummy_page
        if p:
            page_at[:p] = plan.pages[:, 0].astype(np.int64) * self.table_width + plan.pages[:, 1]
            page[:p] = plan.pages[:, 2]
        if rows is not None:
            random[: len(rows.random)] = rows.random
            penalised[: len(rows.penalised)] = rows.penalised
