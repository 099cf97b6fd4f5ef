"""One exchange of rows between the ranks of a group, and the way back.

A row goes once to every rank that one of its choices names. Counts travel first, then all rows in one all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..parallel.group import Group, Pending
from .order import positions


@dataclass(kw_only=True)
class HopTicket:
    """Rows on their way, and what is needed to bring results back."""

    pending: Pending  # gives the arrived rows [M, row_bytes], by source rank, then in the source's order
    sent_rows: list[int]  # rows sent to each rank
    came_rows: list[int]  # rows that came from each rank
    sent_choices: list[int]  # choices that those rows were sent for
    came_choices: list[int]  # the same, of rows that came
    row_index: torch.Tensor  # [n, size] place of row i among those sent, for each rank; -1 if it did not go there
    targets: torch.Tensor  # [n, k] rank of every choice, -1 for none

    def choice_index(self) -> torch.Tensor:
        """[n, k] place of every choice among the results that come back one by one, -1 for none."""
        return positions(self.targets.reshape(-1), len(self.sent_rows))[1].view(self.targets.shape)


class Hop:
    """Exchanges over ``group``; ``sent`` counts the bytes that left for each rank (its own entry stays 0)."""

    def __init__(self, group: Group, sent: list[int]) -> None:
        self.group = group
        self.sent = sent

    def send(self, rows: torch.Tensor, targets: torch.Tensor) -> HopTicket:
        """rows uint8 [n, row_bytes]; targets [n, k] int64 rank of every choice, -1 for none. Waits only for counts."""
        n, size = rows.shape[0], self.group.size
        mask = torch.zeros((size + 1, n), dtype=torch.bool, device=rows.device)
        bins = torch.where(targets < 0, size, targets)
        mask.scatter_(0, bins.t(), True)
        mask = mask[:size]
        flat_bins = bins.reshape(-1)
        choices = torch.zeros(size + 1, dtype=torch.int64, device=rows.device).scatter_add_(0, flat_bins, torch.ones_like(flat_bins))
        header = torch.stack([mask.sum(dim=1), choices[:size]], dim=1)
        ones = [1] * size
        answer = self.group.all_to_all(header, ones, ones)
        sent_rows, sent_choices, came_rows, came_choices = torch.cat([header, answer], dim=1).t().tolist()
        flat = mask.reshape(-1)
        row_index = torch.where(mask, (flat.cumsum(0) - 1).view(size, n), -1).t()
        chosen = flat.nonzero().view(-1) % n if n else flat.nonzero().view(-1)
        pending = self.group.all_to_all_async(rows.index_select(0, chosen), sent_rows, came_rows)
        self._count(sent_rows, rows.shape[1])
        return HopTicket(
            pending=pending, sent_rows=sent_rows, came_rows=came_rows, sent_choices=sent_choices, came_choices=came_choices,
            row_index=row_index, targets=targets,
        )  # fmt: skip

    def send_back(self, ticket: HopTicket, values: torch.Tensor, *, singly: bool) -> Pending:
        """Return values [M, hidden], one per arrived row, or (``singly``) one per choice, by row then choice."""
        back, forth = (ticket.came_choices, ticket.sent_choices) if singly else (ticket.came_rows, ticket.sent_rows)
        self._count(back, values.shape[1] * values.element_size())
        return self.group.all_to_all_async(values, back, forth)

    def _count(self, rows: list[int], row_bytes: int) -> None:
        for rank, n in enumerate(rows):
            if rank != self.group.index:
                self.sent[rank] += n * row_bytes
