"""The backend in two hops over a heap: "symm_node", "nvshmem_node", "shm_node" by the heap's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...parallel.group import Group
from ..caps import Caps
from ..dispatcher import EPSpec
from ..heap.heap import Heap
from ..peer import PeerDispatcher
from ..wire import Wire
from .nodes import Nodes
from .ops_torch import node_ops
from .wire import NodeWire


class NodeDispatcher(PeerDispatcher):
    """``PeerDispatcher`` that takes a token to a node once, and its result back once, however many of its experts are there.

    The host drives both hops and waits in the receiving halves, so no CUDA graph can hold it. A rank that does not answer
    ends the job: everything of its rail goes through it.
    """

    caps: Caps = replace(
        PeerDispatcher.caps, graph=False, fault_mask=False, needs=("memory of its node and of its rail mapped by every rank",)
    )

    def __init__(self, group: Group, spec: EPSpec, heap: Heap, node_of: Sequence[int], *, device: torch.device | None = None) -> None:
        """Collective over ``group``. ``node_of`` has the node of every rank of it. ValueError: see ``PeerDispatcher`` and ``Nodes``."""
        try:
            if len(node_of) != group.size:
                raise ValueError(f"two hops: the node map has {len(node_of)} entries, the expert group {group.size} ranks")
            self.nodes = Nodes.of(node_of, group.index)
        except ValueError:
            heap.close()
            raise
        super().__init__(group, spec, heap, ops=node_ops(self.nodes, device or torch.device("cpu")), device=device)
        self.name = f"{heap.name}_node"

    def _layout(self, spec: EPSpec) -> Wire:
        return NodeWire.over(spec, self.nodes)


def workspace_bytes(spec: EPSpec, node_of: Sequence[int]) -> int:
    """Bytes of symmetric memory that a dispatcher of ``spec`` over these nodes takes on every rank."""
    return NodeWire.over(spec, Nodes.of(node_of, 0)).total_bytes
