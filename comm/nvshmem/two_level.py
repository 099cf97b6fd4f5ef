"""Two hops where the ranks of other nodes cannot be mapped: the first hop and the way back across are puts along the rail."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ...parallel.group import Group
from ..dispatcher import EPSpec
from ..heap.nvshmem import NvshmemHeap
from ..heap.peers import Peers
from ..node.dispatcher import NodeDispatcher
from ..node.nodes import Nodes
from ..node.ops_torch import NodeOps
from ..node.wire import NodeWire
from ..state import PeerState


class NvshmemNodeDispatcher(NodeDispatcher):
    """``NodeDispatcher`` over an ``NvshmemHeap``: stores inside a node, puts between nodes. Nodes are runs of neighbouring ranks."""

    def __init__(self, group: Group, spec: EPSpec, device: torch.device, node_of: Sequence[int], *, unmap: Collection[int] = ()) -> None:
        """Collective over ``group``. ``unmap`` names ranks to be served by puts even where they can be mapped; not of this node."""
        if list(node_of) != sorted(node_of):
            raise ValueError(f"two hops over NVSHMEM need nodes of neighbouring ranks, found the node map {list(node_of)}")
        heap = NvshmemHeap(group, device, unmap=unmap)
        super().__init__(group, spec, heap, node_of, device=device)
        try:
            near = [rank for rank in self.nodes.members if self.peers.views[rank] is None]
            if near:
                raise ValueError(f"two hops: ranks {near} are on this node but cannot be mapped; use nvshmem or torch_node")
            if heap.unmapped:
                from .kernels.put_home import ring_bytes

                ring = heap.symmetric(ring_bytes(self.wire, spec.max_sms))
                self.ops = _PutHops(self.nodes, device, ring, spec.max_sms).bundle("nvshmem")
        except BaseException:
            heap.close()
            raise


class _PutHops(NodeOps):
    def __init__(self, nodes: Nodes, device: torch.device, ring: torch.Tensor, programs: int) -> None:
        super().__init__(nodes, device)
        self._ring = ring
        self._programs = programs  # as many as the ring has room for

    def put_tokens(self, wire: NodeWire, peers: Peers, state: PeerState, channel: int, programs: int) -> None:
        """See ``NodeOps``."""
        from .kernels.put_tokens import Reach, put_tokens

        nodes = self.nodes
        reach = Reach(first=nodes.place, step=nodes.per_node, count=nodes.n_nodes, span=wire.slots_per_rank * nodes.per_node)
        put_tokens(wire, peers, state, channel=channel, programs=self._programs, reach=reach)

    def put_home(
        self, wire: NodeWire, peers: Peers, state: PeerState, y: torch.Tensor, there: torch.Tensor, index: torch.Tensor | None,
        channel: int, programs: int,
    ) -> None:  # fmt: skip
        """See ``NodeOps``."""
        from .kernels.put_home import put_home
        from .kernels.put_tokens import Reach

        nodes = self.nodes
        reach = Reach(first=nodes.place, step=nodes.per_node, count=nodes.n_nodes, span=wire.slots_per_rank * nodes.per_node)
        put_home(
            wire, peers, state, y, there, self._ring, channel=channel, index=index, shares=None, deterministic=index is not None,
            programs=self._programs, reach=reach, block=nodes.node,
        )  # fmt: skip
