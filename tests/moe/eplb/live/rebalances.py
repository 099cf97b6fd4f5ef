"""Processes that compute a toy MoE while their experts move to random places, cycle after cycle, and never differ from an oracle."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import numpy as np
import torch

from rorqual.comm.dispatcher import Dispatcher, EPSpec
from rorqual.comm.select import make_dispatcher
from rorqual.moe.eplb.live.agreement import GroupAgreement
from rorqual.moe.eplb.live.balancer import LiveBalancer
from rorqual.moe.eplb.live.config import LiveConfig
from rorqual.moe.eplb.live.report import Outcome
from rorqual.moe.eplb.live.side import side_group
from rorqual.moe.eplb.live.transport import GroupTransport
from rorqual.moe.eplb.topology import Ints, Topology
from rorqual.parallel.grid import Grid, GridSpec
from tests.memory import own_bytes
from tests.moe.eplb.live.placements import changed, random_placement
from tests.moe.eplb.live.toy import HIDDEN, ToyExperts, ToyTables, expert_values, is_whole, toy_layers
from tests.moe.eplb.live.virtual import Target

N_LAYERS, TOP_K, TOKENS = 2, 3, 5
CPU = torch.device("cpu")


class ToyModel:
    """Layers one after another over a dispatcher, and what they must give."""

    def __init__(self, dispatcher: Dispatcher, layers: list[ToyExperts], tables: ToyTables, n_experts: int, rank: int) -> None:
        self.dispatcher, self.layers, self.tables, self.n_experts, self.rank = dispatcher, layers, tables, n_experts, rank
        self.counts = np.zeros((len(layers), n_experts), dtype=np.int64)
        values = [[expert_values(layer, expert) for expert in range(n_experts)] for layer in range(len(layers))]
        self.up = [torch.stack([v["up"].float() * v["scale"] for v in each]) for each in values]
        self.down = [torch.stack([v["down"] for v in each]) for each in values]

    def step(self, step: int) -> bool:
        """One step of random tokens; whether all layers gave what the oracle does, bit for bit."""
        generator = torch.Generator().manual_seed(1_000_003 * self.rank + step)
        good = True
        for index, layer in enumerate(self.layers):
            x = torch.randint(-2, 3, (TOKENS, HIDDEN), generator=generator).float()
            ids = torch.stack([torch.randperm(self.n_experts, generator=generator)[:TOP_K] for _ in range(TOKENS)])
            weights = torch.randint(1, 4, ids.shape, generator=generator).float()
            self.counts[index] += np.bincount(ids.flatten().numpy(), minlength=self.n_experts)
            got = self.run(layer, x, self.slots_of(index, ids, generator), weights)
            good &= torch.equal(got, self.oracle(index, x, ids, weights))
        return good

    def slots_of(self, index: int, ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Any of an expert's slots for each choice; -1 for an expert that is nowhere."""
        row = torch.from_numpy(self.tables.slots[index])
        has = (row == ids.unsqueeze(-1)).float() * torch.rand((*ids.shape, len(row)), generator=generator)
        return torch.where(has.amax(-1) > 0, has.argmax(-1), -1)

    def run(self, layer: ToyExperts, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        routed = self.dispatcher.dispatch(x, slots, weights)
        sizes = torch.tensor(routed.host_counts())
        y = torch.zeros_like(routed.x)
        n = int(sizes.sum())
        y[:n] = layer(routed.x[:n], torch.repeat_interleave(torch.arange(len(sizes)), sizes))
        return self.dispatcher.combine(y, routed)

    def oracle(self, index: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        each = torch.einsum("tkhi,tkix,tx->tkh", self.down[index][ids], self.up[index][ids], x)
        return (each * weights.unsqueeze(-1)).sum(1)


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def rebalance(n_cycles: int, seed: int) -> dict[str, Any]:
    """On one rank: steps until ``n_cycles`` cycles have ended."""
    world = int(os.environ["WORLD_SIZE"])
    grid = Grid.create(GridSpec(dp=world, ranks_per_node=world // 2), CPU, 60.0)
    rank, n_experts = grid.ep.index, 3 * world
    topology = Topology.even(n_slots=4 * world, n_ranks=world, n_nodes=2)
    slots = random_placement(np.random.default_rng(seed), N_LAYERS, n_experts, topology)
    layers, tables = toy_layers(slots, topology, rank), ToyTables(slots)
    spec = EPSpec(n_ranks=world, n_slots=topology.n_slots, hidden=HIDDEN, top_k=TOP_K, max_tokens=TOKENS)
    model = ToyModel(make_dispatcher("torch", grid, spec), layers, tables, n_experts, rank)
    targets: list[Ints] = []

    def plan(load: np.ndarray, now: Ints) -> Target:
        assert (load.sum(1) % (world * TOKENS * TOP_K) == 0).all() and load.sum() == load[0].sum() * N_LAYERS
        rng = np.random.default_rng([seed, len(targets)])
        far = rng.random() < 0.3
        new = random_placement(rng, N_LAYERS, n_experts, topology, empty=0.2) if far else changed(rng, now, n_experts, topology, 0.3)
        targets.append(new)
        return Target(slot_to_expert=new)

    balancer = LiveBalancer(
        config=LiveConfig(interval=1, first=1, staging=2, max_sends=3, patience=20_000), rank=rank, topology=topology,
        n_experts=n_experts, slot_to_expert=slots, states=[layer.state() for layer in layers],
        transport=GroupTransport(side_group(grid, 60.0)), agreement=GroupAgreement(grid.ep), counts=lambda: model.counts, plan=plan,
        tables=tables,
    )  # fmt: skip
    found = run_cycles(balancer, model, layers, topology, rank, n_cycles)
    if rank == 0:
        assert len(targets) >= n_cycles, "the first rank plans"
    balancer.close()
    grid.close()
    return found


def run_cycles(
    balancer: LiveBalancer, model: ToyModel, layers: list[ToyExperts], topology: Topology, rank: int, n_cycles: int
) -> dict[str, Any]:
    """Steps and boundaries, and what memory they took in the second half."""
    memory, step, longest = (0, 0), 0, 0
    ended = declined = 0
    begin = time.monotonic()
    while ended + declined < n_cycles:
        report = balancer.boundary(step)
        assert model.step(step), f"step {step} differs from the oracle"
        step += 1
        if report is None:
            continue
        assert report.outcome is not Outcome.ABORTED, report.line()
        ended, declined = ended + (report.outcome is Outcome.ENDED), declined + (report.outcome is Outcome.DECLINED)
        longest = max(longest, report.boundaries)
        if (ended + declined) % 10 == 0 or n_cycles < 20:
            assert is_whole(layers, balancer.slot_to_expert, topology, rank)
        for layer in layers:
            layer.remade.clear()
        if ended + declined == n_cycles // 2:
            memory = (own_bytes(), live_tensors())
        if (ended + declined) % 100 == 0 and rank == 0:
            print(f"{ended + declined} cycles in {time.monotonic() - begin:.0f} s, {own_bytes() >> 10} KiB", flush=True)
    return {
        "ended": ended, "declined": declined, "steps": step, "batches": balancer.stats.batches, "received": balancer.stats.received,
        "longest": longest, "grown_bytes": own_bytes() - memory[0], "grown_tensors": live_tensors() - memory[1],
        "slots": balancer.slot_to_expert.tolist(), "seconds": time.monotonic() - begin,
    }  # fmt: skip
