"""Several virtual ranks over one memory for the tests of the four operations, and what they should give by plain loops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from rorqual.comm.blocks import Blocks
from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.fp8 import dequantise, quantise
from rorqual.comm.heap.peers import Peers
from rorqual.comm.heap.virtual import VirtualHeap
from rorqual.comm.ops import PeerOps
from rorqual.comm.rows import DTYPES
from rorqual.comm.state import PeerState
from rorqual.comm.wire import Wire
from tests.comm.routing import make_ids

POISON = 0xFF  # bytes of NaN in every float format here


@dataclass(kw_only=True)
class Tokens:
    """One rank's part of a call."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None = None
    n_valid: torch.Tensor | None = None
    n: int = 0  # valid ones


@dataclass(kw_only=True)
class World:
    """All ranks of ``spec`` with one implementation of the operations."""

    spec: EPSpec
    ops: PeerOps
    device: torch.device
    programs: int = 3
    pull: bool = False
    wire: Wire = field(init=False)
    peers: dict[int, Peers] = field(init=False)
    states: dict[int, PeerState] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        self.wire = Wire.of(spec)
        heap = VirtualHeap(spec.n_ranks, self.device)
        self.peers = {rank: heap.of(rank).allocate(self.wire.total_bytes) for rank in range(spec.n_ranks)}
        self.states = {rank: PeerState.make(spec.depth, spec.n_ranks, self.device) for rank in self.peers}
        self.poison()

    def poison(self) -> None:
        """Overwrite everything but flags."""
        for peers in self.peers.values():
            for channel in range(self.spec.depth):
                at = channel * self.wire.channel_bytes
                peers.own[at + self.wire.ids_at : at + self.wire.channel_bytes] = POISON

    def blocks(self, rank: int, channel: int = 0) -> Blocks:
        return Blocks.of(self.wire, self.peers[rank].own, channel)

    def send(self, rank: int, t: Tokens, *, channel: int = 0, **more: Any) -> None:
        self.ops.send_tokens(
            self.wire, self.peers[rank], self.states[rank], t.x, t.ids, t.weights,
            channel=channel, n_valid=t.n_valid, scales=t.scales, programs=self.programs, **more,
        )  # fmt: skip

    def receive(
        self, rank: int, *, channel: int = 0, timeout_ms: int = 50, tolerant: bool = False, tag: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.spec.n_ranks * self.wire.max_tokens, self.spec.top_k)
        slots = torch.full(shape, 77, dtype=torch.int32, device=self.device)
        shares = torch.full(shape, float("nan"), device=self.device)
        self.ops.receive_tokens(
            self.wire, self.peers[rank], self.states[rank], slots, shares,
            channel=channel, timeout_ms=timeout_ms, fault_tolerant=tolerant, tag=tag,
        )  # fmt: skip
        return slots, shares

    def home(self, rank: int, y: torch.Tensor, slots: torch.Tensor, *, channel: int = 0, **more: Any) -> None:
        self.ops.send_home(
            self.wire, self.peers[rank], self.states[rank], y, slots,
            channel=channel, deterministic=self.spec.deterministic, programs=self.programs, **more, **self._pulling(),
        )  # fmt: skip

    def _pulling(self) -> dict[str, bool]:
        return {"pull": True} if self.pull else {}

    def sum(self, rank: int, t: Tokens, *, channel: int = 0, timeout_ms: int = 50, tolerant: bool = False, **more: Any) -> torch.Tensor:
        out = torch.full((len(t.ids), self.spec.hidden), float("nan"), dtype=DTYPES[self.wire.dtype], device=self.device)
        self.ops.sum_home(
            self.wire, self.peers[rank], self.states[rank], t.ids, t.weights, out,
            channel=channel, timeout_ms=timeout_ms, fault_tolerant=tolerant, deterministic=self.spec.deterministic,
            n_valid=t.n_valid, **more, **self._pulling(),
        )  # fmt: skip
        return out


def make_tokens(spec: EPSpec, rank: int, n: int, kind: str, seed: int, device: torch.device, *, n_valid: int | None = None) -> Tokens:
    """Random tokens of a rank. With ``n_valid`` the tokens behind it are poison."""
    gen = torch.Generator().manual_seed(1000 * seed + rank)
    ids = make_ids(kind, n, spec, gen).int()
    weights = torch.rand(n, spec.top_k, generator=gen)
    if spec.payload == "bytes":
        x = torch.randint(0, 256, (n, spec.hidden), generator=gen, dtype=torch.uint8)
    else:
        x = torch.randn(n, spec.hidden, generator=gen) * torch.exp2(torch.randint(-3, 3, (n, 1), generator=gen))
        x[:, : spec.hidden // 3] = 0.0  # also whole blocks
        x = x.to(DTYPES[spec.dtype])
    tokens = Tokens(x=x.to(device), ids=ids.to(device), weights=weights.to(device), n=n)
    if n_valid is not None:
        tokens.n, tokens.n_valid = n_valid, torch.tensor([n_valid], dtype=torch.int32, device=device)
        tokens.ids[n_valid:], tokens.weights[n_valid:] = 0, float("nan")
        if x.is_floating_point():
            tokens.x[n_valid:] = float("nan")
    return tokens


def travelled(wire: Wire, t: Tokens) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values as bytes [n, ..] and scales of a rank's valid tokens as they should arrive."""
    x = t.x[: t.n]
    if wire.n_scales:
        values, scales = (x, t.scales[: t.n]) if t.scales is not None else quantise(x, ue8m0=wire.payload == "fp8_ue8m0")
        return values.contiguous().view(torch.uint8), scales
    return (x.to(torch.bfloat16) if wire.payload == "bf16" else x).contiguous().view(torch.uint8), None


def check_arrived(world: World, rank: int, tokens: list[Tokens], slots: torch.Tensor, shares: torch.Tensor, *, channel: int = 0) -> None:
    """Everything that ``rank`` should have got is there, and nothing else was written."""
    wire, blocks, m = world.wire, world.blocks(rank, channel), world.wire.max_tokens
    expected_slots, expected_shares = torch.full_like(slots, -1), torch.zeros_like(shares)
    for source, t in enumerate(tokens):
        local = t.ids[: t.n] - rank * wire.slots_per_rank
        here = (t.ids[: t.n] >= 0) & (local >= 0) & (local < wire.slots_per_rank)
        expected_slots[source * m : source * m + t.n] = torch.where(here, local, -1)
        expected_shares[source * m : source * m + t.n] = torch.where(here, t.weights[: t.n], 0.0)
        wanted = torch.zeros(m, dtype=torch.bool, device=slots.device)
        wanted[: t.n] = here.any(dim=1)
        values, scales = travelled(wire, t)
        rows = blocks.rows[source]
        assert torch.equal(rows[wanted][:, : values.shape[1]], values[wanted[: t.n]]), (source, rank)
        if scales is not None:
            assert blocks.scales is not None
            assert torch.equal(blocks.scales.view(wire.n_ranks, m, -1)[source][wanted], scales[wanted[: t.n]])
        assert bool((rows[~wanted] == POISON).all()), "a row was written that nobody wants"
    for got, expected in zip(in_order(slots, shares), in_order(expected_slots, expected_shares), strict=True):
        assert torch.equal(got, expected)


def in_order(slots: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of every row by slot, none last: their order is left to the implementation."""
    order = slots.masked_fill(slots < 0, 1 << 30).sort(dim=1, stable=True).indices
    return slots.gather(1, order), shares.gather(1, order)


def values_of(world: World, rank: int, channel: int = 0) -> torch.Tensor:
    """[R * M, hidden] fp32, what arrived at a rank; poison where nothing did."""
    blocks = world.blocks(rank, channel)
    if blocks.scales is not None:
        return dequantise(blocks.values, blocks.scales, torch.float32)
    return blocks.values.float()


def outputs(world: World, rank: int, slots: torch.Tensor, channel: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [N, hidden], index [R * M, k]): the fake experts' outputs for every local choice, in a mixed order, between poisoned rows."""
    x = values_of(world, rank, channel)
    row, choice = (slots >= 0).nonzero(as_tuple=True)
    gen = torch.Generator().manual_seed(rank)
    place = torch.randperm(len(row) + 3, generator=gen)[: len(row)].to(slots.device)
    y = torch.full((len(row) + 3, world.spec.hidden), float("nan"), device=slots.device)
    factor = 1.0 + 0.5 * (slots[row, choice].float() + rank * world.spec.slots_per_rank)
    y[place] = x[row] * factor.unsqueeze(1)
    index = torch.full_like(slots, -5)
    index[row, choice] = place.int()
    return y.to(DTYPES[world.wire.dtype]), index


def expected_sum(world: World, t: Tokens) -> torch.Tensor:
    """[T, hidden] fp64 of the fake experts on what travelled."""
    values, scales = travelled(world.wire, t)
    if scales is not None:
        x = dequantise(values.view(torch.float8_e4m3fn), scales, torch.float32).double()
    else:
        x = (t.x[: t.n].to(torch.bfloat16) if world.wire.payload == "bf16" else t.x[: t.n]).double()
    ids = t.ids[: t.n]
    factor = torch.where(ids >= 0, t.weights[: t.n].double() * (1.0 + 0.5 * ids.double()), 0.0).sum(dim=1, keepdim=True)
    out = torch.zeros((len(t.ids), world.spec.hidden), dtype=torch.float64, device=x.device)
    out[: t.n] = x * factor
    return out


def whole_trip(w: World, tokens: list[Tokens], *, channel: int = 0, indexed: bool = True) -> list[torch.Tensor]:
    """Dispatch, check what arrived, fake experts, combine; the results of all ranks."""
    for rank, t in enumerate(tokens):
        w.send(rank, t, channel=channel)
    received = [w.receive(rank, channel=channel) for rank in range(w.spec.n_ranks)]
    for rank, (slots, shares) in enumerate(received):
        check_arrived(w, rank, tokens, slots, shares, channel=channel)
    for rank, (slots, shares) in enumerate(received):
        y, index = outputs(w, rank, slots, channel)
        if w.spec.deterministic:
            w.home(rank, y, slots, channel=channel, index=index)
        elif indexed:
            w.home(rank, y, slots, channel=channel, index=index, shares=shares)
        else:
            here = (slots >= 0).unsqueeze(-1)
            rows = torch.where(here, y[index.clamp(min=0).long()].float() * shares.unsqueeze(-1), 0.0).sum(dim=1)
            rows[~here.any(dim=1).view(-1)] = float("nan")
            w.home(rank, rows.to(y.dtype), slots, channel=channel)
    return [w.sum(rank, t, channel=channel) for rank, t in enumerate(tokens)]


def close(world: World, got: torch.Tensor, tokens: Tokens) -> None:
    """The result of a rank is that of the fake experts, and zeros behind its valid tokens."""
    expected = expected_sum(world, tokens)
    eps = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}[got.dtype]
    scale = expected.abs().amax(dim=1, keepdim=True).clamp(min=1e-12)
    assert bool(((got.double() - expected).abs() <= eps * scale).all())
    assert torch.equal(got[tokens.n :], torch.zeros_like(got[tokens.n :]))
