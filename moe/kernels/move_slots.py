"""Slots that take over what others hold, in place, in one launch a tensor.

A program goes through all moves for its own few kilobytes of every slot, so that programs need not wait for each other, and what
waits for its place in a cycle waits in registers: every byte that moves is read once and written once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .move_slots_torch import SPARE, check_slots, plan_moves


@triton.jit
def move_kernel(words, moves, n_moves, slot_words, BLOCK: tl.constexpr, SPARE: tl.constexpr):
    """Grid (ceil(slot_words / BLOCK)). words [slots, slot_words]; moves int32 [n, 2]: from, to."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < slot_words
    kept = tl.zeros((BLOCK,), words.dtype.element_ty)
    for move in range(n_moves):
        source = tl.load(moves + 2 * move).to(tl.int64)
        target = tl.load(moves + 2 * move + 1).to(tl.int64)
        if source == SPARE:
            value = kept
        else:
            value = tl.load(words + source * slot_words + at, mask=inside)
        if target == SPARE:
            kept = value
        else:
            tl.store(words + target * slot_words + at, value, mask=inside)


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """[slots, ...] -> the same memory as [slots, words] of the widest integers that a slot is a whole number of: 8, 4, 2 or 1 bytes."""
    size = tensor[0].numel() * tensor.element_size()
    raw = tensor.view(-1).view(torch.uint8)
    for width, dtype in ((8, torch.int64), (4, torch.int32), (2, torch.int16)):
        if size % width == 0 and tensor.data_ptr() % width == 0:
            return raw.view(dtype).view(len(tensor), size // width)
    return raw.view(len(tensor), size)


def move_slots(tensors: Sequence[torch.Tensor], source: Sequence[int], spare: Sequence[torch.Tensor] | None = None) -> int:
    """See ``move_slots_torch.move_slots``; ``spare`` is not used. Queued on the current stream, no host sync."""
    check_slots(tensors, len(source))
    moves = plan_moves(source)
    if not moves:
        return 0
    table = torch.tensor(moves, dtype=torch.int32)
    device = tensors[0].device
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    for tensor in tensors:
        if tensor[0].numel() == 0:
            continue
        words = as_words(tensor)
        block = 2048 if words.shape[1] >= 1 << 16 else 512
        move_kernel[(triton.cdiv(words.shape[1], block),)](
            words, table, len(moves), words.shape[1], BLOCK=block, SPARE=SPARE, num_warps=4, num_stages=1
        )  # fmt: skip
    return sum(to != SPARE for _, to in moves)
