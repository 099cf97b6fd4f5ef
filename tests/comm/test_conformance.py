"""What every backend must do, over real ranks on CPUs: one start of processes runs all checks of a world size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rorqual.comm.dispatcher import Dispatcher, EPSpec
from rorqual.comm.heap.shm import ShmHeap
from rorqual.comm.local import LocalDispatcher
from rorqual.comm.peer import PeerDispatcher
from rorqual.comm.torch_flat import TorchDispatcher
from rorqual.comm.torch_node import TorchNodeDispatcher
from rorqual.comm.torch_static import TorchStaticDispatcher
from rorqual.launch.bench.comm.checks import CORE, CheckFailed, Party, applicable, in_threads, run
from rorqual.launch.bench.comm.checks.grids import over_grid
from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.group import Group
from tests.ranks import run_ranks

Plan = list[tuple[str, tuple[int, ...], str]]  # backend, node of each rank, how much: "all", "brief" or "core"


def all_checks(world: int, plan: Plan) -> tuple[list[str], dict[str, float]]:
    """All checks that apply, for backends with their node maps: the names of those run, and the errors against fp64."""
    grid = Grid.create(GridSpec(dp=world), torch.device("cpu"), 60.0)
    done, errors = [], {}
    for backend, node_of, much in plan:
        party = over_grid(grid, backend, node_of=node_of)
        checks = applicable(party, backend == "shm", brief=much != "all")
        record = run(party, {name: check for name, check in checks.items() if much != "core" or name in CORE})
        done += list(record)
        errors |= {f"{backend}_{name}": value for name, value in record["results"].items()}
    grid.close()
    return done, errors


PLANS: dict[int, Plan] = {
    2: [("torch", (0, 0), "all"), ("torch_node", (0, 1), "brief"), ("torch_static", (0, 0), "brief"), ("shm", (0, 0), "all")],
    3: [("torch", (0, 0, 0), "brief"), ("torch_node", (0, 1, 2), "core"), ("shm", (0, 0, 0), "brief")],
    4: [
        ("torch_node", (0, 0, 1, 1), "brief"),
        ("torch_node", (0, 1, 0, 1), "core"),
        ("torch_static", (0,) * 4, "core"),
        ("shm", (0,) * 4, "core"),
    ],
    5: [("shm", (0,) * 5, "core")],
    8: [("torch_node", (0, 0, 1, 1, 2, 2, 3, 3), "core"), ("shm", (0,) * 8, "core")],
}


@pytest.mark.parametrize("world", PLANS)
def test_ranks(world: int, record_property: Callable[[str, object], None]) -> None:
    found = run_ranks(all_checks, world, world, PLANS[world], timeout=200.0)
    done = [names for names, _ in found]
    least = sum({"all": 17, "brief": 17, "core": 4}[much] for _, _, much in PLANS[world])
    assert len(done[0]) >= least and done == [done[0]] * world
    for name in found[0][1]:
        record_property(name, max(errors[name] for _, errors in found))  # largest error relative to the sum of magnitudes


@pytest.mark.parametrize("world", [1, 3])
def test_virtual_ranks(world: int) -> None:
    done = in_threads(world, lambda party: list(run(party, applicable(party, True, brief=True))))
    assert len(done[0]) >= 17 and done == [done[0]] * world


def one(backend: str, spec: EPSpec) -> Dispatcher:
    if backend == "local":
        return LocalDispatcher(spec)
    if backend == "torch_node":
        return TorchNodeDispatcher(Group.solo(), spec, (0,))
    if backend == "shm":
        return PeerDispatcher(Group.solo(), spec, ShmHeap(Group.solo()))
    return (TorchDispatcher if backend == "torch" else TorchStaticDispatcher)(Group.solo(), spec)


@pytest.mark.parametrize("backend", ["local", "torch", "torch_node", "torch_static", "shm"])
def test_one_rank(backend: str) -> None:
    device = torch.device("cpu")
    party = Party(
        backend=backend, rank=0, size=1, device=device, make=lambda spec: one(backend, spec), gather=lambda v: [v], node_of=(0,)
    )  # fmt: skip
    assert len(run(party, applicable(party, False, brief=True))) >= 17


def spoilt(party: Party, half: str) -> Party:
    """The party with a fault in one half of its backend."""

    def make(spec: EPSpec) -> Dispatcher:
        dispatcher: Any = party.make(spec)
        inner = getattr(dispatcher, half)

        def wrong(*args: Any, **more: Any) -> Any:
            result = inner(*args, **more)
            if half == "combine_recv" and len(result):
                result[0, 0] += 2.0**-12
            if half == "dispatch_recv" and result.layout == "contiguous" and len(result.x) > 1:
                result.x = result.x.clone()
                result.x[0] = result.x[-1] * 1.5
            return result

        setattr(dispatcher, half, wrong)
        return dispatcher

    return Party(**{**vars(party), "make": make})


@pytest.mark.parametrize(("half", "check"), [("combine_recv", "results"), ("dispatch_recv", "arrivals")])
def test_the_checks_see_a_fault(half: str, check: str) -> None:
    with pytest.raises(CheckFailed, match=f"virtual, rank . of 2, {check}: "):
        in_threads(2, lambda party: run(spoilt(party, half), {check: applicable(party, False, True)[check]}))


def test_virtual_ranks_that_do_not_all_meet_are_told() -> None:
    """One that ends without the others' meeting leaves them waiting: no result of theirs is one."""
    with pytest.raises(CheckFailed, match="virtual ranks did not all meet within 0.3 s"):
        in_threads(2, lambda party: party.meet() if party.rank else 7, limit_s=0.3)
