"""Two hops where other nodes are not mapped: what is left for puts to do, done here by a stand-in, gives the same bits."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from rorqual.comm.blocks import Blocks
from rorqual.comm.heap.peers import Peers
from rorqual.comm.heap.shm import ShmHeap
from rorqual.comm.node.dispatcher import NodeDispatcher
from rorqual.comm.node.nodes import Nodes
from rorqual.comm.node.ops_torch import NodeOps
from rorqual.comm.node.wire import NodeWire
from rorqual.comm.nvshmem.two_level import NvshmemNodeDispatcher
from rorqual.comm.state import PeerState
from rorqual.comm.wire import COMBINE, DISPATCH
from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.group import Group
from tests.comm.node.test_two_hops import make_spec
from tests.comm.routing import KINDS, make_tokens, whole_trip
from tests.ranks import run_ranks


class Puts(NodeOps):
    """Knows all workspaces, and carries what a put carries: from symmetric memory to the same place, or rows to a place in ``home``."""

    def __init__(self, nodes: Nodes, everybody: Peers) -> None:
        super().__init__(nodes, torch.device("cpu"))
        self.everybody = everybody
        self.rows = 0

    def _far(self, peers: Peers) -> list[tuple[int, int]]:
        return [(node, rank) for node, rank in enumerate(self.nodes.rail) if peers.views[rank] is None]

    def _flag(self, theirs: Blocks, own: Blocks, phase: int, me: int, state: PeerState, channel: int) -> None:
        theirs.flags[phase, me, 1] = own.flags[phase, me, 1]
        theirs.flags[phase, me, 0] = state.epoch[channel]

    def put_tokens(self, wire: NodeWire, peers: Peers, state: PeerState, channel: int, programs: int) -> None:
        me = peers.rank
        own = Blocks.of(wire, peers.own, channel)
        n = int(own.flags[DISPATCH, me, 1])
        assert int(own.flags[DISPATCH, me, 0]) == int(state.epoch[channel]), "this rank's own flag comes first"
        for node, rank in self._far(peers):
            theirs = Blocks.of(wire, self.everybody.views[rank], channel)  # type: ignore[arg-type]
            theirs.ids[me, :n], theirs.weights[me, :n] = own.ids[me, :n], own.weights[me, :n]
            span = wire.slots_per_rank * self.nodes.per_node
            wanted = ((own.ids[me, :n] >= node * span) & (own.ids[me, :n] < (node + 1) * span)).any(dim=1)
            theirs.rows[me, :n][wanted] = own.rows[me, :n][wanted]
            self.rows += int(wanted.sum())
            self._flag(theirs, own, DISPATCH, me, state, channel)

    def put_home(
        self, wire: NodeWire, peers: Peers, state: PeerState, y: torch.Tensor, there: torch.Tensor, index: torch.Tensor | None,
        channel: int, programs: int,
    ) -> None:  # fmt: skip
        own = Blocks.of(wire, peers.own, channel)
        for node, rank in self._far(peers):
            theirs = Blocks.of(wire, self.everybody.views[rank], channel)  # type: ignore[arg-type]
            for token in range(int(own.flags[DISPATCH, rank, 1])):
                line = node * wire.max_tokens + token
                for column in range(there.shape[1]):
                    if int(there[line, column]) >= 0:
                        value = y[line] if index is None else y[int(index[line, column])]
                        theirs.home[self.nodes.node if index is None else column, token] = value
                        state.sent[2, rank] += 1
            self._flag(theirs, own, COMBINE, peers.rank, state, channel)


def across(node_of: tuple[int, ...]) -> int:
    grid = Grid.create(GridSpec(dp=int(os.environ["WORLD_SIZE"])), torch.device("cpu"), 60.0)
    rank, done = grid.ep.index, 0
    for changes in ({}, {"deterministic": True}, {"dtype": "bfloat16", "payload": "fp8", "hidden": 144}):
        spec = make_spec(grid.ep.size, **changes)
        stores = NodeDispatcher(grid.ep, spec, ShmHeap(grid.ep), node_of)
        puts = NodeDispatcher(grid.ep, spec, ShmHeap(grid.ep), node_of)
        ops = Puts(puts.nodes, puts.peers)
        views = tuple(view if node_of[r] == node_of[rank] else None for r, view in enumerate(puts.peers.views))
        puts.peers = replace(puts.peers, views=views)
        puts.ops = ops.bundle("puts")
        for seed, kind in enumerate(KINDS):
            tokens: Any = make_tokens(rank, (4 * rank + seed) % (spec.max_tokens + 1), spec, kind, seed)
            before = ops.rows
            assert torch.equal(whole_trip(puts, rank, *tokens), whole_trip(stores, rank, *tokens)), (changes, kind)
            homes = [[-1 if i < 0 else node_of[i // spec.slots_per_rank] for i in row] for row in tokens[1].tolist()]
            crossing = sum(len({n for n in row if n >= 0 and n != node_of[rank]}) for row in homes)
            assert ops.rows - before == crossing, "a token crosses to a node once"
            done += 1
        assert puts.bytes_sent() == stores.bytes_sent()
        for dispatcher in (stores, puts):
            dispatcher.close()
    grid.close()
    return done


@pytest.mark.parametrize("node_of", [(0, 1), (0, 0, 1, 1)])
def test_puts_give_the_bits_of_stores(node_of: tuple[int, ...]) -> None:
    world = len(node_of)
    assert run_ranks(across, world, node_of, timeout=120.0) == [3 * len(KINDS)] * world


def test_nothing_reaches_what_is_not_mapped() -> None:
    ops, nothing = NodeOps(Nodes.of((0, 1), 0), torch.device("cpu")), torch.zeros(0)
    wire: Any = None
    with pytest.raises(RuntimeError, match="on other nodes cannot be mapped here"):
        ops.put_tokens(wire, wire, wire, 0, 1)
    with pytest.raises(RuntimeError, match="on other nodes cannot be mapped here"):
        ops.put_home(wire, wire, wire, nothing, nothing, None, 0, 1)


def test_nodes_over_nvshmem_are_runs() -> None:
    with pytest.raises(ValueError, match=r"nodes of neighbouring ranks, found the node map \[0, 1, 0, 1\]"):
        NvshmemNodeDispatcher(Group.solo(), make_spec(1), torch.device("cpu"), (0, 1, 0, 1))
