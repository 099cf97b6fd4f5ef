"""Moving with the real planner: a skewed load becomes even within few steps, and what does not pay is left alone."""

from __future__ import annotations

import numpy as np

from rorqual.moe.eplb.api import make_plan
from rorqual.moe.eplb.cost import CostModel
from rorqual.moe.eplb.live.report import Outcome
from rorqual.moe.eplb.load.synth import drifted, popularity
from rorqual.moe.eplb.metrics import imbalance
from rorqual.moe.eplb.plan import rank_loads
from rorqual.moe.eplb.topology import Topology
from tests.moe.eplb.live.virtual import Party, with_config

TOPOLOGY = Topology.even(n_slots=96, n_ranks=8, n_nodes=2)
N_EXPERTS, N_LAYERS, STEPS = 64, 2, 100
LOAD = (popularity(N_LAYERS, N_EXPERTS, sigma=(1.05, 1.05), seed=3) * 4e6).astype(np.int64)


def first_slots() -> np.ndarray:
    return np.tile(np.arange(TOPOLOGY.n_slots) % N_EXPERTS, (N_LAYERS, 1))


def party(horizon: int, cost: CostModel) -> Party:
    made = Party(topology=TOPOLOGY, n_experts=N_EXPERTS, slots=first_slots(), config=with_config(staging=2, bytes_per_step=1 << 20))
    for rank, balancer in enumerate(made.ranks):
        balancer.counts = (lambda table: lambda: table)(LOAD // 8 + (LOAD % 8 > rank))
    made.plan = lambda load, now: make_plan(load, TOPOLOGY, previous=now, steps=STEPS, horizon_steps=horizon, cost=cost)
    return made


def test_a_skewed_load_becomes_even_and_then_nothing_moves() -> None:
    made = party(100_000, CostModel(expert_bytes=160))
    assert imbalance(rank_loads(made.slots, LOAD.astype(float), TOPOLOGY), TOPOLOGY).mean() > 1.3
    report = made.cycle()
    assert report.outcome is Outcome.ENDED and made.is_whole()
    found = imbalance(rank_loads(made.ranks[0].slot_to_expert, LOAD.astype(float), TOPOLOGY), TOPOLOGY).mean()
    assert found < 1.05 < 1.3 < report.before and abs(found - report.after) < 1e-9, (found, report.line())
    again = made.cycle()
    assert again.outcome is Outcome.DECLINED and again.received == 0, again.line()
    made.close()


def test_moves_that_do_not_pay_are_not_made() -> None:
    made = party(1, CostModel(expert_bytes=44_000_000))
    before, writes = made.bytes(), [table.writes for table in made.tables]
    report = made.cycle()
    assert report.outcome is Outcome.DECLINED and report.reason, report.line()
    assert made.bytes() == before and [table.writes for table in made.tables] == writes
    made.close()


def test_a_small_drift_moves_little() -> None:
    made = party(100_000, CostModel(expert_bytes=160))
    first = made.cycle()
    later = drifted(LOAD.astype(float), 0.05, seed=1).astype(np.int64)
    for rank, balancer in enumerate(made.ranks):
        balancer.counts = (lambda table: lambda: table)(later if rank == 0 else later * 0)
    received = sum(rank.stats.received for rank in made.ranks)
    second = made.cycle()
    moved = sum(rank.stats.received for rank in made.ranks) - received
    assert first.outcome is Outcome.ENDED and second.outcome in (Outcome.ENDED, Outcome.DECLINED)
    assert moved <= 0.1 * TOPOLOGY.n_slots * N_LAYERS and moved < received / 3, (moved, received)
    made.close()
