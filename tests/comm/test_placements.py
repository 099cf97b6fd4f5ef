"""Deterministic sums do not depend on where experts are: shuffled and replicated placements give the bits of one rank, on every backend."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from rorqual.comm.dispatcher import Dispatcher, EPSpec
from rorqual.comm.heap.shm import ShmHeap
from rorqual.comm.local import LocalDispatcher
from rorqual.comm.node.dispatcher import NodeDispatcher
from rorqual.comm.ops import PeerOps
from rorqual.comm.order import choices_of
from rorqual.comm.peer import PeerDispatcher
from rorqual.comm.routed import Routed
from rorqual.comm.torch_flat import TorchDispatcher
from rorqual.comm.torch_node import TorchNodeDispatcher
from rorqual.comm.torch_static import TorchStaticDispatcher
from rorqual.comm.virtual import VirtualRanks
from rorqual.launch.bench.comm.checks.inputs import expert
from rorqual.parallel.grid import Grid, GridSpec
from tests.ranks import run_ranks

EXPERTS, RANKS, NODES = 8, 4, (0, 0, 1, 1)
SPEC = EPSpec(n_ranks=RANKS, n_slots=EXPERTS, hidden=37, top_k=5, max_tokens=9, timeout_ms=20_000, deterministic=True)
Choices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def placements(extra: int = 2 * RANKS) -> list[torch.Tensor]:
    """Slots of experts: in order; shuffled; shuffled with copies, in other ways."""
    gen = torch.Generator().manual_seed(5)
    found = [torch.arange(EXPERTS), torch.randperm(EXPERTS, generator=gen), torch.arange(EXPERTS).flip(0)]
    copies = [torch.cat([torch.arange(EXPERTS), torch.randint(0, EXPERTS, (extra,), generator=gen)]) for _ in range(2)]
    return found + [table[torch.randperm(len(table), generator=gen)] for table in copies]


def tokens(rank: int, seed: int) -> Choices:
    """x, logical experts, ascending as a router gives them, with none here and there, and weights."""
    gen = torch.Generator().manual_seed(100 * seed + rank)
    n = (rank + 4 * seed) % (SPEC.max_tokens + 1)
    ids = torch.rand(n, EXPERTS, generator=gen).argsort(dim=1)[:, : SPEC.top_k].sort(dim=1).values
    ids = torch.where(torch.rand(n, SPEC.top_k, generator=gen) < 0.15, -1, ids)
    scale = 10.0 ** torch.randint(-3, 4, (n, SPEC.top_k), generator=gen)  # orders of sums show
    return torch.randn(n, SPEC.hidden, generator=gen), ids, torch.rand(n, SPEC.top_k, generator=gen) * scale


def somewhere(ids: torch.Tensor, table: torch.Tensor, seed: int) -> torch.Tensor:
    """A slot for each logical expert in ``ids``, any of its copies."""
    gen = torch.Generator().manual_seed(seed)
    holds = (table[None, None, :] == ids[:, :, None]).float() * (0.1 + torch.rand((*ids.shape, len(table)), generator=gen))
    return torch.where(ids < 0, -1, holds.argmax(dim=2))


def answer(routed: Routed, spec: EPSpec, rank: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the fake experts that ``rank`` holds make of what came."""
    mine = table[rank * spec.slots_per_rank : (rank + 1) * spec.slots_per_rank]
    if routed.layout == "masked":
        return expert(mine.unsqueeze(1), routed.x), None
    if routed.layout == "contiguous":
        return expert(mine.repeat_interleave(torch.tensor(routed.host_counts())), routed.x), None
    assert routed.slots is not None
    y = torch.cat([expert(held, routed.x) for held in mine])
    row = torch.arange(len(routed.x)).unsqueeze(1)
    return y, torch.where(routed.slots < 0, -1, routed.slots * len(routed.x) + row).int()


def trip(dispatcher: Dispatcher, rank: int, mine: Choices, table: torch.Tensor, seed: int, layout: str) -> torch.Tensor:
    x, ids, weights = mine
    routed = dispatcher.dispatch(x, somewhere(ids, table, seed), weights, layout=layout)
    y, index = answer(routed, dispatcher.spec, rank, table)
    return dispatcher.combine(y, routed, index=index)


def alone(mine: Choices, table: torch.Tensor | None = None) -> torch.Tensor:
    table = torch.arange(EXPERTS) if table is None else table
    return trip(LocalDispatcher(replace(SPEC, n_ranks=1, n_slots=len(table))), 0, mine, table, 7, "contiguous")


def test_choices_keep_their_columns_only_where_sums_follow_them() -> None:
    ids, weights = torch.tensor([[5, -7, 2]], dtype=torch.int32), torch.tensor([[0.5, 9.0, 0.25]])
    kept = choices_of(ids, weights, as_given=True)
    assert kept[0].tolist() == [[5, -1, 2]] and kept[0].dtype == torch.int64 and torch.equal(kept[1], weights)
    assert choices_of(ids, weights, as_given=False)[0].tolist() == [[2, 5, -1]]


def test_one_rank() -> None:
    mine = tokens(3, 1)
    assert len(mine[0]) and all(torch.equal(alone(mine, table), alone(mine)) for table in placements())


def test_the_sum_in_the_order_of_slots_would_differ() -> None:
    """The test is one: the same tokens without ``deterministic`` do depend on the placement."""
    found = []
    for table in placements()[:3]:
        dispatcher = LocalDispatcher(replace(SPEC, n_ranks=1, deterministic=False))
        found.append(trip(dispatcher, 0, tokens(3, 1), table, 7, "contiguous"))
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def over_ranks() -> int:
    rank, done = int(os.environ["RANK"]), 0
    grid = Grid.create(GridSpec(dp=RANKS), torch.device("cpu"), 60.0)
    for number, table in enumerate(placements()):
        spec = replace(SPEC, n_slots=len(table))
        backends = [
            TorchDispatcher(grid.ep, spec),
            TorchStaticDispatcher(grid.ep, spec),
            TorchNodeDispatcher(grid.ep, spec, NODES),
            PeerDispatcher(grid.ep, spec, ShmHeap(grid.ep)),
            NodeDispatcher(grid.ep, spec, ShmHeap(grid.ep), NODES),
        ]
        for seed, layout in enumerate(("contiguous", "masked", "rank")):
            mine = tokens(rank, seed + number)
            for dispatcher in backends:
                out = trip(dispatcher, rank, mine, table, seed, layout)
                assert torch.equal(out, alone(mine)), (dispatcher.name, number, layout)
                done += 1
        for dispatcher in backends:
            dispatcher.close()
    grid.close()
    return done


def test_ranks() -> None:
    assert run_ranks(over_ranks, RANKS, timeout=120.0) == [75] * RANKS


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
def test_the_kernels_add_in_the_order_of_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: the same bits whatever the placement, and those of plain sums but for contractions."""
    pytest.importorskip("triton")
    from tests.kernels import casts, interpreter

    interpreter.repair()
    casts.repair()
    found = []
    for table in (placements()[0], placements()[1], placements(2)[3]):
        spec = replace(SPEC, n_ranks=2, n_slots=len(table), max_tokens=3, max_sms=1)
        group = VirtualRanks.make(spec, ops=PeerOps.load("triton"))
        mine = [tuple(t[:3] for t in tokens(rank, 1)) for rank in range(2)]
        tickets = [
            one.dispatch_send(x, somewhere(ids, table, 3), weights) for one, (x, ids, weights) in zip(group.ranks, mine, strict=True)
        ]
        routed = [one.dispatch_recv(ticket, "rank") for one, ticket in zip(group.ranks, tickets, strict=True)]
        made = [answer(came, spec, rank, table) for rank, came in enumerate(routed)]
        backs = [one.combine_send(y, came, index=index) for one, came, (y, index) in zip(group.ranks, routed, made, strict=True)]
        found.append([one.combine_recv(back) for one, back in zip(group.ranks, backs, strict=True)])
        group.close()
    for outs in found:
        for out, first, one in zip(outs, found[0], mine, strict=True):
            assert torch.equal(out, first)
            torch.testing.assert_close(out, alone(one), rtol=1e-5, atol=1e-2)
