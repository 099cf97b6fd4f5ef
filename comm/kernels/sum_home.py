"""One launch that waits for every rank's results and adds them up, token by token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...parallel.kernels.overlap import early_start, enter
from ..heap.peers import Peers
from ..rows import DTYPES
from ..state import PeerState
from ..wire import COMBINE, Wire
from .device import channel_of, pointer_at, wait_flags
from .launching import TYPES, TileConfig, check_choices, check_rows, grid_of, lanes_of, limit_of, pitch_units, registers_of


@triton.jit
def _bits_of_ranks(ids, token, there, takers, n_ranks, slots_per_rank, K: tl.constexpr):
    """int64 [N]: bit r set where one of the choices of ``token`` [N] is of rank r, which is one of ``takers``."""
    bits = token.to(tl.int64) * 0
    for j in tl.static_range(K):
        chosen = tl.load(ids + token.to(tl.int64) * K + j, mask=there, other=-1).to(tl.int32)
        valid = (chosen >= 0) & (chosen < n_ranks * slots_per_rank)
        bits |= tl.where(valid, tl.full(token.shape, 1, tl.int64) << tl.where(valid, chosen // slots_per_rank, 0), 0)
    return bits & takers


@triton.jit
def _next_rank(ids, token, there, after, active, n_ranks, slots_per_rank, K: tl.constexpr):
    """int32 [N]: the lowest active rank above ``after`` [N] that one of the choices of ``token`` [N] is of; n_ranks if none is."""
    lowest = token * 0 + n_ranks
    for j in tl.static_range(K):
        chosen = tl.load(ids + token.to(tl.int64) * K + j, mask=there, other=-1).to(tl.int32)
        valid = (chosen >= 0) & (chosen < n_ranks * slots_per_rank)
        rank = tl.where(valid, chosen // slots_per_rank, 0)
        valid = valid & (rank > after) & (tl.load(active + rank) != 0)
        lowest = tl.where(valid & (rank < lowest), rank, lowest)
    return lowest


@triton.jit
def _row(pointers, rank, base, channel_at, home_at, home_pitch, me, max_tokens, token, PULL: tl.constexpr):
    """Addresses of what ``rank`` adds to the tokens ``token`` [N] of this rank."""
    place = rank * max_tokens
    if PULL:
        there = tl.load(pointers + rank)
        base = tl.where(there != 0, there + channel_at, base)
        place = tl.where(there != 0, me * max_tokens, place)
    return base + home_at + (place + token).to(tl.int64) * home_pitch


@triton.jit
def _read(row, column, hit, HOME: tl.constexpr, HIDDEN: tl.constexpr, COLS: tl.constexpr):
    at = column[:, None] + tl.arange(0, COLS)[None, :]
    return tl.load(pointer_at(row, HOME)[:, None] + at, mask=hit[:, None] & (at < HIDDEN), other=0.0)


@triton.jit
def _write(out, out_pitch, token, column, total, n_tokens, HIDDEN: tl.constexpr, COLS: tl.constexpr):
    at = column[:, None] + tl.arange(0, COLS)[None, :]
    to = out + token.to(tl.int64)[:, None] * out_pitch + at
    tl.store(to, total.to(out.dtype.element_ty), mask=(token < n_tokens)[:, None] & (at < HIDDEN))


@triton.jit
def _read_two(
    first_row, second_row, bits, step, home_pitch,
    HIDDEN: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr, HOME: tl.constexpr,
):  # fmt: skip
    """Piece ``step`` of this program's rows of two ranks, whose first rows are given; zeros where ``bits`` says that there is none."""
    pieces: tl.constexpr = (HIDDEN + COLS - 1) // COLS
    token = (tl.program_id(0) + step // pieces * tl.num_programs(0)) * TOKENS + tl.arange(0, TOKENS)
    at, column = token.to(tl.int64) * home_pitch, token * 0 + step % pieces * COLS
    first = _read(first_row + at, column, bits & 1 != 0, HOME, HIDDEN, COLS)
    return first, _read(second_row + at, column, bits & 2 != 0, HOME, HIDDEN, COLS)


@triton.jit
def _sum_of_two(
    pointers, ids, out, n, n_tokens, base, takers, channel_at, home_at, home_pitch, me, n_ranks, max_tokens, slots_per_rank, out_pitch,
    HIDDEN: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr, HOME: tl.constexpr, PULL: tl.constexpr,
):  # fmt: skip
    """Sums over at most two ranks: the next pieces of both are on their way while one is added."""
    pieces: tl.constexpr = (HIDDEN + COLS - 1) // COLS
    program, programs, line = tl.program_id(0), tl.num_programs(0), tl.arange(0, TOKENS)
    tiles = (n_tokens + TOKENS - 1) // TOKENS
    zero = me * 0
    row = _row(pointers, zero, base, channel_at, home_at, home_pitch, me, max_tokens, zero, PULL)
    other = _row(pointers, zero + tl.minimum(1, n_ranks - 1), base, channel_at, home_at, home_pitch, me, max_tokens, zero, PULL)
    token = program * TOKENS + line
    bits = _bits_of_ranks(ids, token, token < n, takers, n_ranks, slots_per_rank, K)
    first, second = _read_two(row, other, bits, zero, home_pitch, HIDDEN, TOKENS, COLS, HOME)
    for step in range(0, tl.maximum((tiles - program + programs - 1) // programs, 0) * pieces):
        after = step + 1
        if after % pieces == 0:
            token = (program + after // pieces * programs) * TOKENS + line
            bits = _bits_of_ranks(ids, token, token < n, takers, n_ranks, slots_per_rank, K)
        next_first, next_second = _read_two(row, other, bits, after, home_pitch, HIDDEN, TOKENS, COLS, HOME)
        total = first.to(tl.float32) + second.to(tl.float32)
        at = (program + step // pieces * programs) * TOKENS + line
        _write(out, out_pitch, at, line * 0 + step % pieces * COLS, total, n_tokens, HIDDEN, COLS)
        first, second = next_first, next_second


@triton.jit(
    do_not_specialize=[
        "n_tokens", "tag", "channel", "limit", "channel_at", "home_at", "home_pitch", "me", "n_ranks", "max_tokens", "slots_per_rank",
    ]
)  # fmt: skip
def sum_home_kernel(
    pointers, active, epoch, status, ids, weights, n_valid, out,
    n_tokens, tag, channel, limit, channel_at, home_at, home_pitch, me, n_ranks, max_tokens, slots_per_rank, out_pitch,
    HIDDEN: tl.constexpr, UNIT: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
    K: tl.constexpr, RANKS: tl.constexpr, TOGETHER: tl.constexpr,
    HOME: tl.constexpr, EACH: tl.constexpr, PULL: tl.constexpr, TOLERANT: tl.constexpr, CLOCK: tl.constexpr, LANES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Tiles of TOKENS tokens are dealt out in turn. EACH: a row a choice, added with its weight in the order of columns; else a row a rank.

    With up to 64 ranks TOGETHER rows are read at once, of ranks that the token has no choice of none. PULL: rows of mapped ranks
    are read where their ranks laid them.
    """
    enter(EARLY)
    pieces: tl.constexpr = (HIDDEN + COLS - 1) // COLS
    many: tl.constexpr = RANKS > 64
    base = channel_of(pointers, me, channel_at)
    flags = pointer_at(base, tl.int64) + 2 * n_ranks
    lane, line = tl.arange(0, RANKS), tl.arange(0, TOKENS)
    wanted = (lane < n_ranks) & (tl.load(active + lane, mask=lane < n_ranks, other=0) != 0)
    n = n_tokens
    if n_valid is not None:
        n = tl.maximum(tl.minimum(n, tl.load(n_valid)), 0)
    came = wait_flags(
        flags, wanted, lane, n_ranks, tl.load(epoch + channel), active, status, limit, 1, tag, channel, TOLERANT, CLOCK, LANES
    )
    takers = tl.reduce_or(tl.where(came, tl.full(lane.shape, 1, tl.int64) << (lane & 63), 0), 0)
    if RANKS <= 2 and not EACH:
        _sum_of_two(
            pointers, ids, out, n, n_tokens, base, takers, channel_at, home_at, home_pitch, me, n_ranks, max_tokens, slots_per_rank,
            out_pitch * UNIT, HIDDEN, TOKENS, COLS, K, HOME, PULL,
        )  # fmt: skip
        return
    tile = tl.program_id(0)
    while tile * TOKENS < n_tokens:
        token = tile * TOKENS + line
        there = token < n
        if not EACH and not many:
            bits = _bits_of_ranks(ids, token, there, takers, n_ranks, slots_per_rank, K)
        for piece in range(0, pieces):
            column = line * 0 + piece * COLS
            total = tl.zeros((TOKENS, COLS), tl.float32)
            if EACH:
                at = token.to(tl.int64) * K
                for choice in range(0, K):
                    chosen = tl.load(ids + at + choice, mask=there, other=-1).to(tl.int32)
                    owner = chosen // slots_per_rank
                    hit = there & (chosen >= 0) & (owner < n_ranks)
                    hit = hit & (tl.load(active + tl.where(hit, owner, 0)) != 0)
                    weight = tl.load(weights + at + choice, mask=hit, other=0.0)
                    row = home_at + (choice * max_tokens + token).to(tl.int64) * home_pitch
                    total += weight[:, None] * _read(base + row, column, hit, HOME, HIDDEN, COLS).to(tl.float32)
            elif many:
                next_rank = token * 0 - 1
                for _ in range(0, K):
                    next_rank = _next_rank(ids, token, there, next_rank, active, n_ranks, slots_per_rank, K)
                    hit = next_rank < n_ranks
                    row = _row(pointers, tl.where(hit, next_rank, 0), base, channel_at, home_at, home_pitch, me, max_tokens, token, PULL)
                    total += _read(row, column, hit, HOME, HIDDEN, COLS).to(tl.float32)
            else:
                for first in range(0, n_ranks, TOGETHER):
                    for i in tl.static_range(TOGETHER):
                        rank = first + i
                        hit = ((bits >> rank) & 1 != 0) & (rank < n_ranks)
                        row = _row(
                            pointers, tl.minimum(rank, n_ranks - 1), base, channel_at, home_at, home_pitch, me, max_tokens, token, PULL
                        )
                        total += _read(row, column, hit, HOME, HIDDEN, COLS).to(tl.float32)
            _write(out, out_pitch * UNIT, token, column, total, n_tokens, HIDDEN, COLS)
        tile += tl.num_programs(0)


def sum_home(
    wire: Wire,
    peers: Peers,
    state: PeerState,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    *,
    channel: int,
    timeout_ms: int,
    fault_tolerant: bool,
    deterministic: bool,
    n_valid: torch.Tensor | None = None,
    tag: int = 0,
    programs: int = 32,
    pull: bool = False,
    config: TileConfig | None = None,
) -> None:
    """Finish the way back on ``channel``; the channel is free then.

    Args:
        wire: the layout.
        peers: the workspaces.
        state: of this rank's dispatcher; a rank that does not come is reported in ``status``.
        ids: [T, k] int32 or int64, as they were sent.
        weights: float32 [T, k], as they were sent; used with ``deterministic``.
        out: [T, hidden] to write, columns contiguous: fp32 sums over the token's ranks in ascending order, or with ``deterministic``
            of weights times results in the order of columns. Inactive ranks add nothing; rows from ``n_valid`` on are 0.
        channel: that was sent on.
        timeout_ms: the longest wait for a rank.
        fault_tolerant: a missing rank becomes inactive and adds nothing; else all later waits end at once.
        deterministic: as ``send_home`` was called.
        n_valid: int32 [1] on the device: tokens that were sent, None for all.
        tag: names the call in ``status``.
        programs: the most that are launched.
        pull: as ``send_home`` was called.
        config: overrides how it is launched.

    Raises:
        ValueError: an argument does not have this form.
    """
    n, k, hidden = out.shape[0], wire.top_k, wire.hidden
    check_rows("out", out, hidden, wire.max_tokens)
    check_choices("ids", ids, n, k, (torch.int32, torch.int64))
    check_choices("weights", weights, n, k, (torch.float32,))
    if pull and deterministic:
        raise ValueError("results that go home one by one (deterministic) cannot be pulled; call sum_home without pull")
    config = config or TileConfig.to_sum(n, wire.hidden, programs, rows=k if deterministic else wire.n_ranks)
    pitch, unit = pitch_units(out)
    sum_home_kernel[(grid_of(programs, triton.cdiv(n, config.tokens)),)](
        peers.pointers, state.active, state.epoch, state.status, ids, weights, n_valid, out,
        n, tag, channel, limit_of(timeout_ms, out.is_cuda), channel * wire.channel_bytes, wire.home_at, wire.home_pitch,
        peers.rank, wire.n_ranks, wire.max_tokens, wire.slots_per_rank, pitch,
        HIDDEN=hidden, UNIT=unit, TOKENS=config.tokens, COLS=config.piece,
        K=k, RANKS=lanes_of(wire.n_ranks), TOGETHER=min(8, lanes_of(wire.n_ranks)),
        HOME=TYPES[DTYPES[wire.dtype]], EACH=deterministic, PULL=pull, TOLERANT=fault_tolerant, CLOCK=out.is_cuda, LANES=32 * config.warps,
        num_warps=config.warps, maxnreg=registers_of(config.warps), **early_start(out.device),
    )  # fmt: skip


assert COMBINE == 1  # the phase that the kernel names
