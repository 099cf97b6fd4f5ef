"""``send_tokens`` in plain PyTorch: the same signature and results on any memory that this process maps."""

from __future__ import annotations

import torch

from ..blocks import blocks_at, value_dtype
from ..fp8 import quantise
from ..heap.peers import Peers
from ..state import PeerState
from ..wire import DISPATCH, Wire
from .wait_torch import stop_if_failed


def pack(wire: Wire, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """x [n, hidden] (float, or e4m3 with ``scales``, or uint8) -> rows as they travel, uint8 [n, row_bytes]."""
    rows = torch.zeros((len(x), wire.row_bytes), dtype=torch.uint8, device=x.device)
    dtype = value_dtype(wire)
    if wire.n_scales and scales is None:
        x, scales = quantise(x, ue8m0=wire.payload == "fp8_ue8m0")
    if scales is not None:
        rows[:, wire.value_bytes : wire.value_bytes + 4 * wire.n_scales].view(torch.float32).copy_(scales)
    rows[:, : wire.hidden * dtype.itemsize].copy_(x.to(dtype).contiguous().view(torch.uint8))
    return rows


def send_tokens(
    wire: Wire, peers: Peers, state: PeerState, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *,
    channel: int, n_valid: torch.Tensor | None = None, scales: torch.Tensor | None = None, tag: int = 0, programs: int = 1,
) -> None:  # fmt: skip
    """Store this rank's tokens where they are wanted, and everybody's copy of their choices; then tell everybody.

    Args:
        wire: the layout of this call.
        peers: everybody's workspace.
        state: of this rank; its epoch of ``channel`` rises by one.
        x: [T, hidden] in the wire's dtype (FP8 payloads: quantised here), or e4m3 values with ``scales``.
        ids: int32 [T, k] global slots, -1 for none, in any order.
        weights: float32 [T, k].
        channel: of the workspace.
        n_valid: int32 [1] on the device; tokens from there on are not sent. None: all T are.
        scales: float32 [T, n_scales].
        tag: names the call in errors.
        programs: most programs of the kernel; nothing here.

    Raises:
        FlagMissed: an earlier wait of this rank failed; the kernel then does nothing, so that the others miss its flag.
    """
    stop_if_failed(state)
    me, k = peers.rank, wire.top_k
    n = len(x) if n_valid is None else max(0, min(int(n_valid), len(x)))
    rows = pack(wire, x[:n], None if scales is None else scales[:n])
    ids, weights = ids[:n], weights[:n]
    ranks = torch.div(ids, wire.slots_per_rank, rounding_mode="floor")  # -1 stays -1
    active = [r for r in range(wire.n_ranks) if int(state.active[r])]
    for peer in active:
        blocks = blocks_at(wire, peers, peer, channel)
        wanted = (ranks == peer).any(dim=1).nonzero().view(-1)
        blocks.rows[me].index_copy_(0, wanted, rows[wanted])
        blocks.ids[me, :n], blocks.weights[me, :n] = ids.view(n, k), weights.view(n, k)
        if peer != me:
            state.sent[0, peer] += len(wanted)
            state.sent[1, peer] += n
    state.epoch[channel] += 1
    raise_flags(wire, peers, state, phase=DISPATCH, channel=channel, count=n)


def raise_flags(wire: Wire, peers: Peers, state: PeerState, *, phase: int, channel: int, count: int) -> None:
    """Write (epoch, count) to every active rank's flag of this rank, the count first."""
    epoch = int(state.epoch[channel])
    for peer in range(wire.n_ranks):
        if int(state.active[peer]):
            flag = blocks_at(wire, peers, peer, channel).flags[phase, peers.rank]
            flag[1] = count
            flag[0] = epoch
