"""One launch that stores the experts' results into the workspaces of the tokens' ranks, and says that it is done."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...parallel.kernels.overlap import early_start, enter
from ..heap.peers import Peers
from ..rows import DTYPES
from ..state import PeerState
from ..wire import COMBINE, Wire
from .device import channel_of, is_last, may_send, pointer_at, raise_flags
from .launching import TYPES, TileConfig, as_words, check_choices, check_rows, grid_of, lanes_of, pitch_units, registers_of
from .tiles import load_tile, store_tile

#: for results that lie at home: nothing but their number is found out
_COUNTING = TileConfig(tokens=128, piece=16, warps=4)


@triton.jit
def tokens_of(pointers, active, flags, source, epoch, max_tokens, channel_at):
    """(tokens that ``source`` sent in this epoch, address of its channel); (0, 0) of a rank that takes no part or is not mapped."""
    channel = channel_of(pointers, source, channel_at)
    channel = tl.where(tl.load(active + source) != 0, channel, 0)
    n = tl.load(flags + 2 * source + 1)
    there = (channel != 0) & (tl.load(flags + 2 * source) == epoch) & (n >= 0) & (n <= max_tokens)
    return tl.where(there, n, 0).to(tl.int32), channel


@triton.jit
def in_slot_order(slot, choice, CHOICES: tl.constexpr):
    """[CHOICES, CHOICES] with True at (i, j) where column j has the i-th lowest slot, columns in their order where it is the same."""
    key = tl.where(slot >= 0, slot * CHOICES + choice, 0x7FFFFFFF - CHOICES + choice)
    place = tl.sum((key[:, None] < key[None, :]).to(tl.int32), 0)
    return choice[:, None] == place[None, :]


@triton.jit(
    do_not_specialize=[
        "channel", "channel_at", "home_at", "home_step", "home_pitch", "flag_at", "me", "n_ranks", "max_tokens",
    ]
)  # fmt: skip
def send_home_kernel(
    pointers, active, epoch, arrived, sent, status, y, slots, index, shares,
    channel, channel_at, home_at, home_step, home_pitch, flag_at, me, n_ranks, max_tokens, y_pitch,
    WIDTH: tl.constexpr, UNIT: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr,
    MODE: tl.constexpr, OUT: tl.constexpr, PULL: tl.constexpr, IN_PLACE: tl.constexpr,
    ON_GPU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """MODE "rows": row r of y goes home as it is. "sum": the weighted sum of the rows of y in ``index``. "each": every one of them.

    Tiles of TOKENS rows of all sources are dealt out to the programs in turn, nearest source first, this rank last.
    ``home_step`` is the distance from the results of one choice to those of the next ("each"), in units of 16 bytes. PULL: rows
    for ranks that are mapped are laid out at home, for them to fetch; IN_PLACE: they lie there already.
    """
    enter(EARLY)
    pieces: tl.constexpr = (WIDTH + COLS - 1) // COLS
    own = channel_of(pointers, me, channel_at)
    flags = pointer_at(own, tl.int64)
    now = tl.load(epoch + channel)
    may = may_send(status, active)
    lane = tl.arange(0, RANKS)
    bases = tl.load(pointers + lane, mask=lane < n_ranks, other=0)
    served = may & (bases != 0) & (tl.load(active + lane, mask=lane < n_ranks, other=0) != 0)
    line = tl.arange(0, TOKENS)
    one = (line * 0 + 1).to(tl.int64)
    programs = tl.num_programs(0)
    tile = tl.program_id(0)
    for i in range(0, n_ranks):
        source = (me + 1 + i) % n_ranks
        n, peer = tokens_of(pointers, active, flags, source, now, max_tokens, channel_at)
        n = tl.where(may, n, 0)
        if PULL:
            peer = own + (source - me).to(tl.int64) * max_tokens * home_pitch
        tiles = (n + TOKENS - 1) // TOKENS
        while tile < tiles:
            token = tile * TOKENS + line
            first = (source * max_tokens + token).to(tl.int64) * K
            hit = token < 0
            for j in tl.static_range(K):
                hit = hit | (tl.load((slots if MODE == "rows" else index) + first + j, mask=token < n, other=-1) >= 0)
            address = peer + home_at + token.to(tl.int64) * home_pitch
            tl.atomic_add(
                sent + 2 * n_ranks + source + line * 0, one, mask=hit & (source != me) & (MODE != "each"), sem="relaxed", scope="gpu"
            )
            if not IN_PLACE:
                if MODE == "rows":
                    ahead = load_tile(y, y_pitch * UNIT, source * max_tokens + token, line * 0, hit, WIDTH, COLS)
                for piece in range(0, pieces):
                    column = line * 0 + piece * COLS
                    if MODE == "rows":
                        rows = ahead
                        ahead = load_tile(y, y_pitch * UNIT, source * max_tokens + token, column + COLS, hit, WIDTH, COLS)
                        store_tile(address, column, rows.to(OUT), hit, WIDTH, COLS)
                    elif MODE == "sum":
                        total = tl.zeros((TOKENS, COLS), tl.float32)
                        for j in tl.static_range(K):
                            place = tl.load(index + first + j, mask=token < n, other=-1)
                            share = tl.load(shares + first + j, mask=place >= 0, other=0.0)
                            total += share[:, None] * load_tile(y, y_pitch * UNIT, place, column, place >= 0, WIDTH, COLS).to(tl.float32)
                        store_tile(address, column, total.to(OUT), hit, WIDTH, COLS)
                    else:
                        for nth in range(0, K):
                            place = tl.load(index + first + nth, mask=token < n, other=-1)
                            rows = load_tile(y, y_pitch * UNIT, place, column, place >= 0, WIDTH, COLS)
                            store_tile(address + home_step.to(tl.int64) * (16 * nth), column, rows.to(OUT), place >= 0, WIDTH, COLS)
                            counted = (place >= 0) & (source != me) & (piece == 0)
                            tl.atomic_add(sent + 2 * n_ranks + source + line * 0, one, mask=counted, sem="relaxed", scope="gpu")
            tile += programs
        tile -= tiles
    if is_last(arrived + 2 * channel + 1):
        raise_flags(bases + channel_at, served, flag_at, 0, now, RANKS, ON_GPU)


def _config(mode: str, top_k: int, n_rows: int, width: int, programs: int) -> TileConfig:
    """How ``send_home`` is launched for about ``n_rows`` rows."""
    if mode == "sum":
        return TileConfig.to_sum(n_rows, width, programs, rows=top_k)
    return TileConfig.to_move(n_rows, width, programs, piece=512)


def send_home(
    wire: Wire,
    peers: Peers,
    state: PeerState,
    y: torch.Tensor,
    slots: torch.Tensor,
    *,
    channel: int,
    index: torch.Tensor | None = None,
    shares: torch.Tensor | None = None,
    deterministic: bool,
    tag: int = 0,
    programs: int,
    pull: bool = False,
    config: TileConfig | None = None,
) -> None:
    """Start the way back of the dispatch that was last received on ``channel``.

    Args:
        wire: the layout.
        peers: the workspaces.
        state: of this rank's dispatcher. After a failure nothing happens, see ``device.may_send``.
        y: without ``index`` [R * M, hidden], what this rank's experts add to each token; rows without a slot of this rank are not
            read. With it [N, hidden] outputs of experts. Columns contiguous; rounded to ``wire.dtype``.
        slots: int32 [R * M, k] of ``receive_tokens``.
        channel: that was received on.
        index: int32 [R * M, k], the row of ``y`` for every choice, -1 where the slot is.
        shares: float32 [R * M, k] of ``receive_tokens``: the weighted sum of a token's rows is sent, in fp32 in the order of
            columns: of slots, if the choices were sent in that order. Not with ``deterministic``.
        deterministic: every row in ``index`` goes home by itself and unweighted.
        pull: lay the results out in this rank's own workspace, for the others to fetch, who call ``sum_home`` so too. ``y`` may be
            that memory, ``Blocks.home``: then nothing is moved. Not with ``deterministic``, and all ranks must be mapped.
        tag: names the call; not used by a send.
        programs: the most that are launched, so the most multiprocessors that are taken.
        config: overrides how it is launched.

    Raises:
        ValueError: an argument does not have this form.
    """
    n, k = wire.n_ranks * wire.max_tokens, wire.top_k
    mode = "each" if deterministic else "rows" if index is None else "sum"
    check_choices("slots", slots, n, k, (torch.int32,))
    if (index is None) != (mode == "rows") or (shares is None) != (mode != "sum"):
        given = f"index {'missing' if index is None else 'given'}, shares {'missing' if shares is None else 'given'}"
        raise ValueError(f"send_home takes rows alone, or an index with shares, or, deterministic, an index alone; found {given}")
    check_rows("y", y, wire.hidden, n if index is None else 1 << 40)
    if index is None and y.shape[0] != n:
        raise ValueError(f"y must have {n} rows (ranks x max_tokens) without an index, found {y.shape[0]}")
    for name, table, dtype in (("index", index, torch.int32), ("shares", shares, torch.float32)):
        if table is not None:
            check_choices(name, table, n, k, (dtype,))
    dtype = DTYPES[wire.dtype]
    if y.dtype == dtype and mode != "sum":
        y = as_words(y)
        dtype = y.dtype
    if pull and deterministic:
        raise ValueError("results that go home one by one (deterministic) cannot be pulled; call send_home without pull")
    width, me = y.shape[1], peers.rank
    pitch, unit = pitch_units(y)
    at_home = peers.own.data_ptr() + channel * wire.channel_bytes + wire.home_at
    in_place = pull and mode == "rows" and y.data_ptr() == at_home and y.stride(0) * y.element_size() == wire.home_pitch
    config = config or (_COUNTING if in_place else _config(mode, k, wire.n_ranks * wire.max_tokens // 2, width, programs))
    home = wire.home_at + (0 if deterministic else me * wire.max_tokens * wire.home_pitch)
    send_home_kernel[(grid_of(programs, triton.cdiv(n, config.tokens)),)](
        peers.pointers, state.active, state.epoch, state.arrived, state.sent, state.status, y, slots, index, shares,
        channel, channel * wire.channel_bytes, home, wire.max_tokens * wire.home_pitch // 16, wire.home_pitch,
        16 * (COMBINE * wire.n_ranks + me), me, wire.n_ranks, wire.max_tokens, pitch,
        WIDTH=width, UNIT=unit, TOKENS=config.tokens, COLS=config.piece, K=k, RANKS=lanes_of(wire.n_ranks),
        MODE=mode, OUT=TYPES[dtype], PULL=pull, IN_PLACE=in_place,
        ON_GPU=y.is_cuda,
        num_warps=config.warps, maxnreg=registers_of(config.warps), **early_start(y.device),
    )  # fmt: skip
