"""What a dispatcher over symmetric memory keeps on its device beside the workspace; nobody else writes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch


class Failure(IntEnum):
    """Values of the word ``Status.FAILED``."""

    NONE = 0
    MISSED = 1  # a flag did not come within the deadline
    COUNT = 2  # a flag came with a number of tokens that cannot be; ``Status.COUNT`` has it
    LEFT_OUT = 3  # a flag is ahead of what was waited for: the others went on without this rank


class Status(IntEnum):
    """Words of ``PeerState.status``: what went wrong first. All zero while nothing did."""

    FAILED = 0  # a ``Failure``
    PHASE = 1  # DISPATCH or COMBINE
    EPOCH = 2  # epoch that was waited for
    MISSING = 3  # rank whose flag did not come
    SEEN = 4  # epoch that its flag had
    TAG = 5  # what the caller named the call, such as its layer
    CHANNEL = 6
    COUNT = 7  # tokens that an impossible flag named


N_STATUS = 8


@dataclass(frozen=True, kw_only=True)
class PeerState:
    """Small tensors that kernels of one dispatcher read and change. All stay at their addresses, so graphs may hold them."""

    epoch: torch.Tensor  # int64 [depth] dispatches sent so far on each channel; rises in ``send_tokens``
    arrived: torch.Tensor  # int32 [depth, 2] programs of the running send that have finished; 0 between launches
    active: torch.Tensor  # int32 [R] 1: rank takes part; a wait that times out in fault-tolerant mode sets 0
    status: torch.Tensor  # int64 [N_STATUS], see ``Status``
    sent: torch.Tensor  # int64 [3, R] since the start, by destination: rows of tokens, tokens whose choices were sent, results

    @classmethod
    def make(cls, depth: int, n_ranks: int, device: torch.device) -> PeerState:
        """Nothing sent, everybody active."""
        return cls(
            epoch=torch.zeros(depth, dtype=torch.int64, device=device),
            arrived=torch.zeros((depth, 2), dtype=torch.int32, device=device),
            active=torch.ones(n_ranks, dtype=torch.int32, device=device),
            status=torch.zeros(N_STATUS, dtype=torch.int64, device=device),
            sent=torch.zeros((3, n_ranks), dtype=torch.int64, device=device),
        )
