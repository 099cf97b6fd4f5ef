"""Four times more requests than fit, for as long as one likes: random aborts, preemptions and flushes, and a search for leaks.

``python -m tests.offload.soak --seconds 1200 --policy hybrid``; a test runs it shortly.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import threading
import time

from tests.memory import own_bytes
from tests.offload.engines import N_TOKENS, PROMPTS, alone, counters, expect_idle, make, params
from tests.offload.live import Asked, Live

POOL = 144  # tokens of the host pool, and of the whole cache; one request has up to 102
OVER = 4  # times the tokens of the host pool that open requests need, at every step
DEADLINE_S = 240.0  # of every request
_WARM_PHASES = 3  # before memory is expected to stay as it is
_GROWTH = 48 << 20  # bytes that it may still grow by


class Soak:
    """Phases of requests that keep the pool oversubscribed. After each of them all have ended, and nothing may be held."""

    def __init__(self, llm, seed: int) -> None:
        self.rng = random.Random(seed)
        self.live = Live(llm)
        self.expected = [alone(place) for place in range(len(PROMPTS))]
        limits = self.live.scheduler.tier.limits
        self.pool_tokens = limits.n_host_pages * limits.page_size
        self.totals = {
            "phases": 0,
            "requests": 0,
            "aborted": 0,
            "forced preemptions": 0,
            "flushes": 0,
            "longest s": 0.0,
            "least oversubscription": 1e9,
        }
        self.held: list[tuple[int, int, int]] = []  # resident bytes, threads and open files after each phase

    def phase(self, seconds: float, steps: int = 0) -> None:
        """Requests for so long and so many steps, then their end.

        Raises:
            AssertionError: a wrong token, a leak, a row that was never written, or a request that does not end.
        """
        live, rng, totals = self.live, self.rng, self.totals
        end, last = time.monotonic() + seconds, live.steps + steps
        while time.monotonic() < end or live.steps < last:
            while live.demand < OVER * self.pool_tokens:
                place = rng.randrange(len(PROMPTS))
                live.add(place, PROMPTS[place], params(), rng.randrange(3))
            totals["least oversubscription"] = min(totals["least oversubscription"], live.demand / self.pool_tokens)
            self._disturb()
            live.step()
            live.check_deadline(min(asked.begun for asked in live.open.values()) + DEADLINE_S if live.open else end + DEADLINE_S)
        live.finish(time.monotonic() + DEADLINE_S)
        self._judge()

    def _disturb(self) -> None:
        """Aborts of running and waiting requests, preemptions, flushes of the prefix tree."""
        live, rng = self.live, self.rng
        if rng.random() < 0.03:
            live.abort(rng.choice(list(live.open)))
        if rng.random() < 0.04:
            self.totals["forced preemptions"] += live.preempt(rng.randrange(5))
        if rng.random() < 0.01:
            live.scheduler.flush_prefix_cache()
            self.totals["flushes"] += 1

    def _judge(self) -> None:
        live, totals = self.live, self.totals
        totals["phases"] += 1
        totals["requests"] += len(live.ended)
        for asked in live.ended:
            self._judge_one(asked)
        live.ended.clear()
        expect_idle(live.llm)
        engine = live.llm.engine
        assert not engine.leader.emitter.records and not engine.leader.inflight and not engine.front.open
        if totals["phases"] % 2:  # in every other phase prompts come from the tree of the one before
            live.scheduler.flush_prefix_cache()
            tier = live.scheduler.tier
            assert tier.book._host_pages.n_used == 0 and tier.n_free == tier.limits.n_device_pages
        gc.collect()
        self.held.append((own_bytes(), threading.active_count(), len(os.listdir("/proc/self/fd"))))

    def _judge_one(self, asked: Asked) -> None:
        wanted = self.expected[asked.place]
        assert asked.tokens == wanted[: len(asked.tokens)], (asked, wanted)
        assert asked.ended == "abort" and asked.aborted or len(asked.tokens) == N_TOKENS and asked.ended == "length", asked
        self.totals["aborted"] += asked.ended == "abort"
        self.totals["longest s"] = round(max(self.totals["longest s"], asked.seconds), 1)

    def report(self) -> dict[str, float]:
        """Totals. AssertionError: memory, threads or open files have grown."""
        scheduler = self.live.scheduler
        tier = scheduler.tier.stats()
        found = self.totals | {name: tier[name] for name in ("spilled", "dropped", "mirrored", "restored")}
        found |= {"steps": self.live.steps, "preempted": scheduler.stats.preemptions}
        found |= {f"rows {name}": count for name, count in counters(self.live.llm).items()}
        if len(self.held) > _WARM_PHASES:
            warm, last = self.held[_WARM_PHASES - 1], self.held[-1]
            found |= {"memory growth bytes": last[0] - warm[0], "threads": last[1], "open files": last[2]}
            assert last[0] - warm[0] < _GROWTH and last[1] <= warm[1] and last[2] <= warm[2], f"held after each phase: {self.held}"
        return found


def soak(seconds: float, policy: str, seed: int = 0, *, phase: float = 20.0, log: bool = False) -> dict[str, float]:
    """Run for ``seconds``, in phases. AssertionError: see ``Soak``."""
    with make(policy, seed=seed, max_total_tokens=POOL) as llm:
        run = Soak(llm, seed)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            run.phase(min(phase, left))
            if log:
                report = run.report()
                print(json.dumps({"left s": round(end - time.monotonic()), **report, "resident MiB": run.held[-1][0] >> 20}), flush=True)
        return run.report()


def count_steps(phases: int, steps: int, policy: str, seed: int = 0) -> None:
    """``phases`` of so many steps each: how fast the machine is changes nothing. AssertionError: see ``Soak``."""
    with make(policy, seed=seed, max_total_tokens=POOL) as llm:
        run = Soak(llm, seed)
        for _ in range(phases):
            run.phase(0.0, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--policy", choices=("host", "hybrid"), default="hybrid")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begun = time.monotonic()
    found = soak(args.seconds, args.policy, args.seed, log=True)
    print(json.dumps({"soak": "passed", "policy": args.policy, "seconds": round(time.monotonic() - begun), **found}), flush=True)


if __name__ == "__main__":
    main()
