"""What ``move_slots`` does, in plain PyTorch, and the order of moves that both follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: in a list of moves: the spare place
SPARE = -1


def plan_moves(source: Sequence[int]) -> list[tuple[int, int]]:
    """In which order slots take over what others hold, so that nothing is overwritten before everybody has it.

    Args:
        source: slot s shall hold what slot ``source[s]`` holds now; -1 or s itself: it stays as it is. A slot may be named several times.

    Returns:
        (from, to) pairs, to be done one after another; ``SPARE`` is a place of one expert beside the slots. Chains go from their
        ends. In a cycle one slot has to wait: as a copy that somebody outside took of it, or else in the spare place, which
        makes a pair more than there are slots to write.

    Raises:
        ValueError: a source is no slot.
    """
    n = len(source)
    if n and not -1 <= min(source) <= max(source) < n:
        raise ValueError(f"slots 0 to {n - 1} take over what other slots hold, or -1 to stay; found sources {min(source)} to {max(source)}")
    wanted = {to: at for to, at in enumerate(source) if at not in (-1, to)}
    readers = [0] * n
    for at in wanted.values():
        readers[at] += 1
    moves: list[tuple[int, int]] = []
    copies: dict[int, int] = {}  # slot -> one that took over what it held at first
    free = [to for to in wanted if not readers[to]]
    while free:  # nobody needs what these hold any more
        to = free.pop()
        at = wanted.pop(to)
        moves.append((at, to))
        copies[at] = to
        readers[at] -= 1
        if not readers[at] and at in wanted:
            free.append(at)
    while wanted:  # what is left are cycles
        first = next((slot for slot in wanted if slot in copies), next(iter(wanted)))
        if first not in copies:
            moves.append((first, SPARE))
        to, at = first, wanted.pop(first)
        while at != first:
            moves.append((at, to))
            to, at = at, wanted.pop(at)
        moves.append((copies.get(first, SPARE), to))
    return moves


def check_slots(tensors: Sequence[torch.Tensor], n_slots: int) -> None:
    """Refuse what is not [slots, ...] without gaps.

    Raises:
        ValueError: naming the tensor.
    """
    for number, tensor in enumerate(tensors):
        if tensor.shape[:1] != (n_slots,) or not tensor.is_contiguous():
            found = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            raise ValueError(f"tensor {number} of the experts' state must be contiguous with {n_slots} slots first, found {found}")


def spare_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Memory of one expert."""
    return [torch.empty_like(tensor[0]) for tensor in tensors]


def move_slots(tensors: Sequence[torch.Tensor], source: Sequence[int], spare: Sequence[torch.Tensor] | None = None) -> int:
    """Slots take over what others hold, in place: weights, scales and whatever else belongs to an expert alike.

    Args:
        tensors: each [slots, ...], contiguous, any dtype.
        source: see ``plan_moves``.
        spare: memory of one expert, ``spare_of(tensors)``; it is made if it is needed and not given.

    Returns:
        Slots that were written.

    Raises:
        ValueError: a tensor is not as it must be, or a source is no slot; nothing was written.
    """
    check_slots(tensors, len(source))
    moves = plan_moves(source)
    if spare is None:
        spare = spare_of(tensors) if any(SPARE in move for move in moves) else []
    for at, to in moves:
        for number, tensor in enumerate(tensors):
            (spare[number] if to == SPARE else tensor[to]).copy_(spare[number] if at == SPARE else tensor[at])
    return sum(to != SPARE for _, to in moves)
