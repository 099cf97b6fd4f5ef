"""``send_home`` in plain PyTorch: the same signature and results."""

from __future__ import annotations

import torch

from ..blocks import blocks_at
from ..heap.peers import Peers
from ..order import ordered_sum
from ..rows import DTYPES
from ..state import PeerState
from ..wire import COMBINE, Wire
from .send_tokens_torch import raise_flags
from .wait_torch import stop_if_failed


def send_home(
    wire: Wire, peers: Peers, state: PeerState, y: torch.Tensor, slots: torch.Tensor, *,
    channel: int, index: torch.Tensor | None = None, shares: torch.Tensor | None = None, deterministic: bool,
    tag: int = 0, programs: int = 1,
) -> None:  # fmt: skip
    """Store what this rank's experts made of every token that came at the rank it came from; then tell everybody.

    Args:
        wire: the layout of this call.
        peers: everybody's workspace.
        state: of this rank.
        y: [R * M, hidden], one weighted sum a row; or, with ``index``, [N, hidden] expert outputs without weights.
        slots: int32 [R * M, k] that ``receive_tokens`` wrote.
        channel: of the workspace.
        index: int32 [R * M, k] row of y for every choice of this rank, -1 for others.
        shares: float32 [R * M, k], with ``index`` unless deterministic: each row is sum over choices, in ascending slot order and
            in fp32, of shares * y.
        deterministic: every choice's output goes home on its own, without weights.
        tag: names the call in errors.
        programs: most programs of the kernel; nothing here.

    Raises:
        FlagMissed: an earlier wait of this rank failed; the kernel then does nothing, so that the others miss its flag.
    """
    stop_if_failed(state)
    dtype, me, m = DTYPES[wire.dtype], peers.rank, wire.max_tokens
    if index is not None and not deterministic:
        assert shares is not None
        order = slots.masked_fill(slots < 0, wire.slots_per_rank).sort(dim=1, stable=True).indices
        chosen = torch.where(slots < 0, -1, index).gather(1, order)
        y = ordered_sum(y, chosen.long(), shares.gather(1, order))
    for peer in range(wire.n_ranks):
        if not int(state.active[peer]):
            continue
        home, block = blocks_at(wire, peers, peer, channel).home, slice(peer * m, (peer + 1) * m)
        n_rows = 0
        if deterministic:
            assert index is not None
            for choice in range(wire.top_k):
                here = (slots[block, choice] >= 0).nonzero().view(-1)
                home[choice].index_copy_(0, here, y[index[block, choice][here].long()].to(dtype))
                n_rows += len(here)
        else:
            here = (slots[block] >= 0).any(dim=1).nonzero().view(-1)
            home[me].index_copy_(0, here, y[block][here].to(dtype))
            n_rows += len(here)
        if peer != me:
            state.sent[2, peer] += n_rows
    raise_flags(wire, peers, state, phase=COMBINE, channel=channel, count=0)
