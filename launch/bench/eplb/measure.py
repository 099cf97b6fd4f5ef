"""What the row-makers of this benchmark share: the time of a call, a row, and a look at every plan before its figures count."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from ....moe.eplb.topology import Ints, Topology
from ....moe.eplb.validate import validate
from ..results import Row

_Result = TypeVar("_Result")


def timed(call: Callable[[], _Result], tries: int) -> tuple[_Result, float]:
    """What a call returns, and the least seconds of the process that one of some calls took: the machine may be busy."""
    best = np.inf
    for _ in range(tries):
        start = time.process_time()
        result = call()
        best = min(best, time.process_time() - start)
    return result, float(best)


def figure(name: str, params: dict[str, Any], value: float, unit: str, peers: Mapping[str, float], target: float | None) -> Row:
    """A row of which less is better, rounded for reading."""
    shown = {peer: round(float(found), 5) for peer, found in peers.items()}
    return Row(name=name, params=params, value=round(float(value), 5), unit=unit, better="lower", peers=shown, target=target)


def require_valid(slots: Ints, n_experts: int, topology: Topology) -> None:
    """RuntimeError: the map [layers, slots] may not be used."""
    problems = validate(slots, n_experts, topology)
    if problems:
        raise RuntimeError(f"the plan for {topology.n_slots} slots of {topology.n_ranks} ranks may not be used: {problems}")
