"""Replicas in virtual time: real schedulers and a real router, steps whose length follows from their tokens.

As with data-parallel attention all replicas step together, and a step takes as long as that of the busiest.

    python -m tests.serving.routing.replicas --policy kv --policy round_robin
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from rorqual.engine.request import Request, RequestState
from rorqual.engine.sampling_params import SamplingParams
from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from rorqual.engine.serving.routing.router import Router
from rorqual.engine.serving.routing.settings import POLICIES, RoutingSettings


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request of the load."""

    at: float  # seconds
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class SharedPrefixes:
    """Requests of groups with one prefix each, at random moments."""

    groups: int = 24
    requests: int = 600
    prefix: int = 1024  # tokens
    question: int = 64
    output: int = 32
    rate: float = 16.0  # requests per second
    skew: float = 0.0  # 0: all groups are equal; 1: Zipf
    seed: int = 0

    def arrivals(self) -> list[Arrival]:
        rng, at, found = random.Random(self.seed), 0.0, []
        prefixes = [[rng.randrange(1000) for _ in range(self.prefix)] for _ in range(self.groups)]
        weights = [(group + 1) ** -self.skew for group in range(self.groups)]
        for _ in range(self.requests):
            at += rng.expovariate(self.rate)
            (prefix,) = rng.choices(prefixes, weights)
            question = [rng.randrange(1000) for _ in range(rng.randint(self.question // 2, self.question * 3 // 2))]
            found.append(Arrival(at=at, prompt=prefix + question, max_tokens=rng.randint(self.output // 2, self.output * 3 // 2)))
        return found


@dataclass(kw_only=True)
class Outcome:
    """What came of a run."""

    ttft: list[float] = field(default_factory=list)  # seconds, in order of arrival
    tokens: list[int] = field(default_factory=list)  # of prompts and outputs, by rank
    computed: list[int] = field(default_factory=list)  # tokens that were computed, by rank
    seconds: float = 0.0
    view: dict[str, object] = field(default_factory=dict)  # of the router

    @property
    def mean_ttft(self) -> float:
        return sum(self.ttft) / len(self.ttft)

    def late_ttft(self) -> float:
        """Mean of the second half: when the caches are warm."""
        late = self.ttft[len(self.ttft) // 2 :]
        return sum(late) / len(late)

    @property
    def balance(self) -> float:
        return max(self.tokens) * len(self.tokens) / sum(self.tokens)


class Replicas:
    """``dp`` schedulers behind a router."""

    def __init__(
        self, routing: RoutingSettings, *, dp: int = 4, pool_tokens: int = 12_288, page_size: int = 16, debug: bool = False
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=32, max_num_batched_tokens=512, page_size=page_size, n_pages=pool_tokens // page_size, max_model_len=4096,
            overlap=False,
        )  # fmt: skip
        self.schedulers = [Scheduler(config) for _ in range(dp)]
        self.router = Router(dp, routing, page_size=page_size)
        self.logs = [scheduler.log_prefixes() for scheduler in self.schedulers] if self.router.uses_kv else []
        self.now, self.debug = 0.0, debug
        self._first: dict[str, float] = {}

    def run(self, load: Sequence[Arrival]) -> Outcome:
        waiting, place, outcome = list(load), 0, Outcome(tokens=[0] * len(self.schedulers))
        while place < len(waiting) or any(s.has_work for s in self.schedulers):
            if not any(s.has_work for s in self.schedulers):
                self.now = max(self.now, waiting[place].at)
            while place < len(waiting) and waiting[place].at <= self.now:
                self._submit(str(place), place, waiting[place], outcome)
                place += 1
            self._step()
        outcome.ttft = [self._first[str(i)] - arrival.at for i, arrival in enumerate(waiting)]
        outcome.computed = [s.stats.computed_tokens for s in self.schedulers]
        outcome.seconds, outcome.view = self.now, self.router.snapshot()
        return outcome

    def _submit(self, name: str, index: int, arrival: Arrival, outcome: Outcome) -> None:
        rank = self.router.pick(name, arrival.prompt, arrival.max_tokens)
        params = SamplingParams(temperature=0.0, max_tokens=arrival.max_tokens, ignore_eos=True)
        request = Request(request_id=name, index=index, prompt_ids=arrival.prompt, params=params, priority=0)
        self.schedulers[rank].add(request)
        outcome.tokens[rank] += len(arrival.prompt) + arrival.max_tokens

    def _step(self) -> None:
        plans = [scheduler.schedule() for scheduler in self.schedulers]
        self.now += 0.010 + 100e-6 * max(plan.n_tokens for plan in plans)
        for rank, (scheduler, plan) in enumerate(zip(self.schedulers, plans, strict=True)):
            if plan.n_rows:
                self._complete(scheduler, plan)
            else:
                scheduler.skip(plan.step)
            if self.logs and (news := self.logs[rank].take()) is not None:
                self.router.heard(rank, news)
            if self.debug:
                scheduler.check()

    def _complete(self, scheduler: Scheduler, plan) -> None:
        for request, _ in scheduler.complete(plan.step, [1] * int(plan.samples.sum())):
            if len(request.output_ids) == 1:
                self._first[request.request_id] = self.now
                self.router.began(request.request_id)
            if request.state is RequestState.FINISHED:
                self.router.done(request.request_id, len(request.output_ids))


def measure(policy: str, load: SharedPrefixes, **more: object) -> Outcome:
    """One run of a policy."""
    return Replicas(RoutingSettings(dp_routing=policy), **more).run(load.arrivals())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", action="append", choices=POLICIES)
    parser.add_argument("--rate", type=float, default=16.0)
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    load = SharedPrefixes(rate=args.rate, groups=args.groups, requests=args.requests, skew=args.skew, seed=args.seed)
    for policy in args.policy or POLICIES:
        found = measure(policy, load)
        row = {
            "policy": policy,
            "mean_ttft_ms": round(found.mean_ttft * 1e3, 1),
            "late_ttft_ms": round(found.late_ttft() * 1e3, 1),
            "balance": round(found.balance, 3),
            "computed": sum(found.computed),
            "seconds": round(found.seconds, 1),
            "picked": found.view["picked"],
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
