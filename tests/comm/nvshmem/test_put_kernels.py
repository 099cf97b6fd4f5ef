"""The put kernels in the interpreter, with a network made of memmove: the same bits as stores into mapped memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.heap.peers import Peers
from rorqual.comm.kernels import send_home_torch as twin
from rorqual.comm.nvshmem.kernels import put_home, put_tokens
from rorqual.comm.nvshmem.ops import put_ops
from rorqual.comm.ops import PeerOps
from rorqual.comm.virtual import VirtualRanks
from tests.comm.routing import expert, make_tokens
from tests.kernels.interpreter import repair

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run in the interpreter only without a GPU")
SPEC = EPSpec(n_ranks=3, n_slots=6, hidden=20, top_k=2, max_tokens=5, timeout_ms=200, max_sms=2)


def _int(value: Any) -> int:
    return int(value.handle.data.item()) if hasattr(value, "handle") else int(getattr(value, "value", value))


class Network:
    """Puts between the workspaces of virtual ranks. What is put without a signal arrives only at the next ``quiet``."""

    def __init__(self) -> None:
        self.bases: list[int] = []  # address of every rank's symmetric memory
        self.sizes = 0
        self.me = 0
        self.pending: list[tuple[int, int, int]] = []
        self.puts: list[tuple[int, int, int]] = []  # source rank, destination rank, bytes

    def _there(self, address: int, pe: int) -> int:
        offset = address - self.bases[self.me]
        assert 0 <= offset < self.sizes and pe != self.me, (offset, pe)
        return self.bases[pe] + offset

    def put_nbi(self, dest: Any, source: Any, n_bytes: Any, pe: Any) -> None:
        self.pending.append((self._there(_int(dest), _int(pe)), _int(source), _int(n_bytes)))
        self.puts.append((self.me, _int(pe), _int(n_bytes)))

    def quiet(self) -> None:
        for dest, source, n_bytes in self.pending:
            ctypes.memmove(dest, source, n_bytes)
        self.pending.clear()

    def put_signal(self, dest: Any, source: Any, n_bytes: Any, signal: Any, value: Any, operation: Any, pe: Any) -> None:
        assert not self.pending and _int(operation) == 9
        ctypes.memmove(self._there(_int(dest), _int(pe)), _int(source), _int(n_bytes))
        ctypes.memmove(self._there(_int(signal), _int(pe)), ctypes.byref(ctypes.c_int64(_int(value))), 8)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    repair()
    net = Network()
    for module in (put_tokens, put_home):
        monkeypatch.setattr(module, "launch", lambda kernel, grid, *args, **options: kernel[grid](*args, **options))
        monkeypatch.setattr(module, "putmem_nbi_block", net.put_nbi)
        monkeypatch.setattr(module, "quiet", net.quiet)
    monkeypatch.setattr(put_tokens, "putmem_signal_block", net.put_signal)
    yield net
    assert not net.pending


def world(spec: EPSpec, network: Network | None, mapped: tuple[tuple[bool, ...], ...]) -> VirtualRanks:
    """Ranks over twins; with a network, ``mapped[r][p]`` says whether rank r maps rank p, and the others are served by put kernels."""
    ranks = VirtualRanks.make(spec, ops=PeerOps.load("torch"))
    if network is None:
        return ranks
    first = ranks.ranks[0]
    network.bases, network.sizes = first.peers.pointers.tolist(), first.wire.total_bytes
    for rank, dispatcher in enumerate(ranks.ranks):
        peers = dispatcher.peers
        seen = [peer == rank or mapped[rank][peer] for peer in range(spec.n_ranks)]
        pointers = torch.where(torch.tensor(seen), peers.pointers, 0)
        views = tuple(view if there else None for view, there in zip(peers.views, seen, strict=True))
        dispatcher.peers = Peers(rank=rank, views=views, pointers=pointers)
        ring = torch.full((put_home.ring_bytes(dispatcher.wire, spec.max_sms),), 0xFF, dtype=torch.uint8)
        dispatcher.ops = put_ops(ring, replace(dispatcher.ops, send_home=only_to(seen)))
    return ranks


def only_to(seen: list[bool]) -> Any:
    """The twin of ``send_home``, which must map everybody it serves, for those that are mapped, as the kernel does by itself."""

    def send_home(wire: Any, peers: Peers, state: Any, *args: Any, **more: Any) -> None:
        twin.send_home(wire, peers, replace(state, active=state.active * torch.tensor(seen, dtype=torch.int32)), *args, **more)

    return send_home


def count(rank: int, seed: int) -> int:
    """Tokens of a rank: 0 to 4."""
    return (3 * rank + seed + 1) % 5


def call(
    ranks: VirtualRanks, network: Network | None, seed: int, kind: str, indexed: bool, capacity: int | None = None
) -> list[torch.Tensor]:
    """One dispatch and combine on all ranks, half by half."""
    spec = ranks.ranks[0].spec

    def each(step: Any) -> list[Any]:
        found = []
        for rank, dispatcher in enumerate(ranks.ranks):
            if network is not None:
                network.me = rank
            found.append(step(rank, dispatcher))
        return found

    tokens = [make_tokens(rank, count(rank, seed), spec, kind, seed) for rank in range(spec.n_ranks)]
    tickets = each(lambda r, d: d.dispatch_send(*tokens[r], capacity=capacity, tag=seed))
    routed = each(lambda r, d: d.dispatch_recv(tickets[r], layout="rank"))

    def outputs(rank: int, dispatcher: Any) -> Any:
        got, k = routed[rank], spec.top_k
        x = torch.where((got.slots >= 0).any(dim=1, keepdim=True), got.x, 0.0)
        each = torch.stack([expert(got.slots[:, j].clamp(min=0) + rank * spec.slots_per_rank, x) for j in range(k)], dim=1)
        if indexed:
            index = torch.where(got.slots >= 0, torch.arange(got.slots.numel()).view(got.slots.shape), -1).int()
            return dispatcher.combine_send(each.reshape(-1, spec.hidden), got, index=index)
        shares = torch.where(got.slots >= 0, got.shares, 0.0)
        return dispatcher.combine_send((each * shares.unsqueeze(-1)).sum(dim=1), got)

    tickets = each(outputs)
    return each(lambda r, d: d.combine_recv(tickets[r]))


MIXED = ((True, True, False), (False, True, True), (True, False, True))
NONE = ((False,) * 3,) * 3


@pytest.mark.parametrize(
    ("changes", "indexed"), [({}, False), ({"hidden": 2051, "max_tokens": 12, "max_sms": 1}, True), ({"deterministic": True}, True)]
)
@pytest.mark.parametrize("mapped", [NONE, MIXED], ids=["none", "mixed"])
def test_puts_give_the_bits_of_stores(
    network: Network, changes: dict[str, Any], indexed: bool, mapped: tuple[tuple[bool, ...], ...]
) -> None:
    spec = replace(SPEC, **changes)
    stores, puts = world(spec, None, mapped), world(spec, network, mapped)
    for seed, kind in enumerate(("random", "with_none")):
        want, got = call(stores, None, seed, kind, indexed), call(puts, network, seed, kind, indexed, capacity=4)
        for rank in range(spec.n_ranks):
            if indexed and not spec.deterministic:  # products and sums may be contracted in one and not in the other
                assert torch.allclose(want[rank], got[rank], rtol=2.0**-21, atol=2.0**-21), (seed, kind, rank)
            else:
                assert torch.equal(want[rank], got[rank]), (seed, kind, rank)
    assert [r.bytes_sent() for r in puts.ranks] == [r.bytes_sent() for r in stores.ranks]
    crossed = {(source, dest) for source, dest, n in network.puts if n}
    assert crossed == {(s, d) for s in range(3) for d in range(3) if s != d and not mapped[s][d]}


def test_a_row_is_put_once_to_a_rank(network: Network) -> None:
    puts = world(SPEC, network, NONE)
    call(puts, network, 3, "same_rank", False)  # all choices of every token on the last rank
    row = puts.ranks[0].wire.row_bytes
    rows = [(source, dest) for source, dest, n in network.puts if n == row]
    tokens = [count(rank, 3) for rank in range(3)]
    assert sorted(rows) == [(0, 2)] * tokens[0] + [(1, 2)] * tokens[1] + [(2, 0)] * tokens[0] + [(2, 1)] * tokens[1]


def test_nothing_is_put_after_a_failed_wait(network: Network) -> None:
    puts = world(SPEC, network, NONE)
    call(puts, network, 0, "random", False)
    network.puts.clear()
    puts.ranks[0].state.status[0] = 1
    network.me = 0
    before = [int(rank.peers.own.view(torch.int64)[0]) for rank in puts.ranks]
    state = puts.ranks[0].state
    put_tokens.put_tokens(puts.ranks[0].wire, puts.ranks[0].peers, state, channel=0, programs=2)
    slots = torch.zeros((3 * SPEC.max_tokens, SPEC.top_k), dtype=torch.int32)
    y, ring = torch.zeros((len(slots), SPEC.hidden)), torch.zeros(1 << 16, dtype=torch.uint8)
    put_home.put_home(
        puts.ranks[0].wire, puts.ranks[0].peers, state, y, slots, ring, channel=0, index=None, shares=None, deterministic=False, programs=2
    )
    assert network.puts == [] and [int(rank.peers.own.view(torch.int64)[0]) for rank in puts.ranks[1:]] == before[1:]
