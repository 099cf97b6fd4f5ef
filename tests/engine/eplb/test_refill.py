"""Shares of copies by load (``--ep-dispatch-algorithm lp``): where tokens go, what is written when, and tokens that do not change."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rorqual.engine.eplb.refill import ShareRefill
from rorqual.engine.eplb.tables import WaysWriter
from rorqual.moe.eplb.load.window import LoadWindow
from rorqual.moe.eplb.planner.slack import plan_slack
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.placement import Placement
from rorqual.moe.ways import ExpertIds, Ways
from tests.checkpoints import checkpoint
from tests.engine.eplb.jobs import DEBUG, DP, TP, Found, balanced, check_whole, run
from tests.engine.parity import greedy_tokens, ragged_prompts
from tests.ranks import run_ranks

RANKS, EXPERTS, SLOTS, LAYERS, K, TOKENS = 8, 64, 80, 3, 8, 256
TOPOLOGY = Topology.even(n_slots=SLOTS, n_ranks=RANKS)


class Source:
    """One rank: its tokens, its table, its counts."""

    def __init__(self, placement: Placement, rank: int, interval: int = 2) -> None:
        self.counts = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)
        self.ways = Ways.static(placement, source=rank)
        self.writer = WaysWriter(self.ways, TOPOLOGY, n_experts=EXPERTS, source=rank, layer_ids=range(LAYERS), near=False)
        self.fetch: Callable[[torch.Tensor], Callable[[], Any]] = lambda counts: lambda: counts.numpy()
        self.refill = ShareRefill(
            self.writer, LoadWindow(self.counts, range(LAYERS), 4 * interval), lambda counts: self.fetch(counts), TOPOLOGY,
            n_experts=EXPERTS, interval=interval,
        )  # fmt: skip
        self.slots = placement.slot_to_expert.numpy()

    def step(self, load: np.ndarray, rng: np.random.Generator, fill: bool) -> np.ndarray:
        """Route a batch drawn from ``load`` [layers, experts] -> choices that went to each rank [layers, ranks]."""
        if fill:
            self.refill.boundary(self.slots)
        went = np.zeros((LAYERS, RANKS), dtype=np.int64)
        for layer, row in enumerate(load):
            ids = torch.from_numpy(np.argsort(-(np.log(row) + rng.gumbel(size=(TOKENS, EXPERTS))), axis=1)[:, :K].copy())
            slots = self.ways.slots(layer, ExpertIds(ids)).ids.numpy()
            held = self.slots[layer][slots]
            assert (held == ids.numpy()).all(), "a token went to another expert"
            went[layer] = np.bincount((slots // (SLOTS // RANKS)).reshape(-1), minlength=RANKS)
            self.counts[layer] += torch.bincount(ids.reshape(-1), minlength=EXPERTS)
        self.refill.after_step()
        return went

    def settle(self) -> None:
        """The thread is done."""
        deadline = time.monotonic() + 60
        while self.refill._job is not None and not self.refill._job.done and time.monotonic() < deadline:
            time.sleep(0.005)


def skewed(rng: np.random.Generator) -> np.ndarray:
    return rng.lognormal(0.0, 0.8, (LAYERS, EXPERTS))


def placed(load: np.ndarray) -> Placement:
    return Placement.of(plan_slack(load, TOPOLOGY).slot_to_expert, n_experts=EXPERTS, n_ranks=RANKS)


def test_ranks_are_more_even_than_with_even_shares_when_batches_differ_from_the_plan():
    """20% noise of each expert's load against the planned one, and another mix of tokens on every rank; nothing is exchanged."""
    rng = np.random.default_rng(1)
    load = skewed(rng)
    placement = placed(load)
    batch = [load * rng.normal(1.0, 0.2, load.shape).clip(0.2) * rng.normal(1.0, 0.1, load.shape).clip(0.2) for _ in range(RANKS)]
    common = rng.normal(1.0, 0.2, load.shape).clip(0.2)
    found = {}
    for fill in (False, True):
        sources = [Source(placement, rank) for rank in range(RANKS)]
        went = np.zeros((LAYERS, RANKS), dtype=np.int64)
        for step in range(14):
            for source, own in zip(sources, batch, strict=True):
                here = source.step(own * common, rng, fill)
                source.settle()
                went += here if step >= 6 else 0
        assert all((source.refill.refills >= 4) == fill for source in sources)
        found[fill] = float((went.max(1) / went.mean(1)).mean())
        for source in sources:
            source.refill.close()
    assert found[True] - 1 < 0.6 * (found[False] - 1), found
    assert found[True] < 1.06, found


def test_what_was_filled_for_other_slots_is_not_written():
    load = skewed(np.random.default_rng(2))
    source, rng = Source(placed(load), 0), np.random.default_rng(3)
    for _ in range(3):
        source.step(load, rng, True)
    source.settle()
    assert source.refill._job is not None
    everything, moved = source.writer.deal(range(LAYERS), source.slots), np.roll(source.slots, 10, axis=1)
    source.slots = moved
    source.writer.write(range(LAYERS), source.writer.deal(range(LAYERS), moved))  # as a commit does, at this boundary
    source.refill.boundary(moved)
    assert source.refill.refills == 0 and not torch.equal(source.ways.table, everything)
    for _ in range(4):  # Source.step looks where every token went
        source.settle()
        source.step(load, rng, True)
    source.settle()
    source.refill.boundary(moved)
    assert source.refill.refills >= 1
    source.refill.close()


def test_a_fill_that_fails_leaves_the_table_and_says_so(caplog):
    load, rng = skewed(np.random.default_rng(4)), np.random.default_rng(5)
    source = Source(placed(load), 1)
    table = source.ways.table.clone()

    def lost() -> Any:
        raise RuntimeError("no counts")

    source.fetch = lambda counts: lost
    for _ in range(9):
        source.step(load, rng, True)
        source.settle()
    assert source.refill.off == "RuntimeError: no counts" and source.refill.refills == 0 and torch.equal(source.ways.table, table)
    assert sum("not filled by load any more" in record.message for record in caplog.records) == 1
    source.refill.close()


def test_nothing_is_written_before_a_token_was_routed():
    source = Source(placed(skewed(np.random.default_rng(6))), 0)
    for _ in range(6):
        source.refill.boundary(source.slots)
        source.refill.after_step()
        source.settle()
    assert source.refill.refills == 0 and not source.refill.off
    source.refill.close()


# ---- in the engine

N, PROMPTS = 24, 3


def runs(folder: str) -> list[Found]:
    """One of two ranks: copies that stay, and experts that move at random meanwhile; sums in the order of experts."""
    each: dict[str, Any] = {DP: 1, TP: 2, "ep_dispatch_algorithm": "lp", "enable_deterministic_inference": True}
    still = {"num_redundant_experts": 8, "eplb_config": {"dispatch_interval": 1}}
    moving = balanced(policy="random", step_interval=1, num_redundant_experts=8, staging_experts=24, dispatch_interval=1)
    return [
        run(folder, ragged_prompts(PROMPTS), N, {**each, **still}),
        run(folder, ragged_prompts(PROMPTS), N, {**each, **moving, "moe_a2a_backend": "shm"}, cycles=3),
    ]


@pytest.fixture(scope="module")
def found() -> list[list[Found]]:
    return run_ranks(runs, 2, str(checkpoint("v32")), env=DEBUG, timeout=240.0)


def test_tokens_stay_as_they_are(found):
    """Also with deterministic sums and experts on the move."""
    expected = greedy_tokens(checkpoint("v32"), prompts=ragged_prompts(PROMPTS), n=N)
    for number in range(2):
        tokens = found[0][number].tokens
        assert tokens == expected * (len(tokens) // PROMPTS)
        assert all(rank[number].stats["refills"] >= 1 for rank in found), [rank[number].stats for rank in found]
    check_whole([rank[1] for rank in found])
    assert found[0][1].stats["cycles"]["ended"] >= 3
