"""Four times more requests than fit, random aborts, preemptions and flushes; a script for long runs, and a test runs it shortly.

``python -m tests.offload.soak --seconds 1200 --policy hybrid``
"""

from __future__ import annotations

import argparse
import random
import time

from tests.offload.engines import PROMPTS, alone, counters, expect_idle, make, params


def soak(seconds: float, policy: str, seed: int = 0) -> dict[str, int]:
    """Run for ``seconds``. AssertionError: a wrong token, a leak, a row that was never written, or a request that does not end."""
    rng = random.Random(seed)
    expected = [alone(i) for i in range(len(PROMPTS))]
    totals = {"requests": 0, "aborted": 0, "calls": 0, "spilled": 0, "dropped": 0, "preempted": 0}
    end = time.monotonic() + seconds
    with make(policy, seed=seed) as llm:
        scheduler = llm.engine.leader.scheduler
        while time.monotonic() < end:
            totals["calls"] += 1
            places = [rng.randrange(len(PROMPTS)) for _ in range(20)]  # of up to 102 tokens each; the pool has 240
            outputs, begun = {}, time.monotonic()
            for chunk in llm.generate_stream([PROMPTS[p] for p in places], params(), priority=[rng.randrange(3) for _ in places]):
                if not chunk.finished and rng.random() < 0.03:
                    llm.abort(chunk.request_id)
                if rng.random() < 0.02:
                    for request in scheduler.running_requests()[:1]:
                        scheduler.preempt(request.request_id)
                if rng.random() < 0.01:
                    scheduler.flush_prefix_cache()
                if chunk.output is not None:
                    outputs[chunk.prompt_index] = chunk.output.outputs[0]
                assert time.monotonic() - begun < 600, "requests do not end"
            assert sorted(outputs) == list(range(len(places)))
            for index, output in outputs.items():
                wanted = expected[places[index]]
                totals["aborted"] += output.finish_reason == "abort"
                assert output.token_ids == wanted[: len(output.token_ids)]
                assert output.finish_reason == "abort" or len(output.token_ids) == len(wanted)
            totals["requests"] += len(places)
            expect_idle(llm)
        tier = scheduler.tier.stats()
        totals |= {"spilled": tier["spilled"], "dropped": tier["dropped"], "preempted": scheduler.stats.preemptions}
        totals |= {f"rows {name}": count for name, count in counters(llm).items()}
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--policy", choices=("host", "hybrid"), default="hybrid")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(soak(args.seconds, args.policy, args.seed))


if __name__ == "__main__":
    main()
