"""A skewed workload becomes even within a few steps, whatever the interval, and its tokens stay as they are."""

from __future__ import annotations

import torch

from tests.checkpoints import checkpoint
from tests.engine.eplb.jobs import DP, balanced, check_whole, run
from tests.engine.eplb.skewed import favour, imbalance, job
from tests.ranks import run_ranks

STEPS = 34  # of the prompts below, 256 tokens each
SIGMA = 0.15


def test_a_skewed_workload_becomes_even():
    """A cycle whenever none is under way: the tokens of one rank, 1.6 before, below 1.05 from the 18th step on."""
    generator, folder = torch.Generator().manual_seed(3), str(checkpoint("v32"))
    prompts = [torch.randint(3, 512, (64,), generator=generator).tolist() for _ in range(128)]
    base = {"enable_prefix_caching": False, "max_num_seqs": 16}
    often = balanced(step_interval=1, num_redundant_experts=8, staging_experts=24, horizon_steps=100_000)
    seen = run_ranks(job, 4, folder, prompts, 2, {**base, DP: 4, "max_num_batched_tokens": 64, **often}, SIGMA, timeout=300.0)
    alone = run(folder, prompts, 2, base, prepare=lambda llm: favour(llm, SIGMA))
    assert seen[0].found.tokens == alone.tokens and len(alone.tokens) == len(prompts)
    check_whole([rank.found for rank in seen])
    assert len(seen[0].sent) >= STEPS - 2
    assert imbalance(seen, slice(0, 2)) > 1.4
    late = imbalance(seen, slice(18, STEPS - 2))
    assert late < 1.05, late
    cycles = seen[0].found.stats["cycles"]
    assert cycles["ended"] >= 1 and cycles["aborted"] == 0
    assert cycles["declined"] >= 1, "a cycle moved something whenever it could"
    load = seen[0].found.stats["load"]
    assert load["balancedness"] > 0.9 and abs(load["balancedness"] - load["avg_tokens"] / load["max_tokens"]) < 1e-9
