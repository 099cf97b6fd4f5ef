"""Results for tokens of ranks that cannot be mapped: made row by row in symmetric memory of this rank, and put home from there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...heap.peers import Peers
from ...kernels.device import is_last
from ...kernels.launching import TYPES, as_words, lanes_of, pitch_units
from ...kernels.row import load_piece
from ...kernels.send_home import in_slot_order
from ...rows import DTYPES
from ...state import PeerState
from ...wire import COMBINE, Wire
from ..externs import narrow, putmem_nbi_block, quiet, wide
from ..launch import launch
from .put_tokens import Reach, put_flags

RING = 8  # rows that a program may have on their way at a time
_RING = tl.constexpr(RING)


@triton.jit
def _tokens(channel, active, rank, epoch, max_tokens):
    """Tokens that came from ``rank`` in this epoch; 0 of one that takes no part."""
    flag = (channel + 16 * rank).to(tl.pointer_type(tl.int64))
    n = tl.load(flag + 1)
    there = (tl.load(active + rank) != 0) & (tl.load(flag) == epoch) & (n >= 0) & (n <= max_tokens)
    return tl.where(there, n, 0).to(tl.int32)


@triton.jit(do_not_specialize=[
    "channel", "channel_at", "home_at", "home_step", "home_pitch", "home_bytes", "flag_at", "me", "n_ranks", "max_tokens",
    "first", "step", "count",
])  # fmt: skip
def put_home_kernel(
    pointers, active, epochs, arrived, status, sent, y, slots, index, shares, ring,
    channel, channel_at, home_at, home_step, home_pitch, home_bytes, flag_at, me, n_ranks, max_tokens, y_pitch, first, step, count,
    WIDTH: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr,
    MODE: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """MODE as in ``send_home_kernel``; ``home_at`` and ``home_step`` in bytes. ``ring`` holds RING rows a program.

    Serves the ranks ``first + i * step`` for i below ``count``; rows i * max_tokens and on of ``slots`` are the i-th's.
    """
    if tl.load(status) != 0:  # after a failed wait nothing may look as if it were complete
        return
    program, programs = tl.program_id(0), tl.num_programs(0)
    own = tl.load(pointers + me) + channel_at
    epoch = tl.load(epochs + channel)
    choice = tl.arange(0, CHOICES)
    used = 0
    for i in range(0, count):
        rank = first + i * step
        if tl.load(pointers + rank) == 0:
            n = _tokens(own, active, rank, epoch, max_tokens)
            stored = 0
            for token in range(program, n, programs):
                at = wide(i * max_tokens + token) * K
                slot = tl.load(slots + at + choice, mask=choice < K, other=-1)
                if tl.max(slot, 0) >= 0:
                    home = own + home_at + wide(token) * home_pitch
                    rows = K if MODE == "each" else 1
                    for j in range(0, rows):
                        line = i * max_tokens + token
                        if MODE == "each":
                            line = tl.where(tl.load(slots + at + j) >= 0, tl.load(index + at + j), -1)
                        if line >= 0:
                            if used == _RING:  # the ring is full: wait until its rows have left
                                quiet()
                                tl.debug_barrier()
                                used = 0
                            stage = tl.multiple_of(ring + wide(program * _RING + used) * home_pitch, 16)
                            for piece in range(0, (WIDTH + BLOCK - 1) // BLOCK):
                                column = piece * BLOCK + tl.arange(0, BLOCK)
                                if MODE == "sum":
                                    lines = tl.where(slot >= 0, tl.load(index + at + choice, mask=choice < K, other=-1), -1)
                                    share = tl.load(shares + at + choice, mask=choice < K, other=0.0)
                                    order = in_slot_order(slot, choice, CHOICES)
                                    lines = tl.sum(tl.where(order, lines[None, :], 0), 1)
                                    share = tl.sum(tl.where(order, share[None, :], 0.0), 1)
                                    from_ = y + lines.to(tl.int64)[:, None] * (y_pitch * UNIT) + column[None, :]
                                    tile = tl.load(from_, mask=(lines >= 0)[:, None] & (column < WIDTH)[None, :], other=0.0)
                                    total = tl.sum(tl.where(lines >= 0, share, 0.0)[:, None] * tile.to(tl.float32), 0)
                                else:
                                    total = load_piece(y, y_pitch * UNIT, line, piece, True, WIDTH, BLOCK)
                                tl.store(stage.to(tl.pointer_type(OUT)) + column, total.to(OUT), mask=column < WIDTH)
                            tl.debug_barrier()  # the whole row is there before any thread sends a part of it
                            putmem_nbi_block(home + wide(j) * home_step, stage, wide(home_bytes), narrow(rank))
                            used += 1
                            stored += 1
            if stored > 0:
                tl.atomic_add(sent + 2 * n_ranks + rank, wide(stored), sem="relaxed", scope="gpu")
    quiet()
    if is_last(arrived + 2 * channel + 1):
        put_flags(own, pointers, active, me, flag_at, epoch, first, step, count)


def ring_bytes(wire: Wire, programs: int) -> int:
    """Bytes of symmetric memory that ``put_home`` of ``programs`` programs stages in, for all channels."""
    return wire.depth * programs * RING * wire.home_pitch


def put_home(
    wire: Wire, peers: Peers, state: PeerState, y: torch.Tensor, slots: torch.Tensor, ring: torch.Tensor, *,
    channel: int, index: torch.Tensor | None, shares: torch.Tensor | None, deterministic: bool, programs: int,
    reach: Reach | None = None, block: int | None = None,
) -> None:  # fmt: skip
    """``send_home`` for the ranks that are not mapped, right after it on the same stream.

    ``ring`` is symmetric, uint8 [ring_bytes(wire, programs)]. The other arguments are those of ``comm.kernels.send_home``. With a
    ``reach``, slots and index have rows for its ranks alone; ``block`` is the place in ``home`` to write to, this rank's by default.
    """
    reach = reach or Reach.everybody(wire)
    place = peers.rank if block is None else block
    mode = "each" if deterministic else "rows" if index is None else "sum"
    dtype = DTYPES[wire.dtype]
    if y.dtype == dtype and mode != "sum":
        y = as_words(y)
        dtype = y.dtype
    width, (pitch, unit) = y.shape[1], pitch_units(y)
    lanes = lanes_of(min(width, 2048))
    home = wire.home_at + (0 if deterministic else place * wire.max_tokens * wire.home_pitch)
    launch(
        put_home_kernel, (programs,),
        peers.pointers, state.active, state.epoch, state.arrived, state.status, state.sent, y, slots, index, shares,
        ring.data_ptr() + channel * programs * RING * wire.home_pitch,
        channel, channel * wire.channel_bytes, home, wire.max_tokens * wire.home_pitch, wire.home_pitch, wire.hidden * wire.home_itemsize,
        16 * COMBINE * wire.n_ranks, peers.rank, wire.n_ranks, wire.max_tokens, pitch, reach.first, reach.step, reach.count,
        WIDTH=width, UNIT=unit, BLOCK=lanes, K=slots.shape[1], CHOICES=lanes_of(slots.shape[1]), MODE=mode, OUT=TYPES[dtype],
        num_warps=max(1, min(8, lanes // 256)),
    )  # fmt: skip
