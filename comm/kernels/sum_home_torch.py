"""``sum_home`` in plain PyTorch: the same signature and results."""

from __future__ import annotations

import time

import torch

from ..blocks import blocks_at
from ..heap.peers import Peers
from ..order import ordered_sum
from ..state import PeerState
from ..wire import COMBINE, Wire
from .wait_torch import await_flag


def sum_home(
    wire: Wire, peers: Peers, state: PeerState, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, *,
    channel: int, timeout_ms: int, fault_tolerant: bool, deterministic: bool, n_valid: torch.Tensor | None = None,
    tag: int = 0, programs: int = 1,
) -> None:  # fmt: skip
    """Wait for everybody's results and add those of this rank's tokens.

    Args:
        wire: the layout of this call.
        peers: everybody's workspace.
        state: of this rank.
        ids: int32 [T, k] global slots of this rank's tokens, as sent.
        weights: float32 [T, k], as sent.
        out: [T, hidden], written: sums in fp32 over the ranks of a token, ascending; deterministic: over its choices in the
            order of columns, of weight * output. Ranks that take no part add nothing; tokens from ``n_valid`` on are zeros.
        channel: of the workspace.
        timeout_ms: longest wait for a rank.
        fault_tolerant: a rank that does not come takes no further part, instead of an error.
        deterministic: as it was in ``send_home``.
        n_valid: int32 [1] as sent, or None.
        tag: names the call in errors.
        programs: most programs of the kernel; nothing here.

    Raises:
        FlagMissed: see ``wait_torch.await_flag``; the kernel leaves ``state.status`` instead.
    """
    blocks, begin = blocks_at(wire, peers, peers.rank, channel), time.monotonic()
    came = [
        await_flag(
            wire, peers, state, blocks,
            phase=COMBINE, channel=channel, source=source, timeout_ms=timeout_ms, fault_tolerant=fault_tolerant, tag=tag, begin=begin,
        ) is not None
        for source in range(wire.n_ranks)
    ]  # fmt: skip
    n = len(ids) if n_valid is None else max(0, min(int(n_valid), len(ids)))
    m, hidden = wire.max_tokens, wire.hidden
    ranks = torch.div(ids[:n], wire.slots_per_rank, rounding_mode="floor")
    there = torch.tensor([*came, False], device=ids.device)[ranks.long()]  # -1 finds the last
    token = torch.arange(n, device=ids.device).unsqueeze(1)
    rows = blocks.home.reshape(-1, hidden)
    if deterministic:
        place = torch.where(there, torch.arange(wire.top_k, device=ids.device) * m + token, -1)
        out[:n] = ordered_sum(rows, place, weights[:n]).to(out.dtype)
    else:
        wanted = torch.stack([((ranks == r) & there).any(dim=1) for r in range(wire.n_ranks)], dim=1)
        place = torch.where(wanted, torch.arange(wire.n_ranks, device=ids.device) * m + token, -1)
        out[:n] = ordered_sum(rows, place).to(out.dtype)
    out[n:] = 0
