"""What the expert's rank does with the rows that arrive: one row per (token, local slot), sorted by slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .checks import check_outputs
from .dispatcher import EPSpec, Routed
from .layouts import arrange, contiguous, masked
from .order import ordered_sum, positions
from .rows import DTYPES, RowLayout


@dataclass(kw_only=True)
class Arrived:
    """Where the expert outputs of M arrived rows lie. ``index`` and ``weights`` are [M, k], in the order in which they were sent."""

    index: torch.Tensor  # int64 row of ``Routed.x`` that holds (row, choice); -1 if the choice is not of this rank
    weights: torch.Tensor  # float32


def local_slots(spec: EPSpec, rank: int, slots: torch.Tensor) -> torch.Tensor:
    """Global slots -> slots of EP rank ``rank`` from 0, and -1 for all others."""
    local = slots - rank * spec.slots_per_rank
    return torch.where((local >= 0) & (local < spec.slots_per_rank), local, -1)


def group_by_slot(
    spec: EPSpec,
    x: torch.Tensor,
    local: torch.Tensor,
    weights: torch.Tensor,
    origins: torch.Tensor,
    layout: str = "contiguous",
    row_order: torch.Tensor | None = None,
) -> tuple[Routed, Arrived]:
    """Rows x [M, hidden] with local slots [M, k] (-1 for none) -> what the layout makes of them; contiguous: by (slot, row).

    ``origins`` int32 [M] become ``Routed.sources``. ``row_order`` [M], if given, is the order of rows to use instead of their
    own (layout "rank": the order stays). The handle of the result is for the caller to set.
    """
    if layout == "contiguous" and spec.alignment == 1:
        return _sorted(spec, x, local, weights, origins, row_order)
    slots, shares = local.int(), torch.where(local < 0, 0.0, weights)
    routed = Routed(x=x, handle=None, layout=layout, slots=slots, shares=shares, sources=origins)
    if layout == "rank":
        return routed, Arrived(index=local, weights=weights)
    arranger = masked if layout == "masked" else contiguous
    by = arranger(spec, slots) if row_order is None else arranger(spec, slots[row_order]).before(row_order)
    arrange(spec, routed, by, origins)
    return routed, Arrived(index=by.index.long(), weights=weights)


def _sorted(
    spec: EPSpec, x: torch.Tensor, local: torch.Tensor, weights: torch.Tensor, origins: torch.Tensor, row_order: torch.Tensor | None
) -> tuple[Routed, Arrived]:
    """The contiguous layout without padding, with the counts on the host."""
    k = local.shape[1]
    ordered = local if row_order is None else local[row_order]
    order, place, counts = positions(ordered.reshape(-1), spec.slots_per_rank)
    row = torch.div(order, k, rounding_mode="floor")
    index = place.view(-1, k)
    if row_order is not None:
        order = row_order[row] * k + order % k
        row = row_order[row]
        index = torch.empty_like(index).index_copy_(0, row_order, index)
    routed = Routed(
        x=x.index_select(0, row), counts=counts.cpu(), weights=weights.reshape(-1).index_select(0, order),
        offsets=F.pad(counts.cumsum(0), (1, 0)).int(), sources=origins.index_select(0, row), handle=None,
    )  # fmt: skip
    return routed, Arrived(index=index, weights=weights)


def unpack_rows(
    layout: RowLayout, rank: int, rows: torch.Tensor, order: str = "contiguous", row_order: torch.Tensor | None = None
) -> tuple[Routed, Arrived]:
    """Rows [M, row bytes] that arrived at EP rank ``rank`` -> its tokens in the layout ``order``; see ``group_by_slot``."""
    local = local_slots(layout.spec, rank, layout.slots(rows))
    return group_by_slot(layout.spec, layout.values(rows), local, layout.weights(rows), layout.origins(rows), order, row_order)


def results(
    spec: EPSpec, y: torch.Tensor, routed: Routed, arrived: Arrived, index: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Expert outputs as ``Dispatcher.combine_send`` takes them -> (outputs [N, hidden], place of every (row, choice) in them).

    The place is None if y has one weighted sum a row already. Raises ValueError for outputs that do not fit the layout.
    """
    if routed.layout != "rank":
        check_outputs(spec, y, tuple(routed.x.shape[:-1]))
        return y.reshape(-1, spec.hidden), arrived.index
    if index is not None:
        return y, torch.where(arrived.index < 0, -1, index.long())
    check_outputs(spec, y, routed.x.shape[0])
    if spec.deterministic:
        raise ValueError("combine: in deterministic mode the layout rank needs index, and outputs without weights")
    return y, None


def weighted_rows(spec: EPSpec, y: torch.Tensor, index: torch.Tensor | None, weights: torch.Tensor) -> torch.Tensor:
    """Expert outputs and their ``index`` [M, k], see ``results`` -> one weighted sum per arrived row, [M, hidden], in the spec's dtype."""
    return (y if index is None else ordered_sum(y, index, weights)).to(DTYPES[spec.dtype])


def rows_home(spec: EPSpec, y: torch.Tensor, routed: Routed, arrived: Arrived, index: torch.Tensor | None) -> torch.Tensor:
    """What travels back for expert outputs y: a weighted sum a row, or, deterministic, the output of every choice on its own."""
    outputs, place = results(spec, y, routed, arrived, index)
    if spec.deterministic:
        assert place is not None
        return single_rows(spec, outputs, place)
    return weighted_rows(spec, outputs, place, arrived.weights)


def single_rows(spec: EPSpec, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """y [N, hidden] and index [M, k] -> the rows that index names, by row then choice, in the spec's dtype."""
    flat = index.reshape(-1)
    return y.to(DTYPES[spec.dtype]).index_select(0, flat[flat >= 0])
