"""Processes over shared memory of which one is killed while experts move, at a moment of its own choosing."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.select import make_dispatcher
from rorqual.moe.eplb.live.balancer import LiveBalancer
from rorqual.moe.eplb.live.config import LiveConfig
from rorqual.moe.eplb.live.members import Members
from rorqual.moe.eplb.live.recovery import Recovery, RecoveryReport, keep_and_fill
from rorqual.moe.eplb.live.side import side_group
from rorqual.moe.eplb.live.transport import GroupTransport
from rorqual.moe.eplb.topology import Topology
from rorqual.parallel.grid import Grid, GridSpec
from tests.moe.eplb.live.placements import random_placement
from tests.moe.eplb.live.rebalances import HIDDEN, N_LAYERS, TOKENS, TOP_K, ToyModel
from tests.moe.eplb.live.toy import ToyTables, expert_values, is_whole, toy_layers
from tests.moe.eplb.live.virtual import Target

TIMEOUT_MS = 5000  # far more than a busy machine keeps a rank waiting


def write_experts(folder: str, n_experts: int) -> None:
    """A checkpoint: one file a layer."""
    for layer in range(N_LAYERS):
        tensors = {f"{e}.{name}": value for e in range(n_experts) for name, value in expert_values(layer, e).items()}
        save_file({name: value.contiguous() for name, value in tensors.items()}, f"{folder}/{layer}.safetensors")


def read_expert(folder: str, layer: int, expert: int) -> dict[str, torch.Tensor]:
    tensors = load_file(Path(folder, f"{layer}.safetensors"))
    return {name: tensors[f"{expert}.{name}"] for name in ("up", "down", "scale")}


@dataclass
class Killer:
    """Ends this process at the ``which``-th time that it comes to ``point``; "any": at a random time instead."""

    point: str
    which: int

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.which -= 1
            if self.which < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def survive(folder: str, seed: int, victim: int, point: str, n_cycles: int) -> dict[str, Any]:
    """On one rank: steps until ``n_cycles`` cycles have ended after the recovery."""
    world = int(os.environ["WORLD_SIZE"])
    grid = Grid.create(GridSpec(dp=world), torch.device("cpu"), 30.0)
    rank, n_experts = grid.ep.index, 2 * world - 1
    topology = Topology.even(n_slots=3 * world, n_ranks=world)
    rng = np.random.default_rng(seed)
    slots = random_placement(rng, N_LAYERS, n_experts, topology)
    layers, tables = toy_layers(slots, topology, rank), ToyTables(slots)
    spec = EPSpec(
        n_ranks=world, n_slots=topology.n_slots, hidden=HIDDEN, top_k=TOP_K, max_tokens=TOKENS, timeout_ms=TIMEOUT_MS,
        fault_tolerant=True,
    )  # fmt: skip
    model = ToyModel(make_dispatcher("shm", grid, spec), layers, tables, n_experts, rank)
    members = Members(grid.ep)
    alive = [topology]

    def plan(load: np.ndarray, now: np.ndarray) -> Target:
        return Target(slot_to_expert=random_placement(rng, N_LAYERS, n_experts, alive[0]))

    fault: Callable[[str], None] | None = Killer(point, seed % 2) if rank == victim and point != "any" else None
    balancer = LiveBalancer(
        config=LiveConfig(interval=1, first=1, staging=2, max_sends=2, patience=20_000), rank=rank, topology=topology,
        n_experts=n_experts, slot_to_expert=slots, states=[layer.state() for layer in layers],
        transport=GroupTransport(side_group(grid, 30.0)), agreement=members, counts=lambda: model.counts, plan=plan, tables=tables,
        fault=fault,
    )  # fmt: skip
    grid.ep.barrier("together")
    if rank == victim and point == "any":
        threading.Timer(random.Random(seed).uniform(0.0, 0.4), os.kill, (os.getpid(), signal.SIGKILL)).start()
    if grid.watchdog is not None:
        grid.watchdog.stop()  # it ends all ranks when one is lost
    recover = partial(_recover, folder, balancer, members, model, topology, alive)
    found = _run(balancer, members, model, n_cycles, recover)
    whole = is_whole(layers, balancer.slot_to_expert, balancer.mover.topology, rank)
    os._exit(0) if rank == victim else None
    return found | {"whole": whole, "slots": balancer.slot_to_expert.tolist()}


def _recover(
    folder: str, balancer: LiveBalancer, members: Members, model: ToyModel, topology: Topology, alive: list[Topology], lost: list[int],
    step: int,
) -> RecoveryReport:  # fmt: skip
    model.dispatcher.set_active([rank in members.alive for rank in range(topology.n_ranks)])
    alive[0] = topology.without(lost)
    recovery = Recovery(
        balancer=balancer, exchange=members.exchange, load_expert=lambda layer, expert: read_expert(folder, layer, expert), step=step,
        replan=lambda now, left: keep_and_fill(now, left, model.n_experts), deadline_s=40.0,
    )  # fmt: skip
    return recovery.run(lost)


def _run(
    balancer: LiveBalancer, members: Members, model: ToyModel, n_cycles: int, recover: Callable[..., RecoveryReport]
) -> dict[str, Any]:
    step = doubtful = after = 0
    report = None
    while after < n_cycles:
        lost = members.meet(model.dispatcher.active_mask())
        if lost:
            report = recover(lost, step)
        cycle = balancer.boundary(step)
        good = model.step(step)
        doubtful += not good
        assert good or report is None, f"step {step} after the recovery differs from the oracle"
        assert doubtful < 8, "steps stay wrong"
        step += 1
        after += cycle is not None and report is not None
    assert report is not None
    fields = ("lost_ranks", "lost_experts", "loaded", "sent")
    return {"doubtful": doubtful, "steps": step, "outcomes": balancer.stats.cycles} | {name: getattr(report, name) for name in fields}
