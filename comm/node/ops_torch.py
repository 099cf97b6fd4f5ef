"""The four operations in two hops, in plain PyTorch, with the signatures of ``comm.kernels.*_torch``.

Between nodes only ranks of the same rail touch each other's memory. Sums are in fp32 and rounded at every hop: per rank (ascending
slots), per node (ascending ranks), over nodes (ascending); deterministic: nothing is added before a token's own rank, which adds in
the order of its choices. That is the order of ``torch_node``, so the bits are the same.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ..blocks import Blocks
from ..heap.peers import Peers
from ..kernels.receive_tokens_torch import receive_tokens as receive_all
from ..kernels.send_tokens_torch import pack
from ..kernels.wait_torch import await_flag, stop_if_failed
from ..ops import PeerOps
from ..order import ordered_sum
from ..rows import DTYPES
from ..state import PeerState
from ..wire import COMBINE, DISPATCH
from .nodes import Nodes
from .wire import NodeWire


def node_ops(nodes: Nodes, device: torch.device) -> PeerOps:
    """The operations over ``nodes``. Not for virtual ranks that take turns: a receive waits for what other ranks' receives pass on."""
    return NodeOps(nodes, device).bundle("torch")


class NodeOps:
    """See ``node_ops``. A rail that cannot be mapped is served by ``put_tokens`` and ``put_home``, which a subclass may have."""

    def __init__(self, nodes: Nodes, device: torch.device) -> None:
        self.nodes = nodes
        self._node_of = torch.tensor([*nodes.node_of, -1], device=device)  # index -1 finds the last: no choice

    def bundle(self, name: str) -> PeerOps:
        """The four operations."""
        return PeerOps(
            name=name,
            send_tokens=self.send_tokens,
            receive_tokens=self.receive_tokens,
            send_home=self.send_home,
            sum_home=self.sum_home,
        )

    def put_tokens(self, wire: NodeWire, peers: Peers, state: PeerState, channel: int, programs: int) -> None:
        """Put the rows and choices that lie in this rank's own workspace to the rail's ranks that are not mapped, then the flags."""
        raise RuntimeError("ranks of the same place on other nodes cannot be mapped here, and plain stores cannot reach them")

    def put_home(
        self, wire: NodeWire, peers: Peers, state: PeerState, y: torch.Tensor, there: torch.Tensor, index: torch.Tensor | None,
        channel: int, programs: int,
    ) -> None:  # fmt: skip
        """Put results to the ranks of the rail that are not mapped, then the flags.

        ``there`` int32 [nodes * M, 1 or k] is -1 where nothing goes. y has a row for each, or ``index`` names one of y's.
        """
        raise RuntimeError("ranks of the same place on other nodes cannot be mapped here, and plain stores cannot reach them")

    # ---- dispatch ----------------------------------------------------------------------------------------------------

    def send_tokens(
        self, wire: NodeWire, peers: Peers, state: PeerState, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *,
        channel: int, n_valid: torch.Tensor | None = None, scales: torch.Tensor | None = None, tag: int = 0, programs: int = 1,
    ) -> None:  # fmt: skip
        """Each row once to the rail's rank of every node that hosts one of its choices; all choices to the whole rail."""
        me = peers.rank
        stop_if_failed(state)
        n = len(x) if n_valid is None else max(0, min(int(n_valid), len(x)))
        rows = pack(wire, x[:n], None if scales is None else scales[:n])
        ids, weights = ids[:n], weights[:n]
        nodes = self._node_of[self._ranks(wire, ids)]
        for node, rank in enumerate(self.nodes.rail):
            blocks = self._blocks(wire, peers, rank if peers.views[rank] is not None else me, channel)  # puts start from here
            wanted = (nodes == node).any(dim=1).nonzero().view(-1)
            blocks.rows[me].index_copy_(0, wanted, rows[wanted])
            blocks.ids[me, :n], blocks.weights[me, :n] = ids, weights
            if rank != me:
                state.sent[0, rank] += len(wanted)
                state.sent[1, rank] += n
        state.epoch[channel] += 1
        for rank in self._mapped(peers):
            self._raise(self._blocks(wire, peers, rank, channel), DISPATCH, me, state, channel, n)
        if len(self._mapped(peers)) < wire.n_nodes:
            self.put_tokens(wire, peers, state, channel, programs)

    def receive_tokens(
        self, wire: NodeWire, peers: Peers, state: PeerState, slots: torch.Tensor, shares: torch.Tensor, *,
        channel: int, timeout_ms: int, fault_tolerant: bool, tag: int = 0, programs: int = 1,
    ) -> None:  # fmt: skip
        """Pass on what came from this rail to the ranks of the node that want it; then receive as in one hop."""
        how: dict[str, Any] = {"channel": channel, "timeout_ms": timeout_ms, "fault_tolerant": fault_tolerant, "tag": tag}
        own, begin = self._blocks(wire, peers, peers.rank, channel), time.monotonic()
        others = [rank for rank in self.nodes.members if rank != peers.rank]
        for source in self.nodes.rail:
            n = self._await(wire, peers, state, own, DISPATCH, source, begin=begin, **how)
            ranks = self._ranks(wire, own.ids[source, :n])
            for rank in others:
                blocks = self._blocks(wire, peers, rank, channel)
                wanted = (ranks == rank).any(dim=1).nonzero().view(-1)
                blocks.rows[source].index_copy_(0, wanted, own.rows[source][wanted])
                blocks.ids[source, :n], blocks.weights[source, :n] = own.ids[source, :n], own.weights[source, :n]
                state.sent[0, rank] += len(wanted)
                state.sent[1, rank] += n
                self._raise(blocks, DISPATCH, source, state, channel, n)
        receive_all(wire, peers, state, slots, shares, **how)

    # ---- combine -----------------------------------------------------------------------------------------------------

    def send_home(
        self, wire: NodeWire, peers: Peers, state: PeerState, y: torch.Tensor, slots: torch.Tensor, *, channel: int,
        index: torch.Tensor | None = None, shares: torch.Tensor | None = None, deterministic: bool, tag: int = 0, programs: int = 1,
    ) -> None:  # fmt: skip
        """What this rank adds to every token, to the rank of this node on the token's rail."""
        dtype, m = DTYPES[wire.dtype], wire.max_tokens
        stop_if_failed(state)
        if index is not None and not deterministic:
            assert shares is not None
            order = slots.masked_fill(slots < 0, wire.slots_per_rank).sort(dim=1, stable=True).indices
            y = ordered_sum(y, torch.where(slots < 0, -1, index).gather(1, order).long(), shares.gather(1, order))
        for place, rail in enumerate(self.nodes.members):
            relay = wire.relay(self._view(peers, rail), channel)
            for node, ranks in enumerate(self.nodes.table):
                block = slice(ranks[place] * m, (ranks[place] + 1) * m)
                n_rows = 0
                for row in range(wire.top_k if deterministic else 1):
                    here = (slots[block, row] >= 0 if deterministic else (slots[block] >= 0).any(dim=1)).nonzero().view(-1)
                    values = y[index[block, row][here].long()] if deterministic and index is not None else y[block][here]
                    relay[node, row if deterministic else self.nodes.place].index_copy_(0, here, values.to(dtype))
                    n_rows += len(here)
                if rail != peers.rank:
                    state.sent[2, rail] += n_rows
        for rank in self.nodes.members:
            self._raise(self._blocks(wire, peers, rank, channel), COMBINE, peers.rank, state, channel, 0)

    def sum_home(
        self, wire: NodeWire, peers: Peers, state: PeerState, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, *, channel: int,
        timeout_ms: int, fault_tolerant: bool, deterministic: bool, n_valid: torch.Tensor | None = None, tag: int = 0, programs: int = 1,
    ) -> None:  # fmt: skip
        """Add up this node's results for the rail and send them across; then wait for the other nodes' and add all up."""
        how: dict[str, Any] = {"channel": channel, "timeout_ms": timeout_ms, "fault_tolerant": fault_tolerant, "tag": tag}
        own, begin = self._blocks(wire, peers, peers.rank, channel), time.monotonic()
        for rank in self.nodes.members:
            self._await(wire, peers, state, own, COMBINE, rank, begin=begin, **how)
        self._relay(wire, peers, state, own, channel, deterministic, programs)
        begin = time.monotonic()
        for rank in self.nodes.rail:
            if rank != peers.rank:
                self._await(wire, peers, state, own, COMBINE, rank, begin=begin, **how)
        n = len(ids) if n_valid is None else max(0, min(int(n_valid), len(ids)))
        ids, rows = ids[:n], own.home.reshape(-1, wire.hidden)
        if deterministic:
            columns = torch.arange(wire.top_k, device=ids.device)
            token = torch.arange(n, device=ids.device).unsqueeze(1)
            place = torch.where(ids < 0, -1, columns * wire.max_tokens + token)
            out[:n] = ordered_sum(rows, place, weights[:n]).to(out.dtype)
        else:
            out[:n] = ordered_sum(rows, self._places(self._node_of[self._ranks(wire, ids)], range(wire.n_nodes), wire)).to(out.dtype)
        out[n:] = 0

    def _relay(
        self, wire: NodeWire, peers: Peers, state: PeerState, own: Blocks, channel: int, deterministic: bool, programs: int
    ) -> None:  # fmt: skip
        """From this rank's relay to the homes of its rail, and the flags; its own home needs none."""
        relay = wire.relay(peers.own, channel)
        m, far = wire.max_tokens, wire.n_nodes - len(self._mapped(peers))
        there = torch.full((wire.n_nodes * m, wire.top_k if deterministic else 1), -1, dtype=torch.int32, device=relay.device)
        totals = relay.new_empty((wire.n_nodes * m if far and not deterministic else 0, wire.hidden))
        for node, source in enumerate(self.nodes.rail):
            n = int(own.flags[DISPATCH, source, 1])
            ranks = self._ranks(wire, own.ids[source, :n])
            if deterministic:
                mine = self._node_of[ranks] == self.nodes.node
                line = torch.arange(wire.top_k, device=relay.device) * m + torch.arange(n, device=relay.device).unsqueeze(1)
                there[node * m : node * m + n] = torch.where(mine, node * wire.top_k * m + line, -1).int()
            else:
                place = self._places(ranks, self.nodes.members, wire)
                here = (place >= 0).any(dim=1)
                there[node * m : node * m + n] = torch.where(here, 0, -1).int().unsqueeze(1)
                total = ordered_sum(relay[node].reshape(-1, wire.hidden), place).to(relay.dtype)
                if peers.views[source] is None:
                    totals[node * m : node * m + n] = total
            if peers.views[source] is not None:
                home, n_rows = self._blocks(wire, peers, source, channel).home, 0
                for row in range(there.shape[1]):
                    chosen = (there[node * m : node * m + n, row] >= 0).nonzero().view(-1)
                    values = relay[node, row][chosen] if deterministic else total[chosen]
                    home[row if deterministic else self.nodes.node].index_copy_(0, chosen, values)
                    n_rows += len(chosen)
                if source != peers.rank:
                    state.sent[2, source] += n_rows
        for source in self._mapped(peers):
            self._raise(self._blocks(wire, peers, source, channel), COMBINE, peers.rank, state, channel, 0)
        if far and deterministic:
            self.put_home(wire, peers, state, relay.reshape(-1, wire.hidden), there, there, channel, programs)
        elif far:
            self.put_home(wire, peers, state, totals, there, None, channel, programs)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _mapped(self, peers: Peers) -> list[int]:
        """Ranks of this rail, this one among them, that are mapped here."""
        return [rank for rank in self.nodes.rail if peers.views[rank] is not None]

    @staticmethod
    def _places(owners: torch.Tensor, wanted: Any, wire: NodeWire) -> torch.Tensor:
        """[n, wanted]: row (i * M + t) where one of token t's choices belongs to the i-th of ``wanted``, else -1."""
        token = torch.arange(len(owners), device=owners.device)
        columns = [torch.where((owners == one).any(dim=1), i * wire.max_tokens + token, -1) for i, one in enumerate(wanted)]
        return torch.stack(columns, dim=1)

    @staticmethod
    def _ranks(wire: NodeWire, ids: torch.Tensor) -> torch.Tensor:
        return torch.div(ids, wire.slots_per_rank, rounding_mode="floor").long()  # -1 stays -1

    @staticmethod
    def _view(peers: Peers, rank: int) -> torch.Tensor:
        view = peers.views[rank]
        if view is None:
            raise RuntimeError(f"the workspace of rank {rank} cannot be mapped here; two hops by plain stores cannot reach it")
        return view

    def _blocks(self, wire: NodeWire, peers: Peers, rank: int, channel: int) -> Blocks:
        return Blocks.of(wire, self._view(peers, rank), channel)

    @staticmethod
    def _raise(blocks: Blocks, phase: int, source: int, state: PeerState, channel: int, count: int) -> None:
        """Write ``source``'s flag: the count first."""
        flag = blocks.flags[phase, source]
        flag[1] = count
        flag[0] = state.epoch[channel]

    @staticmethod
    def _await(wire: NodeWire, peers: Peers, state: PeerState, own: Blocks, phase: int, source: int, **how: Any) -> int:
        n = await_flag(wire, peers, state, own, phase=phase, source=source, **how)
        assert n is not None, "two hops have no rank to spare"
        return n
