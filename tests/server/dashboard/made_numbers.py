"""Snapshots of an engine that does not exist, for tests of what is made from them; the same numbers every time."""

import random
from collections.abc import Iterator

import numpy as np

from rorqual.engine.serving.expert_balance import balance, pack
from rorqual.engine.serving.histogram import STEP, STEP_TOKENS, Histogram
from rorqual.engine.serving.meter import Meter
from rorqual.engine.serving.wire import Snapshot, Welcome

LAYERS = tuple(range(3, 19))


def welcome(dp: int = 4) -> Welcome:
    """Of a large model on ``dp`` replicas."""
    return Welcome(
        protocol=1, version="0.1.0", model="made-up", folder="", model_type="deepseek_v32", max_model_len=163840, vocab_size=129280,
        eos_token_ids=[1], dp_size=dp, layout=f"pp1 dp{dp} tp1", device="cpu", page_size=64, pool_tokens=1_048_576, started=1_796_000_000.0,
    )  # fmt: skip


class _Replica:
    """What one leader would tell."""

    def __init__(self, rank: int) -> None:
        self.rank, self.seconds, self.tokens = rank, Histogram(STEP), Histogram(STEP_TOKENS)
        self.counts = dict.fromkeys(("steps", "idle_steps", "prefill_tokens", "decode_tokens", "busiest_tokens", "graph_steps"), 0)
        self.counts |= dict.fromkeys(("padding_tokens", "computed_tokens", "prefix_queries", "prefix_hits", "dispatch_bytes"), 0)
        self.counts |= dict.fromkeys(("preemptions", "evictions", "host_waits"), 0)
        self.tiers = dict.fromkeys(("resident", "hits", "misses", "evictions", "bytes", "mirrored", "restored"), 0)

    def second(self, rng: random.Random, running: int) -> None:
        steps, counts = 24, self.counts
        for _ in range(steps):
            self.seconds.add(rng.gauss(0.038, 0.004))
            self.tokens.add(running)
        counts["steps"] += steps
        counts["idle_steps"] += steps * (running == 0)
        counts["graph_steps"] += int(steps * 0.9)
        counts["decode_tokens"] += steps * running
        counts["prefill_tokens"] += 2500
        counts["computed_tokens"] += steps * running + 2500
        counts["busiest_tokens"] += steps * (running + 4) + 2700
        counts["padding_tokens"] += steps * 3
        counts["prefix_queries"] += 4000
        counts["prefix_hits"] += 1500
        counts["dispatch_bytes"] += steps * running * 7168 * 16 * 8
        for name, grown in {"resident": 9000, "hits": 52_000, "misses": 2600, "bytes": 2600 * 656}.items():
            self.tiers[name] += grown

    def report(self, running: int, waiting: int, used: int) -> dict:
        found = {**self.counts, "running": running, "waiting": waiting, "pages": 16384, "pages_used": used, "kv_usage": used / 16384}
        found |= {"step_seconds": self.seconds.to_wire(), "step_tokens": self.tokens.to_wire()}
        return found | {"tiers": {**self.tiers, "device_pages": 4096, "device_pages_free": 512, "host_pages": 65536}}


def snapshots(seconds: int, *, dp: int = 4, start: float = 1_796_000_100.0, hot: bool = True) -> Iterator[Snapshot]:
    """One a second. Load rises and falls; with ``hot`` a few experts get most."""
    rng, meter, replicas = random.Random(7), Meter(dp), [_Replica(rank) for rank in range(dp)]
    shares = np.random.default_rng(3).gamma(2.0 if hot else 400.0, 1.0, (len(LAYERS), 256))
    picked = [0] * dp
    for second in range(seconds):
        level = 40 + 25 * np.sin(second / 40)
        told = []
        for replica in replicas:
            running = max(0, int(level + rng.gauss(0, 3)))
            for _ in range(3):  # requests that begin and end within the second, as the meter sees them
                now, name = float(second), object()
                picked[replica.rank] += 1
                meter.arrived(name, 2000, now, replica.rank)
                meter.scheduled(name, now + rng.uniform(0.001, 0.02))
                when = now + rng.lognormvariate(-1.2, 0.4)
                for _ in range(int(running * 24 / 3)):
                    meter.tokens(name, 1, when)
                    when += max(0.001, rng.gauss(0.038, 0.006))
                meter.ended(name, "stop" if rng.random() < 0.8 else "length", when, 700)
            replica.second(rng, running)
            leader = replica.report(running, max(0, int(rng.gauss(level - 52, 2))), 150 * running)
            told.append({"dp_rank": replica.rank, "age": 0.4, "requests": meter.replica(replica.rank), "leader": leader})
        loads = shares.reshape(len(LAYERS), 32, 8).sum(-1) * 100
        engine = {**meter.all_replicas(), "experts": balance([pack(loads.astype(np.int64), LAYERS)]), "uptime": 100.0 + second}
        engine["expert_counts"] = pack((shares * 1000).astype(np.int64), LAYERS)
        hits, blocks = [count * 12 for count in picked], [count * 31 for count in picked]
        engine["routing"] = {"policy": "kv", "picked": list(picked), "hit_blocks": hits, "prompt_blocks": blocks}
        yield Snapshot(at=start + second, replicas=told, engine=engine)
