"""From one row a token to rows sorted by slot, without the host knowing how many: what a CUDA graph can hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .dispatcher import EPSpec, Routed


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Rows of a sorted layout, and where each choice went."""

    row: torch.Tensor  # int64 [N] row that each place holds, -1 for padding
    choice: torch.Tensor  # int64 [N] flat choice (row * k + column) of each place, -1 for padding
    index: torch.Tensor  # int32 [rows, k] place of every choice, -1 for none
    counts: torch.Tensor  # int32 [slots_per_rank]
    offsets: torch.Tensor  # int32 [slots_per_rank + 1]

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, ...] -> [N, ...], zeros where there is padding."""
        bits = rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows  # few operations know FP8
        return _pick(bits, self.row, 0).view(rows.dtype)

    def take_choices(self, values: torch.Tensor) -> torch.Tensor:
        """values [rows, k] of every choice -> [N], zeros where there is padding."""
        return _pick(values.reshape(-1), self.choice, 0)

    def before(self, order: torch.Tensor) -> Arrangement:
        """The same places, if the rows that this was made for are ``rows[order]`` of those that it will be used with."""
        k = max(self.index.shape[1], 1)
        row = F.pad(order, (0, 1), value=-1)[self.row]  # -1 finds the last
        choice = torch.where(self.choice < 0, -1, row * k + self.choice % k)
        index = torch.empty_like(self.index).index_copy_(0, order, self.index)
        return Arrangement(row=row, choice=choice, index=index, counts=self.counts, offsets=self.offsets)


def _pick(values: torch.Tensor, index: torch.Tensor, hole: int) -> torch.Tensor:
    """values[index] along the first dimension, and ``hole`` where the index is -1."""
    if not len(values):
        return values.new_full((len(index), *values.shape[1:]), hole)
    holes = (index < 0).view(-1, *[1] * (values.dim() - 1))
    return values.index_select(0, index.clamp(min=0)).masked_fill_(holes, hole)


def most_rows(spec: EPSpec, rows: int) -> int:
    """Places of a contiguous layout that are enough whatever ``rows`` rows choose, every choice on this rank."""
    padding = (spec.alignment - 1) * spec.slots_per_rank
    return -(-(rows * spec.top_k + padding) // spec.alignment) * spec.alignment


def contiguous(spec: EPSpec, slots: torch.Tensor) -> Arrangement:
    """slots int [rows, k] of this rank, -1 for none -> rows by (slot, row, column); each slot starts at the spec's alignment."""
    n_slots, flat = spec.slots_per_rank, slots.reshape(-1).long()
    counts = count_slots(flat, n_slots)
    ends = (-(-counts // spec.alignment) * spec.alignment).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends])
    bins, order = torch.where(flat < 0, n_slots, flat).sort(stable=True)
    before = torch.cat([counts.cumsum(0) - counts, counts.sum(0, keepdim=True)])  # sorted choices in front of a slot's first
    rank = torch.arange(flat.numel(), device=flat.device)
    capacity = most_rows(spec, len(slots))
    place = torch.where(bins < n_slots, offsets[bins] + rank - before[bins], capacity)
    return _arrangement(slots, order, place, capacity, counts, offsets)


def masked(spec: EPSpec, slots: torch.Tensor) -> Arrangement:
    """slots int [rows, k] -> places slot * rows + n: the n-th row of a slot. A row that names a slot twice is there once."""
    n_slots, n_rows = spec.slots_per_rank, len(slots)
    there = torch.zeros((n_rows, n_slots + 1), dtype=torch.bool, device=slots.device)
    bins = torch.where(slots < 0, n_slots, slots).long()
    there.scatter_(1, bins, True)
    number = there.cumsum(0) - 1  # [rows, slots + 1]
    place = torch.where(slots < 0, n_slots * n_rows, bins * n_rows + number.gather(1, bins)).view(-1)
    counts = there[:, :n_slots].sum(0)
    offsets = torch.arange(n_slots + 1, device=slots.device) * n_rows
    order = torch.arange(slots.numel(), device=slots.device)
    return _arrangement(slots, order, place, n_slots * n_rows, counts, offsets)


def _arrangement(
    slots: torch.Tensor, order: torch.Tensor, place: torch.Tensor, capacity: int, counts: torch.Tensor, offsets: torch.Tensor
) -> Arrangement:
    """Choice ``order[i]`` goes to ``place[i]``; ``capacity`` means nowhere."""
    choice = order.new_full((capacity + 1,), -1).scatter_(0, place, order)[:capacity]
    index = order.new_empty(slots.numel()).scatter_(0, order, torch.where(place < capacity, place, -1))
    row = torch.where(choice < 0, -1, torch.div(choice, max(slots.shape[1], 1), rounding_mode="floor"))
    return Arrangement(row=row, choice=choice, index=index.view(slots.shape).int(), counts=counts.int(), offsets=offsets.int())


def count_slots(slots: torch.Tensor, n_slots: int) -> torch.Tensor:
    """int64 [n_slots]: how often each is named in ``slots`` (any shape, -1 for none)."""
    bins = torch.where(slots < 0, n_slots, slots).reshape(-1).long()
    return torch.zeros(n_slots + 1, dtype=torch.int64, device=slots.device).scatter_add_(0, bins, torch.ones_like(bins))[:n_slots]


def arrange(spec: EPSpec, routed: Routed, by: Arrangement, origins: torch.Tensor) -> None:
    """Turn ``routed`` from the layout "rank" to that of ``by``; ``origins`` int32 [rows] become its sources."""
    assert routed.shares is not None
    x, scales = by.take(routed.x), None if routed.scales is None else by.take(routed.scales)
    weights = by.take_choices(routed.shares)
    sources = _pick(origins, by.row, -1)
    if routed.layout == "masked":
        shape = (spec.slots_per_rank, x.shape[0] // spec.slots_per_rank)
        x, weights, sources = x.view(*shape, spec.hidden), weights.view(shape), sources.view(shape)
        scales = None if scales is None else scales.view(*shape, scales.shape[1])
    elif x.device.type == "cpu":
        n = int(by.offsets[-1])  # the host has the counts: no row more than there are
        x, scales, weights, sources = x[:n], None if scales is None else scales[:n], weights[:n], sources[:n]
    routed.x, routed.scales, routed.weights, routed.sources = x, scales, weights, sources
    routed.counts, routed.offsets, routed.slots, routed.shares = by.counts, by.offsets, None, None
