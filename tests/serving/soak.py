"""Thousands of requests with random ends over real ranks: none lost, none mixed, memory flat, pools empty at the end.

    python -m tests.serving.soak --requests 10000 --dp 2 --tp 2

The model costs nothing (``engine.serving.costless``). Three of ten requests are left at a random moment: by an abort, or because
their client closes its socket with everything open. Prints a line of figures as JSON; exits 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from typing import Any

from rorqual.engine.serving.costless import expected
from tests.memory import own_bytes
from tests.serving.client import RawClient
from tests.serving.ranks import Serving, costless, good_ends

VOCAB = 4096
#: resident memory may grow by this much between a warm engine and the end, MiB: allocators keep some
GROWTH_MIB = 24
_ABORTS = 0.2  # of the requests are aborted at a random token
_LEAVES = 0.01  # after so many of the requests their client leaves, with all that it has open


class Soaker:
    """One client that keeps some requests open, checks what comes, and leaves them at random."""

    def __init__(self, address: str, rng: random.Random) -> None:
        self.address, self.rng = address, rng
        self.client = RawClient(address)
        self.wanted: dict[str, tuple[list[int], int, int]] = {}  # prompt, tokens, n
        self.fates: dict[str, int] = {}  # requests that are aborted after so many pieces
        self.counts = {"length": 0, "abort": 0, "left": 0, "refused": 0, "tokens": 0}
        self.shared = [rng.randrange(3, VOCAB) for _ in range(48)]

    def submit(self) -> None:
        rng = self.rng
        ids = (self.shared if rng.random() < 0.3 else []) + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 60))]
        tokens, n = rng.randrange(1, 60), rng.choice((1, 1, 1, 2, 3))
        name = self.client.submit(ids, max_tokens=tokens, ignore_eos=True, n=n, priority=rng.randrange(3))
        self.wanted[name] = (ids, tokens, n)
        if rng.random() < _ABORTS:
            self.fates[name] = rng.randrange(tokens)
        if rng.random() < _LEAVES:
            self.leave()

    def turn(self) -> None:
        """Read what is there, look at what has ended, perhaps leave."""
        while self.client.poll(0):
            pass
        for name in [n for n in self.wanted if (n, 0) in self.client.done or n in self.client.refused]:
            self._look(name)
        due = [n for n, k in self.fates.items() if (n, 0) not in self.client.open or self.client.open[n, 0].pieces >= k]
        for name in due:
            del self.fates[name]
        if due:
            self.client.abort(*due, "nobody")

    def _look(self, name: str) -> None:
        ids, tokens, n = self.wanted[name]
        if name in self.client.refused:
            refused = self.client.refused.pop(name)
            assert refused.status == 429, refused
            self.counts["refused"] += 1
        elif any((name, i) not in self.client.done for i in range(n)):
            return
        for i in range(n):
            found = self.client.done.pop((name, i), None)
            if found is None:
                continue
            self.counts[str(found.finish_reason)] += 1
            self.counts["tokens"] += len(found.token_ids)
            right = expected(ids, tokens, VOCAB)
            assert found.token_ids == right[: len(found.token_ids)], f"tokens of {name} are mixed up"
            assert found.finish_reason == "abort" or len(found.token_ids) == tokens, f"{name} has {len(found.token_ids)} of {tokens} tokens"
        del self.wanted[name]

    def leave(self) -> None:
        """Close the socket with everything open, and come back."""
        self.counts["left"] += len(self.wanted)
        self.client.close()
        self.wanted.clear()
        self.fates.clear()
        self.client = RawClient(self.address)


def resident_mib(engine: Serving) -> float:
    """Of all ranks together."""
    return sum(own_bytes(engine.pid(rank)) for rank in range(engine.world)) / 2**20


def soak(
    engine: Serving, requests: int, *, clients: int = 8, open_each: int = 12, seed: int = 0, deadline_s: float = 3000
) -> dict[str, Any]:
    """Send ``requests`` and see all of them end; figures."""
    rng = random.Random(seed)
    soakers = [Soaker(engine.address, rng) for _ in range(clients)]
    sent, start, memory = 0, time.monotonic(), []
    while sent < requests or any(s.wanted for s in soakers):
        assert time.monotonic() - start < deadline_s, f"{sent} of {requests} requests sent; open: {[len(s.wanted) for s in soakers]}"
        for soaker in soakers:
            while sent < requests and len(soaker.wanted) < open_each:
                soaker.submit()
                sent += 1
            soaker.turn()
        soakers[0].client.poll(0.001)
        if sent * 20 // requests > len(memory):
            memory.append(round(resident_mib(engine), 1))
    seconds = time.monotonic() - start
    for soaker in soakers:
        soaker.client.close()
    totals = {name: sum(s.counts[name] for s in soakers) for name in soakers[0].counts}
    return {"requests": requests, "seconds": round(seconds, 1), **totals, "memory_mib": memory}


def main() -> int:
    """Run it; 1 when memory grew. Other faults are raised."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with costless(
        args.dp * args.tp, dp=args.dp, tp=args.tp, n_pages=128, max_num_seqs=32, timeout=3600, settings={"dp_routing": "kv"}
    ) as engine:
        found = soak(engine, args.requests, seed=args.seed)
        engine.signal(signal.SIGTERM)
    ends = good_ends(engine)
    found["preemptions"] = sum(e["stats"]["scheduler"]["preemptions"] for e in ends if "scheduler" in e["stats"])
    print(json.dumps(found), flush=True)
    memory = found["memory_mib"]
    return int(memory[-1] - memory[len(memory) // 4] > GROWTH_MIB * args.dp * args.tp)


if __name__ == "__main__":
    sys.exit(main())
