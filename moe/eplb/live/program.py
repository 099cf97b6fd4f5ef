"""The copies of one rank at the commit of a batch, in an order in which nothing is overwritten before it was read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..topology import Ints
from .changes import Batch


class Kind(Enum):
    """What an operation copies."""

    UNPACK = "unpack"  # a staging buffer to a slot
    COPY = "copy"  # a slot to a slot
    SAVE = "save"  # a slot to the spare buffer
    CLEAR = "clear"  # zeros to a slot


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One operation. Doing it twice in a row is doing it once."""

    kind: Kind
    layer: int  # MoE layer
    source: int  # local slot or buffer; -1: none
    target: int  # local slot or buffer


def local_program(batch: Batch, now: Ints, rank: int, first: int, stop: int, spare: int) -> list[Copy]:
    """What rank ``rank``, with the slots from ``first`` to ``stop``, does at the commit.

    Args:
        batch: of all ranks.
        now: [layers, slots] experts of slots before the batch.
        rank: of the group.
        first: its first slot.
        stop: behind its last slot.
        spare: a buffer that no transfer of the batch fills.
    """
    buffers = {(move.layer, move.expert): move.buffer for move in batch.transfers if move.target == rank}
    program: list[Copy] = []
    for layer in batch.layers:
        wanted = {c.slot - first: c.expert for c in batch.changes if c.layer == layer and first <= c.slot < stop}
        held = now[layer, first:stop].tolist()
        copies: dict[int, int] = {}  # local slot -> local slot that it gets
        last: list[Copy] = []
        for target, expert in wanted.items():
            if expert < 0:
                last.append(Copy(kind=Kind.CLEAR, layer=layer, source=-1, target=target))
            elif (layer, expert) in buffers:
                last.append(Copy(kind=Kind.UNPACK, layer=layer, source=buffers[layer, expert], target=target))
            else:
                copies[target] = _holder(held, expert, wanted)
        program += _ordered(copies, layer, spare) + last
    return program


def _holder(held: list[int], expert: int, wanted: dict[int, int]) -> int:
    """A local slot with ``expert``, one that stays if there is one."""
    slots = [slot for slot, found in enumerate(held) if found == expert]
    return next((slot for slot in slots if slot not in wanted), slots[0])


def _ordered(copies: dict[int, int], layer: int, spare: int) -> list[Copy]:
    """``copies`` (target -> source) one after another; a cycle goes through the spare buffer."""
    program: list[Copy] = []
    left = dict(copies)
    while left:
        read = set(left.values())
        free = [target for target in left if target not in read]
        if free:
            for target in free:
                program.append(Copy(kind=Kind.COPY, layer=layer, source=left.pop(target), target=target))
            continue
        start = target = next(iter(left))
        program.append(Copy(kind=Kind.SAVE, layer=layer, source=start, target=spare))
        while left[target] != start:
            source = left.pop(target)
            program.append(Copy(kind=Kind.COPY, layer=layer, source=source, target=target))
            target = source
        left.pop(target)
        program.append(Copy(kind=Kind.UNPACK, layer=layer, source=spare, target=target))
    return program
