"""What the expert's rank does with the rows that arrive: one row per (token, local slot), sorted by slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .dispatcher import EPSpec, Routed
from .order import ordered_sum, positions
from .rows import DTYPES, RowLayout


@dataclass(kw_only=True)
class Arrived:
    """Where the expert outputs of M arrived rows lie. ``index`` and ``weights`` are [M, k], in ascending slot order."""

    index: torch.Tensor  # int64 row of ``Routed.x`` that holds (row, choice); -1 if the choice is not of this rank
    weights: torch.Tensor  # float32


def local_slots(spec: EPSpec, rank: int, slots: torch.Tensor) -> torch.Tensor:
    """Global slots -> slots of EP rank ``rank`` from 0, and -1 for all others."""
    local = slots - rank * spec.slots_per_rank
    return torch.where((local >= 0) & (local < spec.slots_per_rank), local, -1)


def group_by_slot(
    spec: EPSpec, x: torch.Tensor, local: torch.Tensor, weights: torch.Tensor, row_order: torch.Tensor | None = None
) -> tuple[Routed, Arrived]:
    """Rows x [M, hidden] with local slots [M, k] (-1 for none) -> rows sorted by (slot, row).

    ``row_order`` [M], if given, is the order of rows to use within a slot instead of their own. The handle of the
    result is for the caller to set.
    """
    k = local.shape[1]
    ordered = local if row_order is None else local[row_order]
    order, place, counts = positions(ordered.reshape(-1), spec.slots_per_rank)
    row = torch.div(order, k, rounding_mode="floor")
    index = place.view(-1, k)
    if row_order is not None:
        order = row_order[row] * k + order % k
        row = row_order[row]
        index = torch.empty_like(index).index_copy_(0, row_order, index)
    routed = Routed(x=x.index_select(0, row), counts=counts.cpu(), weights=weights.reshape(-1).index_select(0, order), handle=None)
    return routed, Arrived(index=index, weights=weights)


def unpack_rows(layout: RowLayout, rank: int, rows: torch.Tensor, row_order: torch.Tensor | None = None) -> tuple[Routed, Arrived]:
    """Rows [M, row bytes] that arrived at EP rank ``rank`` -> its tokens, sorted by (slot, row); see ``group_by_slot``."""
    local = local_slots(layout.spec, rank, layout.slots(rows))
    return group_by_slot(layout.spec, layout.values(rows), local, layout.weights(rows), row_order)


def weighted_rows(spec: EPSpec, y: torch.Tensor, arrived: Arrived) -> torch.Tensor:
    """Expert outputs y [N, hidden] -> one weighted sum per arrived row, [M, hidden], in the spec's dtype."""
    return ordered_sum(y, arrived.index, arrived.weights).to(DTYPES[spec.dtype])


def single_rows(spec: EPSpec, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """y [N, hidden] and index [M, k] -> the rows that index names, by row then choice, in the spec's dtype."""
    flat = index.reshape(-1)
    return y.to(DTYPES[spec.dtype]).index_select(0, flat[flat >= 0])
