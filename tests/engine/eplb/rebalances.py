"""Many random rebalances of rorqual-tiny while it generates: ``python -m tests.engine.eplb.rebalances --ranks 4 --cycles 1000``.

Prints a line of JSON: what was moved, that no token changed, and how the processes' memory went.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from tests.checkpoints import TINY
from tests.engine.eplb.jobs import DEBUG, DP, TP, Found, balanced, check_whole, run
from tests.engine.parity import greedy_tokens, ragged_prompts
from tests.ranks import run_ranks

N = 96


def job(prompts: list[list[int]], settings: dict[str, Any], cycles: int) -> Found:
    """One rank's."""
    return run(str(TINY), prompts, N, settings, cycles=cycles)


def rebalance(ranks: int, cycles: int, *, seed: int = 0, redundant: int = 4, interval: int = 1, **settings: Any) -> dict[str, Any]:
    """At least ``cycles`` random rebalances on ``ranks`` ranks; AssertionError if a token or a slot is wrong."""
    prompts = ragged_prompts(ranks // 2, longest=24, vocab=4096)
    expected = greedy_tokens(TINY, prompts=prompts, n=N)
    start = time.monotonic()
    moves = balanced(policy="random", step_interval=interval, num_redundant_experts=redundant, staging_experts=24, seed=seed)
    asked = {DP: ranks // 2, TP: 2, **moves, **settings}
    found = run_ranks(job, ranks, prompts, asked, cycles, env=DEBUG, timeout=3600.0 * 4)
    tokens = found[0].tokens
    rounds = len(tokens) // len(prompts)
    assert rounds and tokens == expected * rounds, "tokens changed"
    check_whole(found)
    third = max(1, rounds // 3)
    grown = [max(rank.memory) - max(rank.memory[:third]) for rank in found]
    return {
        "ranks": ranks,
        "cycles": found[0].stats["cycles"],
        "steps": found[0].steps,
        "tokens_compared": sum(map(len, tokens)),
        "experts_received": sum(rank.stats["experts_received"] for rank in found),
        "bytes_received": sum(rank.stats["bytes_received"] for rank in found),
        "grown_after_first_third": grown,
        "resident": [rank.memory[-1] for rank in found],
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> None:
    """Flags, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--redundant", type=int, default=4)
    parser.add_argument("--backend", default="auto", help="All-to-all backend.")
    args = parser.parse_args()
    found = rebalance(args.ranks, args.cycles, seed=args.seed, redundant=args.redundant, moe_a2a_backend=args.backend)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
