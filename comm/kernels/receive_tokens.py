"""One launch that waits for every rank's tokens and says which local experts they chose."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...parallel.kernels.overlap import early_start, enter
from ..heap.peers import Peers
from ..state import PeerState
from ..wire import DISPATCH, Wire
from .device import channel_of, checked_count, pointer_at, wait_flags
from .launching import check_choices, grid_of, lanes_of, limit_of, registers_of

_BLOCKS = (512, 2048)  # choices that a program looks at at once: fewest and most


@triton.jit(
    do_not_specialize=[
        "tag", "channel", "limit", "channel_at", "ids_at", "weights_at", "me", "n_ranks", "max_tokens", "slots_per_rank", "blocks",
    ]
)  # fmt: skip
def receive_tokens_kernel(
    pointers, active, epoch, status, slots, shares,
    tag, channel, limit, channel_at, ids_at, weights_at, me, n_ranks, max_tokens, slots_per_rank, blocks,
    K: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, TOLERANT: tl.constexpr, CLOCK: tl.constexpr, LANES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Items are (block, source): all sources of a block before the next block. Every one of them waits for its source."""
    enter(EARLY)
    base = channel_of(pointers, me, channel_at)
    flags = pointer_at(base, tl.int64)
    wanted_epoch = tl.load(epoch + channel)
    lane = tl.arange(0, RANKS)
    item = tl.program_id(0)
    while item < n_ranks * blocks:
        source = (me + 1 + item) % n_ranks
        block = item // n_ranks
        takes_part = tl.load(active + source) != 0
        wanted = (lane == source) & takes_part
        came = wait_flags(flags, wanted, lane, n_ranks, wanted_epoch, active, status, limit, 0, tag, channel, TOLERANT, CLOCK, LANES)
        n = 0
        if tl.max(came.to(tl.int32), 0) != 0:
            n = checked_count(flags, source, wanted_epoch, max_tokens, status, tag, channel).to(tl.int32)
        at = block * BLOCK + tl.arange(0, BLOCK)
        there, within = at < n * K, at < max_tokens * K
        at += source * max_tokens * K
        chosen = tl.load(pointer_at(base + ids_at, tl.int32) + at, mask=there, other=-1)
        weight = tl.load(pointer_at(base + weights_at, tl.float32) + at, mask=there, other=0.0)
        local = chosen - me * slots_per_rank
        mine = there & (chosen >= 0) & (local >= 0) & (local < slots_per_rank)
        tl.store(slots + at, tl.where(mine, local, -1), mask=within)
        tl.store(shares + at, tl.where(mine, weight, 0.0), mask=within)
        item += tl.num_programs(0)


def receive_tokens(
    wire: Wire,
    peers: Peers,
    state: PeerState,
    slots: torch.Tensor,
    shares: torch.Tensor,
    *,
    channel: int,
    timeout_ms: int,
    fault_tolerant: bool,
    tag: int = 0,
    programs: int = 32,
) -> None:
    """Finish the dispatch that this rank's last ``send_tokens`` on ``channel`` started.

    Args:
        wire: the layout.
        peers: the workspaces.
        state: of this rank's dispatcher; a source that does not come is reported in ``status``, see ``Status``.
        slots: int32 [R * M, k] to write: the local slot of choice j of row r * M + t, which is token t of rank r; -1 for a choice
            of another rank's slot, none, and rows past what rank r sent or of a rank that did not send.
        shares: float32 [R * M, k] to write: the weights of ``slots``, 0 where that is -1.
        channel: that was sent on.
        timeout_ms: the longest wait for a rank.
        fault_tolerant: a missing rank becomes inactive and nothing else ends; else all later waits end at once.
        tag: names the call in ``status``.
        programs: the most that are launched.

    Raises:
        ValueError: an argument does not have this form.
    """
    check_choices("slots", slots, wire.n_ranks * wire.max_tokens, wire.top_k, (torch.int32,))
    check_choices("shares", shares, wire.n_ranks * wire.max_tokens, wire.top_k, (torch.float32,))
    choices = wire.max_tokens * wire.top_k
    block = max(_BLOCKS[0], min(_BLOCKS[1], lanes_of(triton.cdiv(wire.n_ranks * choices, programs))))  # one item a program, if it can be
    blocks, warps = triton.cdiv(choices, block), max(4, block // 256)
    receive_tokens_kernel[(grid_of(programs, wire.n_ranks * blocks),)](
        peers.pointers, state.active, state.epoch, state.status, slots, shares,
        tag, channel, limit_of(timeout_ms, slots.is_cuda), channel * wire.channel_bytes, wire.ids_at, wire.weights_at,
        peers.rank, wire.n_ranks, wire.max_tokens, wire.slots_per_rank, blocks,
        K=wire.top_k, RANKS=lanes_of(wire.n_ranks), BLOCK=block, TOLERANT=fault_tolerant, CLOCK=slots.is_cuda, LANES=32 * warps,
        num_warps=warps, maxnreg=registers_of(warps), **early_start(slots.device),
    )  # fmt: skip


assert DISPATCH == 0  # the phase that the kernel names
