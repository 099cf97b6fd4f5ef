"""What a dispatcher asks of the memory that its ranks share."""

from __future__ import annotations

from typing import Protocol

from .peers import Peers


class Heap(Protocol):
    """Symmetric memory of one group, with one owner that closes it."""

    name: str  # of the backend that it makes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of this rank's own workspaces that are not closed."""

    def allocate(self, n_bytes: int) -> Peers:
        """Collective: a workspace of ``n_bytes`` on every rank, zeroed before anybody can write into it. Only at setup."""

    def close(self) -> None:
        """Give everything back. May be called twice; waits for no other rank."""
