"""``receive_tokens`` in plain PyTorch: the same signature and results."""

from __future__ import annotations

import time

import torch

from ..blocks import blocks_at
from ..heap.peers import Peers
from ..state import PeerState
from ..wire import DISPATCH, Wire
from .wait_torch import await_flag


def receive_tokens(
    wire: Wire, peers: Peers, state: PeerState, slots: torch.Tensor, shares: torch.Tensor, *,
    channel: int, timeout_ms: int, fault_tolerant: bool, tag: int = 0, programs: int = 1,
) -> None:  # fmt: skip
    """Wait for everybody's tokens and say which of this rank's slots want them.

    Args:
        wire: the layout of this call.
        peers: everybody's workspace.
        state: of this rank.
        slots: int32 [R * M, k], written: slots of this rank from 0; -1: another rank's, none, or no such token.
        shares: float32 [R * M, k], written: weights of ``slots``, 0 where that is -1.
        channel: of the workspace.
        timeout_ms: longest wait for a rank.
        fault_tolerant: a rank that does not come takes no further part, instead of an error.
        tag: names the call in errors.
        programs: most programs of the kernel; nothing here.

    Raises:
        FlagMissed: see ``wait_torch.await_flag``; the kernel leaves ``state.status`` instead.
    """
    blocks, begin = blocks_at(wire, peers, peers.rank, channel), time.monotonic()
    slots.fill_(-1)
    shares.zero_()
    first, m = peers.rank * wire.slots_per_rank, wire.max_tokens
    for source in range(wire.n_ranks):
        n = await_flag(
            wire, peers, state, blocks,
            phase=DISPATCH, channel=channel, source=source, timeout_ms=timeout_ms, fault_tolerant=fault_tolerant, tag=tag, begin=begin,
        )  # fmt: skip
        if n is None:
            continue
        local = blocks.ids[source, :n] - first
        here = (local >= 0) & (local < wire.slots_per_rank)
        slots[source * m : source * m + n] = torch.where(here, local, -1)
        shares[source * m : source * m + n] = torch.where(here, blocks.weights[source, :n], 0.0)
