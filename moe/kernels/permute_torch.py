"""Which row of a grouped product holds which choice of which token: the layout and its plain PyTorch maker.

A *choice* is one (token, column) of a router's result, numbered token * k + column. A *row block* is ``block`` neighbouring
rows that one expert multiplies. Two layouts share ``RowBlocks``: rows permuted here, each slot's segment padded to whole
blocks (``Permutation``), and rows that arrived sorted by slot without any padding, whose blocks may start anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...parallel.kernels.quantise_torch import BLOCK as SCALED
from ...parallel.kernels.quantise_torch import empty_scales, quantise_activation

BLOCKS = (16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class RowBlocks:
    """Row blocks of a grouped product, sorted by slot. Entries from ``n_blocks`` on are unused."""

    block: int  # rows of a block
    block_slot: torch.Tensor  # int32 [B] slot of each block, -1 for unused
    block_row: torch.Tensor  # int32 [B] first row of each block, 0 for unused
    block_rows: torch.Tensor  # int32 [B] rows of each block that hold something (they come first), 0 for unused
    n_blocks: torch.Tensor  # int32 [1] used blocks

    @property
    def max_blocks(self) -> int:
        """B, the host's bound of the blocks in use."""
        return self.block_slot.shape[0]


@dataclass(frozen=True, kw_only=True)
class Permutation(RowBlocks):
    """Rows sorted by (slot, token), each slot's segment padded to whole blocks: block m holds rows m * block and on."""

    k: int  # choices of a token
    sorted_index: torch.Tensor  # int32 [B * block] choice of every row, -1 for padding
    place: torch.Tensor  # int32 [T, k] row of every choice, -1 for none
    offsets: torch.Tensor  # int32 [n_slots + 1] first row of each slot's segment; last the rows in use, padding included
    counts: torch.Tensor  # int32 [n_slots + 1] choices of each slot; last the choices without a slot


def check_block(block: int) -> None:
    """Refuse a block that no kernel has."""
    if block not in BLOCKS:
        raise ValueError(f"block must be one of {BLOCKS} rows, found {block}")


def max_row_blocks(n_rows: int, n_slots: int, block: int) -> int:
    """Most blocks that ``n_rows`` rows over ``n_slots`` slots can need (at least 1): each used slot opens one."""
    opened = min(n_rows, n_slots)
    return max(opened + (n_rows - opened) // block, 1)


def check_slots(slots: torch.Tensor, n_slots: int, block: int) -> None:
    """Refuse choices of the wrong type or number."""
    check_block(block)
    if slots.dim() != 2 or slots.dtype != torch.int32 or not slots.is_contiguous():
        raise ValueError(f"slots must be a contiguous int32 [T, k] tensor, found {slots.dtype} {tuple(slots.shape)}")
    if n_slots < 1 or slots.numel() >= 2**31 - 2**20:
        raise ValueError(f"need 1 or more slots and fewer than 2^31 choices, found {n_slots} and {slots.numel()}")


def _row_blocks(counts: torch.Tensor, starts: torch.Tensor, block: int, bound: int) -> RowBlocks:
    """Blocks of segments that begin at ``starts`` and hold ``counts`` rows, both int64 [S]."""
    n = -(-counts // block)
    slot = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), n)
    index = torch.arange(len(slot), device=counts.device) - (n.cumsum(0) - n)[slot]

    def padded(values: torch.Tensor, rest: int) -> torch.Tensor:
        return F.pad(values.int(), (0, bound - len(values)), value=rest)

    return RowBlocks(
        block=block,
        block_slot=padded(slot, -1),
        block_row=padded(starts[slot] + index * block, 0),
        block_rows=padded((counts[slot] - index * block).clamp(max=block), 0),
        n_blocks=n.sum(dtype=torch.int32).view(1),
    )


def segment_blocks(counts: torch.Tensor, n_rows: int, block: int, *, stride: int | None = None) -> RowBlocks:
    """See ``permute.segment_blocks``."""
    check_block(block)
    sizes = counts.long()
    starts = torch.arange(len(sizes), device=sizes.device) * stride if stride is not None else sizes.cumsum(0) - sizes
    return _row_blocks(sizes, starts, block, max_row_blocks(n_rows, len(sizes), block))


def permute(slots: torch.Tensor, n_slots: int, *, block: int) -> Permutation:
    """See ``permute.permute``."""
    check_slots(slots, n_slots, block)
    k = slots.shape[1]
    flat = slots.reshape(-1).long()
    keys = torch.where((flat < 0) | (flat >= n_slots), n_slots, flat)
    counts = torch.bincount(keys, minlength=n_slots + 1)
    padded = -(-counts[:n_slots] // block) * block
    offsets = F.pad(padded.cumsum(0), (1, 0))
    bound = max_row_blocks(flat.numel(), n_slots, block)
    order = keys.argsort(stable=True)
    kept = order[: flat.numel() - int(counts[n_slots])]
    first = F.pad(counts.cumsum(0), (1, 0))
    rows = offsets[keys[kept]] + torch.arange(len(kept), device=flat.device) - first[keys[kept]]
    sorted_index = torch.full((bound * block,), -1, dtype=torch.int32, device=flat.device)
    sorted_index[rows] = kept.int()
    place = torch.full((flat.numel(),), -1, dtype=torch.int32, device=flat.device)
    place[kept] = rows.int()
    blocks = _row_blocks(counts[:n_slots], offsets[:n_slots], block, bound)
    return Permutation(
        **vars(blocks), k=k, sorted_index=sorted_index, place=place.view(slots.shape), offsets=offsets.int(), counts=counts.int()
    )


def row_form(x: torch.Tensor, x_scales: torch.Tensor | None, quantise: bool) -> str:
    """How rows are made of tokens: see ``permute_rows.permute_rows_kernel``. Refuses e4m3 without scales and the reverse."""
    if (x.dtype == torch.float8_e4m3fn) != (x_scales is not None):
        found = "no scales" if x_scales is None else f"scales of shape {tuple(x_scales.shape)}"
        raise ValueError(f"e4m3 tokens, and only they, need scales of 128 values each, found {x.dtype} with {found}")
    if x_scales is not None and tuple(x_scales.shape) != (x.shape[0], -(-x.shape[1] // SCALED)):
        raise ValueError(f"tokens {tuple(x.shape)} need one scale per {SCALED} values, found scales of shape {tuple(x_scales.shape)}")
    if x_scales is not None:
        return "scaled" if quantise else "widen"
    return "quantise" if quantise else "plain"


def permute_rows(
    x: torch.Tensor, layout: Permutation, *,
    quantise: bool = False, x_scales: torch.Tensor | None = None, dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """See ``permute_rows.permute_rows``; padding rows are zeros here."""
    index, form = layout.sorted_index.long(), row_form(x, x_scales, quantise)
    token, real = torch.div(index.clamp(min=0), max(layout.k, 1), rounding_mode="floor"), (index >= 0)[:, None]

    def pick(values: torch.Tensor) -> torch.Tensor:
        rows = values[token] if len(values) else values.new_zeros(len(index), values.shape[1])
        return torch.where(real, rows, torch.zeros((), dtype=values.dtype, device=values.device))

    if x_scales is not None:
        values, steps = pick(x.view(torch.uint8)).view(torch.float8_e4m3fn), pick(x_scales)
        if form == "widen":
            wide = values.float() * steps.repeat_interleave(SCALED, dim=1)[:, : x.shape[1]]
            return wide.to(dtype or x.dtype), None
        scales = empty_scales(len(index), x.shape[1], x.device)
        return values, scales.copy_(steps)
    rows = pick(x)
    return quantise_activation(rows) if quantise else (rows.to(dtype or x.dtype), None)


def unpermute(y: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
    """See ``permute_rows.unpermute``."""
    index = place.long()
    index, column = torch.where(index < 0, torch.iinfo(torch.int64).max, index).sort(dim=1, stable=True)
    ordered = weights.gather(1, column)
    out = torch.zeros((place.shape[0], y.shape[1]), dtype=torch.float64 if y.dtype == torch.float64 else torch.float32, device=y.device)
    for c in range(place.shape[1]):
        there = index[:, c] < y.shape[0]
        rows = y[torch.where(there, index[:, c], 0)].to(out.dtype)
        out = torch.where(there[:, None], out + ordered[:, c : c + 1].to(out.dtype) * rows, out)
    return out.to(out_dtype)
