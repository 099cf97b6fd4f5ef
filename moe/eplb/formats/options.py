"""What a file may leave open, and a format as the table of formats lists it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..topology import Ints, Topology
from .files import Raw


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What the reader is told because the file may not say it. What a file says itself is checked against it."""

    n_experts: int | None = None  # logical experts of a layer
    layer_ids: tuple[int, ...] | None = None  # numbers of the file's layers in the model, or those to pick where it numbers them
    scale: float | None = None  # of values that are not counts
    slot_to_expert: Ints | None = None  # [layers, slots] placement that counts of slots were recorded under
    topology: Topology | None = None  # of a placement

    def ids(self, n_layers: int, what: str) -> tuple[int, ...]:
        """Layer ids of a file that does not number its layers: as given, else 0 ...

        Raises:
            ValueError: another number of ids than layers.
        """
        if self.layer_ids is None:
            return tuple(range(n_layers))
        if len(self.layer_ids) != n_layers:
            raise ValueError(f"{what}: has {n_layers} layers, and {len(self.layer_ids)} layer ids were given; give one for each")
        return self.layer_ids


@dataclass(frozen=True, kw_only=True)
class Format:
    """One kind of file."""

    name: str  # ends in "load" or "map"
    what: Literal["load", "map"]  # LoadTrace or ExpertMap
    suffixes: tuple[str, ...]  # files of this suffix are written in the first format that has it
    about: str  # one line for people
    matches: Callable[[Raw], bool]  # whether contents are of this format
    read: Callable[[Raw, ReadOptions], Any]  # contents -> LoadTrace or ExpertMap
    write: Callable[[Any, Path], None] | None  # None: only read
