"""All ranks of a group as dispatchers of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..parallel.group import Group
from ..parallel.progress import Progress
from .dispatcher import EPSpec
from .heap.virtual import VirtualHeap
from .ops import PeerOps
from .peer import PeerDispatcher


@dataclass(kw_only=True)
class VirtualRanks:
    """Call a half on every rank before the next half on any: a wait finds its flags set, or ends at its deadline.

    With one thread a rank, the calls of a rank may follow each other as they like.
    """

    ranks: list[PeerDispatcher]

    @classmethod
    def make(cls, spec: EPSpec | Sequence[EPSpec], *, device: torch.device | None = None, ops: PeerOps | None = None) -> VirtualRanks:
        """``spec`` of all ranks (or one each, which must be equal) -> as many dispatchers. ValueError as in ``PeerDispatcher``."""
        specs = [spec] * spec.n_ranks if isinstance(spec, EPSpec) else list(spec)
        for rank, other in enumerate(specs):
            if other != specs[0]:
                raise ValueError(f"the virtual ranks disagree: {specs[0]} on rank 0, {other} on rank {rank}")
        heap = VirtualHeap(len(specs), device)
        return cls(ranks=[PeerDispatcher(_group(len(specs), r), s, heap.of(r), ops=ops, compare=False) for r, s in enumerate(specs)])

    def set_active(self, mask: Sequence[bool]) -> None:
        """``set_active`` of all ranks of ``mask`` at once."""
        members = [rank for rank, there in zip(self.ranks, mask, strict=True) if there]
        epochs = torch.stack([rank.state.epoch for rank in members]).amax(dim=0).tolist()
        for rank in members:
            rank.resume(mask, epochs)

    def close(self) -> None:
        """Close every rank."""
        for rank in self.ranks:
            rank.close()


def _group(size: int, index: int) -> Group:
    """Rank ``index`` of a group that can exchange nothing."""
    return Group("ep", range(size), index, process_group=None, deadline_s=1.0, progress=Progress(rank=index))
