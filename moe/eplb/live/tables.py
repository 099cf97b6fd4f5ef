"""The tables that say where tokens go, as a move sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..topology import Ints


class Tables(Protocol):
    """Made while a batch is prepared, written at its commit."""

    def deal(self, layers: Sequence[int], rows: Ints) -> Any:
        """In the worker thread: what ``write`` takes for MoE layers ``layers`` with the slots ``rows`` [len(layers), slots]."""

    def write(self, layers: Sequence[int], dealt: Any) -> None:
        """At a boundary, on the stream of steps: rewrite the tables in place. Done twice it is done once."""
