"""Thousands of streams through HTTP on a real engine: ``python -m tests.server.soak --requests 10000 --concurrency 500 [--nproc 2 ...]``.

It starts ``rorqual serve tiny`` (flags after ``--`` go to it), learns what each of a set of prompts gives, and then asks for them again
and again, some clients leaving at random moments. Every stream that is read to its end must give the same tokens; at the end nothing may
run or wait, the KV pools must be empty, and the memory of rank 0 and of the HTTP processes must not have grown in the second half.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import time
from typing import Any

import httpx
import psutil

from tests.server.started import started


async def stream(port: int, prompt: list[int], max_tokens: int, leave_after: int | None) -> list[int] | None:
    """The tokens of a stream; None for one that is left after so many bytes."""
    body = json.dumps(
        {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, "return_token_ids": True, "ignore_eos": True}
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        if leave_after is not None:
            await asyncio.wait_for(reader.read(leave_after), 300)
            return None
        data = (await asyncio.wait_for(reader.read(), 300)).decode()
    finally:
        writer.close()
    assert data.startswith("HTTP/1.1 200") and "data: [DONE]" in data, data[:500]
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
    return [t for e in events for t in e["choices"][0]["token_ids"]]


async def load(port: int, requests: int, concurrency: int, leaving: float, seed: int, memory: Any) -> dict[str, Any]:
    """Run it; counts. AssertionError names the first stream that gives other tokens."""
    rng = random.Random(seed)
    prompts = [[8 + rng.randrange(4000) for _ in range(rng.randint(1, 80))] for _ in range(60)]
    lengths = [rng.randint(1, 24) for _ in prompts]
    known = [await stream(port, p, n, None) for p, n in zip(prompts, lengths, strict=True)]
    numbers = iter(range(requests))
    done = {"read": 0, "left": 0, "tokens": 0}

    async def worker() -> None:
        for number in numbers:
            place = rng.randrange(len(prompts))
            leave = rng.randint(1, 4000) if rng.random() < leaving else None
            got = await stream(port, prompts[place], lengths[place], leave)
            assert leave is not None or got == known[place], f"request {number}: {got} instead of {known[place]}"
            done["left" if got is None else "read"] += 1
            done["tokens"] += len(got or ())
            if number % max(1, requests // 10) == 0:
                memory()

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return done


def numbers_of(url: str) -> dict[str, float]:
    """Gauges of /metrics that must be 0 when nothing runs."""
    found: dict[str, float] = {}
    for line in httpx.get(url + "/metrics", timeout=30).text.splitlines():
        match = re.match(r"rorqual:(num_requests_running|num_requests_waiting)\S* (\S+)", line)
        if match:
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def tree_memory(root: psutil.Process) -> dict[str, float]:
    """MiB of each process of a job that is not the launcher's own bookkeeping."""
    found = {}
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            kind = "http" if "rorqual.engine.server" in words else "rank" if "serve" in words else "other"
            if kind != "other":
                found[f"{kind} {process.pid}"] = process.memory_info().rss / 2**20
    return found


def main(argv: list[str]) -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=500)
    parser.add_argument("--leaving", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=1)
    cut = argv.index("--") if "--" in argv else len(argv)
    args, more = parser.parse_args(argv[:cut]), argv[cut + 1 :]
    start = time.monotonic()
    with started(["tiny", "--dtype", "float32", "--max-total-tokens", "65536", *more]) as (url, server, _):
        port = int(url.rsplit(":", 1)[1])
        root, seen = psutil.Process(server.pid), []
        done = asyncio.run(load(port, args.requests, args.concurrency, args.leaving, args.seed, lambda: seen.append(tree_memory(root))))
        end = time.monotonic() + 60
        while any(numbers_of(url).values()):
            assert time.monotonic() < end, f"requests are left over: {numbers_of(url)}"
            time.sleep(0.5)
        httpx.post(url + "/flush_cache", timeout=60).raise_for_status()
        seen.append(tree_memory(root))
        print(f"{args.requests} requests in {time.monotonic() - start:.0f} s: {done}")
        for name in seen[-1]:
            print(f"  {name}: MiB {[round(s.get(name, 0.0)) for s in seen]}")
            middle, last = seen[len(seen) // 2].get(name, 0.0), seen[-1][name]
            assert args.requests < 2000 or last < middle * 1.1 + 20, f"{name} has grown from {middle:.0f} to {last:.0f} MiB"
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
