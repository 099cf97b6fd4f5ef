"""One launch that stores every token into the workspaces of the ranks of its experts, and says that it is done."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...parallel.kernels.overlap import early_start, enter
from ..blocks import value_dtype
from ..heap.peers import Peers
from ..state import PeerState
from ..wire import DISPATCH, FP8_BLOCK, Wire
from .destinations import count_rows, destinations
from .device import is_last, may_send, pointer_at, raise_flags
from .launching import TileConfig, as_words, check_choices, check_rows, grid_of, lanes_of, pitch_units, registers_of
from .tiles import load_tile, quantise_tile, store_scales, store_tile

_ROW = tl.constexpr(0xFFFF)  # of what goes with a scale: which row of the tile it is of, and from the next bit on the row's destinations
_BITS_AT = tl.constexpr(16)
_MOST_CHOICES = 2048  # ids and weights that a program copies at once
_MOST_IN_TURN = 16  # ranks that are gone through for every token; among more, its choices are
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_IDS = (torch.int32, torch.int64)


@triton.jit
def _store_choices(pointers, served, lane, chosen, weight, at, inside, place, channel_at, ids_at, weights_at, me, n_ranks):
    """Choices ``at`` [N] of this rank's tokens to everybody who is ``served`` [RANKS]; ``place`` is this rank's first."""
    for i in range(0, n_ranks):
        rank = (me + 1 + i) % n_ranks
        base = tl.load(pointers + rank) + channel_at
        there = inside & (tl.max((served & (lane == rank)).to(tl.int32), 0) != 0)
        tl.store(pointer_at(base + ids_at, tl.int32) + place + at, chosen, mask=there)
        tl.store(pointer_at(base + weights_at, tl.float32) + place + at, weight, mask=there)


@triton.jit(
    do_not_specialize=[
        "n_tokens", "channel", "first_row", "channel_at", "ids_at", "weights_at", "rows_at", "row_bytes", "flag_at",
        "me", "n_ranks", "slots_per_rank", "scales_pitch", "scales_step",
    ]
)  # fmt: skip
def send_tokens_kernel(
    pointers, active, epoch, arrived, sent, status, x, scales, ids, weights, n_valid,
    n_tokens, channel, first_row, channel_at, ids_at, weights_at, rows_at, row_bytes, flag_at,
    me, n_ranks, slots_per_rank, x_pitch, scales_pitch, scales_step,
    WIDTH: tl.constexpr, UNIT: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr, COLS: tl.constexpr,
    K: tl.constexpr, CHOICES: tl.constexpr, RANKS: tl.constexpr, MANY: tl.constexpr,
    QUANTISE: tl.constexpr, UE8M0: tl.constexpr, FIXES: tl.constexpr, CAST: tl.constexpr, ON_GPU: tl.constexpr,
    SCALES: tl.constexpr, BLOCKS: tl.constexpr, SCALES_AT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Tiles of TOKENS tokens are dealt out to the programs in turn, piece by piece; the next piece is on its way while one is stored.

    ``first_row`` is the place of this rank's first token, ``rows_at`` its block in a channel. Peers are served in the order of
    their distance, this rank last, so that not all ranks begin with the same one.
    """
    enter(EARLY)
    pieces: tl.constexpr = (WIDTH + GROUPS * COLS - 1) // (GROUPS * COLS)
    program, programs = tl.program_id(0), tl.num_programs(0)
    n = n_tokens
    if n_valid is not None:
        n = tl.maximum(tl.minimum(n, tl.load(n_valid)), 0)
    lane = tl.arange(0, RANKS)
    bases = tl.load(pointers + lane, mask=lane < n_ranks, other=0)
    served = (bases != 0) & (tl.load(active + lane, mask=lane < n_ranks, other=0) != 0)
    row = tl.arange(0, TOKENS * GROUPS)
    line, within = row // GROUPS, row % GROUPS * COLS
    tiles = (n + TOKENS - 1) // TOKENS
    steps = tl.maximum((tiles - program + programs - 1) // programs, 0) * pieces
    token = program * TOKENS + line
    tile = load_tile(x, x_pitch * UNIT, token, within, token < n, WIDTH, COLS)
    now = tl.load(epoch + channel) + 1
    at = program * CHOICES + tl.arange(0, CHOICES)
    chosen = tl.load(ids + at, mask=at < n * K, other=-1).to(tl.int32)
    weight = tl.load(weights + at, mask=at < n * K, other=0.0)
    may = may_send(status, active)
    served = served & may
    takers = tl.reduce_or(tl.where(served, 1 << (lane & 31), 0), 0)
    bits = destinations(ids, token, token < n, active, takers, n_ranks, slots_per_rank, K, MANY)
    count_rows(ids, sent, active, program, n, takers, may, me, n_ranks, slots_per_rank, TOKENS, K, RANKS, MANY)
    for step in range(0, steps):
        piece = step % pieces
        column = piece * (GROUPS * COLS) + within
        place = token.to(tl.int64) * row_bytes
        after = step + 1
        next_token = (program + after // pieces * programs) * TOKENS + line
        ahead = load_tile(x, x_pitch * UNIT, next_token, after % pieces * (GROUPS * COLS) + within, next_token < n, WIDTH, COLS)
        if QUANTISE:
            whose = row | bits.to(tl.int64 if MANY else tl.int32) << _BITS_AT
            value, scale, whose = quantise_tile(tile.to(tl.float32), whose, UE8M0, FIXES, ON_GPU)
            scale_row, scale_bits = (whose & _ROW).to(tl.int32), (whose >> _BITS_AT).to(tl.int32)
            scale_token = (program + step // pieces * programs) * TOKENS + scale_row // GROUPS
            scale_column = piece * (GROUPS * COLS) + scale_row % GROUPS * COLS
            scale_place = scale_token.to(tl.int64) * row_bytes
        elif CAST:
            value = tile.to(tl.bfloat16).to(tl.int16, bitcast=True)
        else:
            value = tile
        if SCALES > 0:
            block = tl.arange(0, BLOCKS)[None, :]
            with_scale = (token < n)[:, None] & (block < SCALES) & (piece == 0)
            given = tl.load(scales + token.to(tl.int64)[:, None] * scales_pitch + block * scales_step, mask=with_scale, other=0.0)
        for i in range(0, K if MANY else n_ranks):
            if MANY:
                one_id = tl.load(ids + token.to(tl.int64) * K + i, mask=token < n, other=0).to(tl.int32)
                rank = tl.where(one_id >= 0, one_id // slots_per_rank, 0)
                base = tl.load(pointers + rank)
                hit = ((bits >> i) & 1 != 0) & (base != 0) & may
            else:
                rank = me + 1 + i
                rank = tl.where(rank < n_ranks, rank, rank - n_ranks)
                base = tl.load(pointers + rank)
                hit = (bits >> rank) & 1 != 0
            address = base + channel_at + rows_at + place  # 64 bits from the start: the two offsets may come as 32
            store_tile(address, column, value, hit, WIDTH, COLS)
            if QUANTISE:
                scale_base = base
                if MANY:
                    scale_id = tl.load(ids + scale_token.to(tl.int64) * K + i, mask=scale_token < n, other=0).to(tl.int32)
                    scale_base = tl.load(pointers + tl.where(scale_id >= 0, scale_id // slots_per_rank, 0))
                    scale_hit = ((scale_bits >> i) & 1 != 0) & (scale_base != 0) & may
                else:
                    scale_hit = (scale_bits >> rank) & 1 != 0
                scale_address = scale_base + channel_at + rows_at + scale_place
                store_scales(scale_address, scale_column, scale, scale_hit, WIDTH, ON_GPU)
            if SCALES > 0:
                if piece == 0:
                    tl.store(pointer_at(address, tl.float32)[:, None] + (SCALES_AT + block), given, mask=hit[:, None] & with_scale)
        if after % pieces == 0:
            bits = destinations(ids, next_token, next_token < n, active, takers, n_ranks, slots_per_rank, K, MANY)
        tile, token = ahead, next_token
    while program * CHOICES < n * K:  # once, but for uncommon shapes
        at = program * CHOICES + tl.arange(0, CHOICES)
        if program != tl.program_id(0):
            chosen = tl.load(ids + at, mask=at < n * K, other=-1).to(tl.int32)
            weight = tl.load(weights + at, mask=at < n * K, other=0.0)
        _store_choices(
            pointers, served, lane, chosen, weight, at, at < n * K, first_row * K, channel_at, ids_at, weights_at, me, n_ranks
        )  # fmt: skip
        program += programs
    if is_last(arrived + 2 * channel):
        tl.store(epoch + channel, now)
        raise_flags(bases + channel_at, served, flag_at, n, now, RANKS, ON_GPU)
        tl.atomic_add(sent + n_ranks + lane, (lane * 0).to(tl.int64) + n, mask=served & (lane != me), sem="relaxed", scope="gpu")


def send_tokens(
    wire: Wire,
    peers: Peers,
    state: PeerState,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    channel: int,
    n_valid: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    tag: int = 0,
    programs: int,
    config: TileConfig | None = None,
) -> None:
    """Start dispatch number ``state.epoch[channel] + 1``: rows, ids and weights of this rank's tokens to their places.

    Args:
        wire: the layout.
        peers: the workspaces.
        state: of this rank's dispatcher; ``epoch`` rises by one. After a failure nothing else happens, see ``device.may_send``.
        x: [T, hidden] with contiguous columns, T <= ``wire.max_tokens``: floats, which travel as they are or rounded to what the
            payload says, bit for bit as ``comm.fp8.quantise`` rounds; or e4m3 or bytes, of an FP8 payload with ``scales``.
        ids: [T, k] int32 or int64 global slots in any order, -1 for none.
        weights: [T, k] float32.
        channel: of the workspace, free.
        n_valid: int32 [1] on the device: tokens that are sent, None for all.
        scales: float32 [T, n_scales] of ``x`` that is FP8 already, any strides.
        tag: names the call; not used by a send.
        programs: the most that are launched, so the most multiprocessors that are taken.
        config: overrides how it is launched.

    Raises:
        ValueError: an argument does not have this form, or there are more rows than the layout has room for.
    """
    check_rows("x", x, wire.hidden, wire.max_tokens)
    n, k = x.shape[0], wire.top_k
    check_choices("ids", ids, n, k, _IDS)
    check_choices("weights", weights, n, k, (torch.float32,))
    fp8 = wire.n_scales > 0
    quantise = fp8 and x.dtype in _FLOATS
    if fp8 and not quantise and (scales is None or tuple(scales.shape) != (n, wire.n_scales)):
        found = None if scales is None else tuple(scales.shape)
        raise ValueError(f"x of {x.dtype} in an FP8 payload needs scales [{n}, {wire.n_scales}], found {found}; pass both of a quantiser")
    cast = wire.payload == "bf16" and x.dtype in (torch.float32, torch.float16)
    if not (quantise or cast):
        if x.element_size() != value_dtype(wire).itemsize:
            raise ValueError(f"x is {x.dtype}, a payload of {wire.payload!r} carries {value_dtype(wire)}; cast it")
        x = as_words(x)
    width, me = x.shape[1], peers.rank
    if config is None:
        config = TileConfig.to_quantise(n, width, programs) if quantise else TileConfig.to_move(n, width, programs, piece=256)
    groups, cols = (config.piece // FP8_BLOCK, FP8_BLOCK) if quantise else (1, config.piece)
    pitch, unit = pitch_units(x)
    row, given = me * wire.max_tokens, wire.n_scales if fp8 and not quantise else 0
    grid = grid_of(programs, triton.cdiv(n, config.tokens))
    send_tokens_kernel[(grid,)](
        peers.pointers, state.active, state.epoch, state.arrived, state.sent, state.status, x, scales, ids, weights, n_valid,
        n, channel, row, channel * wire.channel_bytes, wire.ids_at, wire.weights_at,
        wire.rows_at + row * wire.row_bytes, wire.row_bytes, 16 * (DISPATCH * wire.n_ranks + me),
        me, wire.n_ranks, wire.slots_per_rank, pitch, *((0, 0) if scales is None else scales.stride()),
        WIDTH=width, UNIT=unit, TOKENS=config.tokens, GROUPS=groups, COLS=cols,
        K=k, CHOICES=max(128, min(_MOST_CHOICES, lanes_of(triton.cdiv(n * k, grid)))),
        RANKS=lanes_of(wire.n_ranks), MANY=wire.n_ranks > _MOST_IN_TURN,
        QUANTISE=quantise, UE8M0=wire.payload == "fp8_ue8m0", FIXES=2 if x.dtype == torch.float32 else 1, CAST=cast, ON_GPU=x.is_cuda,
        SCALES=given, BLOCKS=lanes_of(max(given, 1)), SCALES_AT=wire.value_bytes // 4,
        num_warps=config.warps, maxnreg=registers_of(config.warps), **early_start(x.device),
    )  # fmt: skip
