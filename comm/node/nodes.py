"""Which ranks form a node, and which of them stand for each other across nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..torch_node import rails


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """``table[node][place]`` is an EP rank. Ranks of the same place form a rail: only they talk across nodes."""

    table: tuple[tuple[int, ...], ...]
    node_of: tuple[int, ...]  # node of every rank
    rank: int  # this one

    @classmethod
    def of(cls, node_of: Sequence[int], rank: int) -> Nodes:
        """ValueError unless all nodes have the same number of ranks."""
        return cls(table=tuple(map(tuple, rails(node_of))), node_of=tuple(node_of), rank=rank)

    @property
    def node(self) -> int:
        """This rank's."""
        return self.node_of[self.rank]

    @property
    def place(self) -> int:
        """This rank's in its node."""
        return self.table[self.node].index(self.rank)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of this node, ascending."""
        return self.table[self.node]

    @property
    def rail(self) -> tuple[int, ...]:
        """The rank of this place on every node, by node; this rank among them."""
        return tuple(ranks[self.place] for ranks in self.table)

    @property
    def n_nodes(self) -> int:
        """Nodes."""
        return len(self.table)

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        return len(self.members)
