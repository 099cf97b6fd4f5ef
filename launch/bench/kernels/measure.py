"""One case measured: checked, timed beside its peers, held against floor and target."""

from __future__ import annotations

import gc

import torch

from ..results import Row
from .case import Call, Case, Runs, Target
from .roof import Roof
from .timing import event_us, graph_us


def time_call(call: Call | list[Call], case: Case) -> float:
    """Microseconds of one launch, as the case wants it timed."""
    return graph_us(call) if case.graph else event_us(call)


def release() -> None:
    """Give the memory of the last case back."""
    gc.collect()
    torch.cuda.empty_cache()


def target_us(target: Target | None, floor: float, peers: dict[str, float]) -> float | None:
    """The target in microseconds; None when there is none, or its peer was not there."""
    if target is None:
        return None
    if target.us is not None:
        return target.us
    if target.roof is not None:
        return floor / target.roof
    if target.peer == "best":
        return min(peers.values()) / target.ratio if peers else None
    return peers[target.peer] / target.ratio if target.peer in peers else None


def measure(case: Case, roof: Roof, *, with_peers: bool = True) -> Row:
    """The row of one case.

    Raises:
        AssertionError: the operation gives a wrong result.
    """
    runs: Runs = case.build()
    try:
        if runs.check is not None:
            runs.check()
        ours = time_call([runs.ours, *runs.rotate], case)
        peers = {name: time_call(call, case) for name, call in runs.peers.items()} if with_peers else {}
        floor = roof.floor_us(case.n_bytes, case.flops, case.unit)
        return Row(
            name=f"{case.op} {case.name}" if not case.name.startswith(case.op) else case.name,
            params=dict(case.params),
            value=ours,
            unit="us",
            better="lower",
            roof=floor / ours if floor else None,
            peers=peers,
            target=target_us(case.target, floor, peers),
        )
    finally:
        del runs
        release()
