"""The workspace of two hops: that of one hop, and a region in which a rank gathers the results of its node for its rail.

The first hop brings row (r, t) to the rank of the same rail, in its own ``rows[r, t]``; from there it is copied to the same place of
every rank of the node that wants it, so that all further work finds what one hop would have brought. On the way back
``relay`` [nodes, places, M, hidden] takes, at (n, p, t), what place p of this node adds to token t of this rail's rank of node n
(deterministic: [nodes, k, M, hidden], the output of each choice by itself); ``home`` [n, t] then takes the sum of node n.

Why no place is written too early: a rank starts a dispatch after its combine, which has seen the flag of its rail on every node; that
rank had seen the combine flags of its whole node, so everybody there was done with the rows of this rank. A rank of a node writes into
a relay again only after it has received the next dispatch of all ranks, the relay's owner among them, whose combine was over then.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from ..dispatcher import EPSpec
from ..rows import DTYPES
from ..wire import Wire
from .nodes import Nodes


@dataclass(frozen=True, kw_only=True)
class NodeWire(Wire):
    """``Wire`` with the relay behind the other regions of a channel."""

    n_nodes: int
    relay_rows: int  # of a node: places, or k in deterministic mode

    @classmethod
    def over(cls, spec: EPSpec, nodes: Nodes) -> NodeWire:
        """The layout that ``spec`` describes, over ``nodes``."""
        rows = spec.top_k if spec.deterministic else nodes.per_node
        return cls(**asdict(Wire.of(spec)), n_nodes=nodes.n_nodes, relay_rows=rows)

    @property
    def relay_at(self) -> int:
        """Offset of ``relay`` in a channel."""
        return super().channel_bytes

    @property
    def channel_bytes(self) -> int:
        """Bytes of one channel."""
        return self.relay_at + -(-self.n_nodes * self.relay_rows * self.room * self.home_pitch // 128) * 128

    def relay(self, workspace: torch.Tensor, channel: int) -> torch.Tensor:
        """The relay of ``channel`` in ``workspace``: [n_nodes, relay_rows, M, hidden], strided."""
        shape = (self.n_nodes, self.relay_rows, self.max_tokens, self.home_pitch)
        start = channel * self.channel_bytes + self.relay_at
        n = self.n_nodes * self.relay_rows * self.max_tokens * self.home_pitch
        return workspace[start : start + n].view(shape)[..., : self.hidden * self.home_itemsize].view(DTYPES[self.dtype])
