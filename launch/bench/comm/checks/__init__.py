"""What every dispatch/combine backend must do, as plain functions of one rank: ``CHECKS``. Tests and ``bench comm --check`` run them.

A check is ``check(party) -> numbers for the record`` and raises ``CheckFailed``. All ranks run the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from . import arrivals, faults, graphs, resources, results
from .party import CheckFailed, Party, require
from .threads import in_threads

__all__ = ["CHECKS", "CORE", "FAULTS", "CheckFailed", "Party", "applicable", "in_threads", "require", "run"]

Check = Callable[[Party], dict[str, Any]]

#: name -> check of any backend
CHECKS: dict[str, Check] = {
    "arrivals": arrivals.arrivals,
    "payloads": arrivals.payloads,
    "shapes": arrivals.shapes,
    "results": results.results,
    "identity": results.identity,
    "repeats": results.repeats,
    "padding": results.padding,
    "overlap": results.overlap,
    "alternation": results.alternation,
    "delays": results.delays,
    "rounding": results.rounding,
    "traffic": resources.traffic,
    "memory": resources.memory,
    "graphs": graphs.graphs,
    "busy": graphs.busy,
    "refusals": faults.refusals,
    "disagreement": faults.disagreement,
}
#: checks of backends that wait by themselves, on two ranks or more
FAULTS: dict[str, Check] = {"missing": faults.missing, "going_on": faults.going_on}


#: what stands for a check where time is short
_BRIEF: dict[str, Check] = {
    "arrivals": partial(arrivals.arrivals, thorough=False),
    "shapes": partial(arrivals.shapes, hiddens=(3584,), ks=(6,)),
    "results": partial(results.results, thorough=False),
    "overlap": partial(results.overlap, share=9),
    "delays": partial(results.delays, rounds=4),
    "memory": partial(resources.memory, cycles=4),
    "graphs": partial(graphs.graphs, replays=200),
}
#: the least of it, for many ranks on few cores
CORE = ("arrivals", "results", "padding", "traffic", "going_on")


def applicable(party: Party, fault_mask: bool, brief: bool = False) -> dict[str, Check]:
    """The checks of this party's backend, or a brief form of each."""
    found = {**CHECKS, **(_BRIEF if brief else {}), **(FAULTS if fault_mask and party.size > 1 else {})}
    return {name: check for name, check in found.items() if name not in party.reach.without}


def run(party: Party, checks: dict[str, Check]) -> dict[str, dict[str, Any]]:
    """Run ``checks``; the record of each. The first failure ends it, with the check's name in front."""
    record = {}
    for name, check in checks.items():
        try:
            record[name] = check(party)
        except CheckFailed as error:
            raise CheckFailed(f"{party.backend}, rank {party.rank} of {party.size}, {name}: {error}") from error
    return record
