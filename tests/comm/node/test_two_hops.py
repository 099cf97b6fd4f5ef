"""Two hops over shared memory between real processes: the same bits as the torch backend of two hops, and less across nodes."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.heap.shm import ShmHeap
from rorqual.comm.heap.virtual import VirtualHeap
from rorqual.comm.node.dispatcher import NodeDispatcher, workspace_bytes
from rorqual.comm.node.nodes import Nodes
from rorqual.comm.node.wire import NodeWire
from rorqual.comm.torch_node import TorchNodeDispatcher
from rorqual.comm.wire import Wire
from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.group import Group
from tests.comm.routing import KINDS, exact, make_tokens, whole_trip
from tests.ranks import run_ranks

MAPS: dict[int, list[tuple[int, ...]]] = {2: [(0, 1), (0, 0)], 4: [(0, 0, 1, 1), (0, 1, 0, 1)], 6: [(0, 0, 1, 1, 2, 2)]}


def make_spec(world: int, **changes: Any) -> EPSpec:
    return replace(EPSpec(n_ranks=world, n_slots=3 * world, hidden=24, top_k=3, max_tokens=12, timeout_ms=20_000), **changes)


def between(spec: EPSpec, node_of: tuple[int, ...], rank: int, ids: torch.Tensor, wire: Wire) -> list[int]:
    """Bytes that ``rank``'s own tokens cost it on the way out, by destination: a row a node, all choices to the rail."""
    nodes = Nodes.of(node_of, rank)
    sent = [0] * spec.n_ranks
    for node, there in enumerate(nodes.rail):
        if there != rank:
            hosts = torch.tensor([[i >= 0 and node_of[i // spec.slots_per_rank] == node for i in row] for row in ids.tolist()])
            rows = int(hosts.any(dim=1).sum()) if len(ids) else 0
            sent[there] = rows * wire.row_bytes + len(ids) * 8 * spec.top_k
    return sent


def checks(maps: list[tuple[int, ...]]) -> int:
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    grid = Grid.create(GridSpec(dp=world), torch.device("cpu"), 60.0)
    done = 0
    for node_of in maps:
        for changes in ({"depth": 1}, {"deterministic": True}, {"payload": "bf16", "dtype": "bfloat16"}):
            spec = make_spec(world, **changes)
            ours = NodeDispatcher(grid.ep, spec, ShmHeap(grid.ep), node_of)
            theirs = TorchNodeDispatcher(grid.ep, spec, node_of)
            assert ours.name == "shm_node" and ours.heap.allocated_bytes == workspace_bytes(spec, node_of)
            for seed, kind in enumerate(KINDS):
                n = (5 * rank + 3 * seed) % (spec.max_tokens + 1) if seed % 4 else (0 if rank else spec.max_tokens)
                x, ids, weights = make_tokens(rank, n, spec, kind, seed)
                got, want = whole_trip(ours, rank, x, ids, weights), whole_trip(theirs, rank, x, ids, weights)
                assert torch.equal(got, want), (node_of, changes, kind)
                if spec.dtype == "float32" and n:
                    assert (got.double() - exact(x, ids, weights)).abs().max().item() < 1e-5
                done += 1
            ours.close()
    grid.close()
    return done


@pytest.mark.parametrize("world", MAPS)
def test_bits_of_the_torch_backend(world: int) -> None:
    assert run_ranks(checks, world, MAPS[world], timeout=150.0) == [len(MAPS[world]) * 3 * len(KINDS)] * world


def traffic() -> list[Any]:
    node_of, rank = (0, 0, 1, 1), int(os.environ["RANK"])
    grid = Grid.create(GridSpec(dp=4), torch.device("cpu"), 60.0)
    spec = make_spec(4)
    dispatcher = NodeDispatcher(grid.ep, spec, ShmHeap(grid.ep), node_of)
    x, ids, weights = make_tokens(rank, 7, spec, "random", 9)
    ticket = dispatcher.dispatch_send(x, ids, weights)
    assert dispatcher.bytes_sent() == between(spec, node_of, rank, ids, dispatcher.wire)
    grid.ep.barrier("counted")
    routed = dispatcher.dispatch_recv(ticket, layout="rank")
    forwarded = dispatcher.bytes_sent()
    dispatcher.combine_recv(dispatcher.combine_send(torch.zeros(4 * spec.max_tokens, spec.hidden), routed))
    across = [r for r in range(4) if node_of[r] != node_of[rank]]
    assert all(forwarded[r] == 0 for r in across if r not in dispatcher.nodes.rail), "only the rail crosses"
    everything = dispatcher.bytes_sent()
    results = {r: everything[r] - forwarded[r] for r in across}
    dispatcher.close()
    grid.close()
    return [ids.tolist(), results, dispatcher.nodes.rail]


def test_a_token_crosses_once_and_its_result_once() -> None:
    spec, found = make_spec(4), run_ranks(traffic, 4)
    for rank, (_, results, rail) in enumerate(found):
        node = rank // 2
        for other, n_bytes in results.items():
            wanted = 0
            if other in rail:
                wanted = sum(any(i >= 0 and i // spec.slots_per_rank // 2 == node for i in row) for row in found[other][0])
            assert n_bytes == wanted * spec.hidden * 4, (rank, other)


def halves_overlap() -> int:
    """Two dispatches on their way, with the second's tokens narrower; then a rank that lags behind."""
    rank = int(os.environ["RANK"])
    grid = Grid.create(GridSpec(dp=4), torch.device("cpu"), 60.0)
    spec = make_spec(4)
    ours = NodeDispatcher(grid.ep, spec, ShmHeap(grid.ep), (0, 0, 1, 1))
    theirs = TorchNodeDispatcher(grid.ep, spec, (0, 0, 1, 1))
    for seed in range(6):
        first, second = make_tokens(rank, (rank + seed) % 12, spec, "random", seed), make_tokens(rank, 3, spec, "with_none", 50 + seed)
        a = ours.dispatch_send(*first)
        b = ours.dispatch_send(*second, capacity=3)
        if rank == seed % 4:
            torch.tensor(0).item()
            import time

            time.sleep(0.05)
        got_b, got_a = ours.dispatch_recv(b), ours.dispatch_recv(a)
        outs = []
        for routed in (got_a, got_b):
            outs.append(ours.combine_recv(ours.combine_send(routed.x * 2.0, routed)))
        for (x, ids, weights), out in zip((first, second), outs, strict=True):
            routed = theirs.dispatch(x, ids, weights)
            assert torch.equal(theirs.combine(routed.x * 2.0, routed), out), seed
    ours.close()
    grid.close()
    return 6


def test_two_on_their_way() -> None:
    assert run_ranks(halves_overlap, 4, timeout=90.0) == [6] * 4


def one_dies() -> str:
    rank = int(os.environ["RANK"])
    grid = Grid.create(GridSpec(dp=4), torch.device("cpu"), 60.0)
    spec = make_spec(4, timeout_ms=700)
    dispatcher = NodeDispatcher(grid.ep, spec, ShmHeap(grid.ep), (0, 0, 1, 1))
    tokens = make_tokens(rank, 4, spec, "random", 1)
    whole_trip(dispatcher, rank, *tokens)
    if rank == 3:
        return ""
    with pytest.raises(RuntimeError) as told:
        whole_trip(dispatcher, rank, *tokens)
    return str(told.value)


def test_who_is_missing_is_said() -> None:
    said = run_ranks(one_dies, 4)
    assert "rank 3 did not come to dispatch 2" in said[1], "its rail"
    for rank in (0, 1, 2):
        assert f"rank {rank}: rank " in said[rank] and "within 700 ms" in said[rank], said[rank]


def test_layout() -> None:
    spec = make_spec(4)
    nodes = Nodes.of((0, 1, 0, 1), 3)
    assert (nodes.node, nodes.place, nodes.members, nodes.rail) == (1, 1, (1, 3), (2, 3))
    flat, wire = Wire.of(spec), NodeWire.over(spec, nodes)
    assert wire.relay_at == flat.channel_bytes and wire.channel_bytes >= flat.channel_bytes + 2 * 2 * 12 * wire.home_pitch
    assert wire.narrowed(3).channel_bytes == wire.channel_bytes
    assert NodeWire.over(make_spec(4, deterministic=True), nodes).relay_rows == 3
    relay = wire.relay(torch.zeros(wire.total_bytes, dtype=torch.uint8), 1)
    assert relay.shape == (2, 2, 12, 24)


def test_refusals() -> None:
    heap = VirtualHeap(3).of(0)
    with pytest.raises(ValueError, match="the same number of ranks on every node"):
        NodeDispatcher(
            Group("ep", range(3), 0, process_group=None, deadline_s=1.0, progress=Group.solo().progress), make_spec(3), heap, (0, 0, 1)
        )
    with pytest.raises(ValueError, match="the node map has 2 entries, the expert group 1 ranks"):
        NodeDispatcher(Group.solo(), make_spec(1), VirtualHeap(1).of(0), (0, 1))
    with pytest.raises(ValueError, match="cannot go on without a rank"):
        NodeDispatcher(Group.solo(), make_spec(1, fault_tolerant=True), VirtualHeap(1).of(0), (0,))
