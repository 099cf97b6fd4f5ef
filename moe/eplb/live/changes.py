"""What one batch of a move does, on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

NOBODY = -1  # source of an expert that no rank holds: it is loaded from elsewhere


@dataclass(frozen=True, kw_only=True)
class Change:
    """A slot whose expert becomes another at the commit of a batch."""

    layer: int  # MoE layer
    slot: int  # of all ranks
    expert: int  # that it holds afterwards; -1: none


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """An expert that a rank receives, into a staging buffer."""

    layer: int  # MoE layer
    expert: int  # logical
    source: int  # rank that sends; NOBODY: the receiver loads it
    source_slot: int  # of all ranks, where the sender has it; -1 with NOBODY
    target: int  # rank that receives
    buffer: int  # its staging buffer


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Changes that all ranks make at one boundary. The placement is valid before and after."""

    changes: tuple[Change, ...]
    rounds: tuple[tuple[Transfer, ...], ...]  # in a round every rank sends at most once and receives at most once
    loads: tuple[Transfer, ...]  # of NOBODY

    @property
    def transfers(self) -> list[Transfer]:
        """Of all rounds, and loads."""
        return [*(transfer for group in self.rounds for transfer in group), *self.loads]

    @property
    def layers(self) -> list[int]:
        """Layers that change, ascending."""
        return sorted({change.layer for change in self.changes})
