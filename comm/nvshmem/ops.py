"""The four operations where some ranks cannot be mapped: stores for those that can, puts for those that cannot."""

from __future__ import annotations

from typing import Any

import torch

from ..heap.peers import Peers
from ..ops import PeerOps
from ..state import PeerState
from ..wire import Wire


def put_ops(ring: torch.Tensor, stores: PeerOps | None = None) -> PeerOps:
    """``stores`` (the kernels, if not given), with a second launch in each send that serves the unmapped ranks.

    Waiting and adding need nothing else: flags and rows come into this rank's own memory either way. ``ring`` is symmetric
    memory of ``kernels.put_home.ring_bytes`` for as many programs as the sends get.
    """
    from .kernels.put_home import put_home
    from .kernels.put_tokens import put_tokens, staged

    mapped = stores or PeerOps.load("triton")
    known: dict[int, Peers] = {}  # by address of the pointers

    def own_for_unmapped(peers: Peers) -> Peers:
        key = peers.pointers.data_ptr()
        if key not in known:  # at the first call, which comes before any capture
            known[key] = staged(peers)
        return known[key]

    def send_tokens(wire: Wire, peers: Peers, state: PeerState, *args: Any, channel: int, programs: int, **more: Any) -> None:
        mapped.send_tokens(wire, own_for_unmapped(peers), state, *args, channel=channel, programs=programs, **more)
        put_tokens(wire, peers, state, channel=channel, programs=programs)

    def send_home(
        wire: Wire, peers: Peers, state: PeerState, y: torch.Tensor, slots: torch.Tensor, *, channel: int,
        index: torch.Tensor | None = None, shares: torch.Tensor | None = None, deterministic: bool, programs: int, **more: Any,
    ) -> None:  # fmt: skip
        how: dict[str, Any] = {"channel": channel, "index": index, "shares": shares, "deterministic": deterministic, "programs": programs}
        mapped.send_home(wire, peers, state, y, slots, **how, **more)
        put_home(wire, peers, state, y, slots, ring, **how)

    return PeerOps(
        name="nvshmem", send_tokens=send_tokens, receive_tokens=mapped.receive_tokens, send_home=send_home, sum_home=mapped.sum_home
    )  # fmt: skip
