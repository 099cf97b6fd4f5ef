"""Time to first token of a served engine with several replicas under a load of shared prefixes, by policy.

python -m tests.serving.routing.served                  # real ranks over a device that takes time by the token
python -m tests.serving.routing.served --engine tiny    # the tiny model; wants a core for every rank
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from typing import Any
from unittest import mock

from rorqual.engine.serving.routing.settings import POLICIES
from tests.serving.client import RawClient
from tests.serving.ranks import _running, rank_serves, rank_serves_costless
from tests.serving.routing.replicas import Arrival, SharedPrefixes

#: seconds of a step of the timed device, and of each token of the replica that has most
STEP_S, TOKEN_S = 0.03, 0.001


def rank_serves_timed(engine_args: dict[str, Any], settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """A rank whose steps take as long as their tokens ask for, without work for a core."""
    from rorqual.engine.serving.costless import CostlessRunner

    execute = CostlessRunner.execute

    def timed(self: Any, plan: Any) -> Any:
        time.sleep(STEP_S + TOKEN_S * int(plan.dp_tokens.max()))
        return execute(self, plan)

    with mock.patch.object(CostlessRunner, "execute", timed):
        return rank_serves_costless(engine_args, settings, folder)


def jobs(kind: str, dp: int, pool_tokens: int, policy: str) -> tuple[Any, tuple[Any, ...]]:
    """What every rank runs."""
    settings = {"dp_routing": policy}
    args = {"max_model_len": 2048, "max_num_batched_tokens": 256, "max_num_seqs": 16, "page_size": 16}
    if kind == "timed":
        return rank_serves_timed, ({**args, "dp": dp, "n_pages": pool_tokens // 16}, settings)
    dummy = {"skip_tokenizer_init": True, "load_format": "dummy", "dtype": "float32", "disable_log_stats": True}
    return rank_serves, ("tiny", {**args, **dummy, "data_parallel_size": dp, "max_total_tokens": pool_tokens}, settings)


def send(client: RawClient, load: list[Arrival]) -> tuple[list[float], list[str]]:
    """Send requests when they are due and wait for their ends: seconds to the first token, and names."""
    begin, sent, names = time.monotonic(), [], []
    for arrival in load:
        while (left := begin + arrival.at - time.monotonic()) > 0:
            client.poll(left)
        sent.append(begin + arrival.at)  # not when it left: a client that is late must not make the server look good
        names.append(client.submit(arrival.prompt, temperature=0.0, max_tokens=arrival.max_tokens, ignore_eos=True))
    client.finish()
    return [client.done[name, 0].first_at - at for name, at in zip(names, sent, strict=True)], names


def figures(client: RawClient, load: list[Arrival], ttft: list[float], names: list[str], dp: int) -> dict[str, Any]:
    """What came of a run."""
    tokens = [0] * dp
    for arrival, name in zip(load, names, strict=True):
        tokens[client.done[name, 0].dp_rank] += len(arrival.prompt) + len(client.done[name, 0].token_ids)
    cached = sum(client.done[name, 0].cached_tokens for name in names)
    return {
        "mean_ttft_ms": round(1e3 * sum(ttft) / len(ttft), 1),
        "median_ttft_ms": round(1e3 * sorted(ttft)[len(ttft) // 2], 1),
        "balance": round(max(tokens) * dp / sum(tokens), 3),
        "cached_share": round(cached / sum(len(arrival.prompt) for arrival in load), 3),
    }


def measure(kind: str, policy: str, load: list[Arrival], dp: int, pool_tokens: int) -> dict[str, Any]:
    """Start an engine of ``dp`` replicas, send the load, end the engine."""
    with _running(dp, *jobs(kind, dp, pool_tokens, policy), 900.0, debug=False) as engine:
        with RawClient(engine.address, timeout=600.0) as client:
            for rank in range(dp):
                client.complete([7] * 40, temperature=0.0, max_tokens=4, dp_rank=rank)  # warm
            client.control("flush_cache")
            found = {"policy": policy, **figures(client, load, *send(client, load), dp)}
            client.snapshots.clear()
            client.until(lambda: client.snapshots, "Snapshot")
            found["routing"] = client.snapshots[-1].engine["routing"]
            engine.signal(signal.SIGTERM)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("timed", "tiny"), default="timed")
    parser.add_argument("--policy", action="append", choices=POLICIES)
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=768)
    parser.add_argument("--pool-tokens", type=int, default=6144)
    args = parser.parse_args()
    shape = SharedPrefixes(rate=args.rate, requests=args.requests, groups=args.groups, prefix=args.prefix, question=32, output=8)
    for policy in args.policy or ("round_robin", "kv"):
        print(json.dumps(measure(args.engine, policy, shape.arrivals(), args.dp, args.pool_tokens)), flush=True)


if __name__ == "__main__":
    main()
