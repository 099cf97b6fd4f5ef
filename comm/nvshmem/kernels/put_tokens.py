"""The tokens that ``send_tokens`` has left in this rank's own workspace, put to the ranks that cannot be mapped.

``send_tokens`` goes first, with this rank's own address in the place of every unmapped one (``staged``): it makes the rows, in
``rows[me]`` of the own workspace, and the copy of all choices. An address in symmetric memory means the same place on every PE, so
each row is put to where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ...heap.peers import Peers
from ...kernels.device import is_last
from ...state import PeerState
from ...wire import DISPATCH, Wire
from ..externs import SIGNAL_SET, narrow, putmem_nbi_block, putmem_signal_block, quiet, wide
from ..launch import launch

_SET = SIGNAL_SET


@triton.jit
def _wants(ids, low, high, K: tl.constexpr, CHOICES: tl.constexpr):
    """Whether one of the token's choices, at ``ids``, is a slot from ``low`` up to ``high``."""
    j = tl.arange(0, CHOICES)
    id = tl.load(ids + j, mask=j < K, other=-1)
    return tl.max(((id >= low) & (id < high)).to(tl.int32), 0) != 0


@triton.jit
def put_flags(channel, pointers, active, me, flag_at, epoch, first, step, count):
    """(epoch, count) into this rank's flag at every active rank that is not mapped; the count is taken from this rank's own flag.

    What this program has put before, and waited for, is there first. By one program, all its threads.
    """
    flag = channel + flag_at + 16 * me
    for i in range(0, count):
        rank = first + i * step
        if (tl.load(pointers + rank) == 0) & (tl.load(active + rank) != 0):
            putmem_signal_block(flag + 8, flag + 8, wide(8), flag, epoch, narrow(_SET), narrow(rank))


@triton.jit(do_not_specialize=[  # a literal 1 would become a constant of another type
    "channel_at", "ids_at", "weights_at", "rows_at", "row_bytes", "max_tokens", "me", "first", "step", "count", "span",
])  # fmt: skip
def put_tokens_kernel(
    pointers, active, epochs, arrived, status, channel_at, ids_at, weights_at, rows_at, row_bytes, max_tokens, me, first, step, count, span,
    K: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Programs take tokens in turn, for one rank after the other; a rank's choices go by one of them in two puts.

    The ranks are ``first + i * step`` for i below ``count``; the i-th wants tokens for slots from ``i * span`` up to the next's.
    """
    if tl.load(status) != 0:  # after a failed wait nothing may look as if it were complete
        return
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs)  # raised by send_tokens
    channel = tl.load(pointers + me) + channel_at
    n = tl.load((channel + 16 * me + 8).to(tl.pointer_type(tl.int64)))  # as announced to this rank itself
    block = wide(me) * max_tokens
    ids, weights, rows = channel + ids_at + block * 4 * K, channel + weights_at + block * 4 * K, channel + rows_at + block * row_bytes
    for i in range(0, count):
        rank = first + i * step
        if (tl.load(pointers + rank) == 0) & (tl.load(active + rank) != 0):
            pe = narrow(rank)
            if (rank % programs == program) & (n > 0):
                putmem_nbi_block(ids, ids, n * 4 * K, pe)
                putmem_nbi_block(weights, weights, n * 4 * K, pe)
            for token in range(program, n, programs):
                if _wants((ids + wide(token) * 4 * K).to(tl.pointer_type(tl.int32)), i * span, (i + 1) * span, K, CHOICES):
                    row = rows + wide(token) * row_bytes
                    putmem_nbi_block(row, row, wide(row_bytes), pe)
    quiet()
    if is_last(arrived):
        put_flags(channel, pointers, active, me, 0, epoch, first, step, count)


def staged(peers: Peers) -> Peers:
    """``peers`` with this rank's own memory in the place of what cannot be mapped."""
    own = peers.pointers[peers.rank]
    views = tuple(peers.own if view is None else view for view in peers.views)
    return Peers(rank=peers.rank, views=views, pointers=torch.where(peers.pointers == 0, own, peers.pointers))


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The ranks that a put may serve: ``first + i * step`` for i below ``count``."""

    first: int
    step: int
    count: int
    span: int  # the i-th hosts slots from i * span up to (i + 1) * span, or passes them on

    @classmethod
    def everybody(cls, wire: Wire) -> Reach:
        """All ranks."""
        return cls(first=0, step=1, count=wire.n_ranks, span=wire.slots_per_rank)


def put_tokens(wire: Wire, peers: Peers, state: PeerState, *, channel: int, programs: int, reach: Reach | None = None) -> None:
    """Put what ``send_tokens(wire, staged(peers), state, ...)`` has just left in this rank's workspace to the unmapped ranks of ``reach``.

    Every program waits for its own rows to arrive; then the last one puts the flags. Same stream as ``send_tokens``.
    """
    assert DISPATCH == 0  # its flags lie first in the channel
    reach = reach or Reach.everybody(wire)
    args: tuple[Any, ...] = (
        peers.pointers, state.active, state.epoch[channel:], state.arrived[channel], state.status, channel * wire.channel_bytes,
        wire.ids_at, wire.weights_at, wire.rows_at, wire.row_bytes, wire.max_tokens, peers.rank,
        reach.first, reach.step, reach.count, reach.span,
    )  # fmt: skip
    launch(put_tokens_kernel, (programs,), *args, K=wire.top_k, CHOICES=triton.next_power_of_2(wire.top_k), num_warps=4)
