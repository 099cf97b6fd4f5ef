"""Experts that move about while tokens are generated change no token, leave every slot whole, and take no more memory with time."""

from __future__ import annotations

from tests.checkpoints import checkpoint
from tests.engine.eplb.jobs import DEBUG, DP, TP, Found, balanced, check_whole, run
from tests.engine.parity import greedy_tokens, ragged_prompts
from tests.ranks import run_ranks

PROMPTS, N = 4, 32
RANDOM = balanced(policy="random", step_interval=1, num_redundant_experts=3, staging_experts=12)
HALVES = {"enable_two_batch_overlap": True, "two_batch_overlap_min_tokens": 2}


def job(folder: str) -> Found:
    return run(folder, ragged_prompts(PROMPTS), N, {DP: 2, TP: 2, **RANDOM, **HALVES}, cycles=4)


def test_random_rebalances_keep_tokens():
    """The long form, with rorqual-tiny and 1,000 of them, is ``python -m tests.engine.eplb.rebalances``."""
    expected = greedy_tokens(checkpoint("v32"), prompts=ragged_prompts(PROMPTS), n=N)
    found = run_ranks(job, 4, str(checkpoint("v32")), env=DEBUG, timeout=240.0)
    rounds = len(found[0].tokens) // PROMPTS
    assert found[0].tokens == expected * rounds and rounds >= 1
    check_whole(found)
    cycles = found[0].stats["cycles"]
    assert cycles["ended"] >= 4 and cycles["aborted"] == 0, cycles
    assert all(rank.stats["cycles"] == cycles for rank in found)
    assert sum(rank.stats["experts_received"] for rank in found) > 10
    assert all(rank.memory[-1] - rank.memory[0] < 64 << 20 for rank in found), [rank.memory for rank in found]
