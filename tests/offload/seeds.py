"""Greedy tokens with offloading are those without it, in random lives of the embedded model: many seeds, many processes.

``python -m tests.offload.seeds --seeds 100 --steps 1000 --graphs --workers 32 --json seeds.json``

Each seed draws prompts, has an engine without offloading say what follows each of them, and then lets an engine whose device and host pools
are small live through its steps: requests come at random, are aborted and preempted, begin with prefixes that are cached, spill and come
back, while free memory is NaN and page numbers are in random orders. With ``--graphs`` it does so a second time with decode steps
from CUDA graphs. The run fails with a wrong token, a row that was never written, a page still held at the end, or a seed in which
nothing was offloaded.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rorqual import LLM
from tests.offload import scenario
from tests.offload.scenario import Late

_GRACE_S = 8.0  # for processes to tell their last rows once the time is over


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process does."""

    seeds: tuple[int, ...]
    modes: tuple[str, ...]  # eager, graphs
    steps: int  # of each seed and mode
    device: str  # cuda or cpu
    policy: str  # host, hybrid, or both in turns
    gpu: str = ""  # CUDA_VISIBLE_DEVICES of the process
    until: float = float("inf")  # time.monotonic() at which it stops, the same clock in all processes
    prompts: int = 48  # drawn for each seed


def variant_of(seed: int, policy: str) -> int:
    """Place in ``VARIANTS`` of a seed's settings."""
    places = [i for i, v in enumerate(scenario.VARIANTS) if policy in ("both", v["kv_offload"])]
    return places[seed % len(places)]


def run_job(job: Job) -> Iterator[dict[str, Any]]:
    """One row for each seed and mode: what happened, and ``status``: passed, idle (nothing was offloaded), failed or late."""
    text = scenario.text_ids()
    engines: dict[tuple[int, str], LLM] = {}
    with scenario.resident(job.device) as right:
        yield from _rows(job, text, right, engines)
    for llm in engines.values():
        llm.close()


def _rows(job: Job, text: list[int], right: LLM, engines: dict[tuple[int, str], LLM]) -> Iterator[dict[str, Any]]:
    for seed in job.seeds:
        variant, prompts = variant_of(seed, job.policy), None
        for mode in job.modes:
            row = {"seed": seed, "mode": mode, **scenario.VARIANTS[variant]}
            if time.monotonic() > job.until:
                yield row | {"status": "late"}
                continue
            try:
                if prompts is None:
                    prompts = scenario.right_tokens(right, scenario.draw_prompts(random.Random(seed), text, job.prompts))
                llm = _engine(engines, variant, mode, job.device)
                row |= scenario.live_through(llm, seed, prompts, steps=job.steps, deadline=job.until)
                row["status"] = "passed" if row["misses"] and (row["spills"] or row["drops"]) else "idle"
                if mode == "graphs" and not row["graph steps"]:
                    row["status"] = "idle"
            except Late:
                row["status"] = "late"
            except BaseException:
                row |= {"status": "failed", "error": traceback.format_exc()[-3000:]}
            if row["status"] in ("late", "failed"):
                engines.pop((variant, mode), None)  # it is in the middle of something, or broken
            yield row


def _engine(engines: dict[tuple[int, str], LLM], variant: int, mode: str, device: str) -> LLM:
    """The engine for a seed: that of the seed before where settings are the same, which ``begin_again`` empties."""
    if (variant, mode) not in engines:
        for key in [key for key in engines if key[0] != variant]:
            engines.pop(key).close()
        engines[variant, mode] = scenario.offloaded(variant, device=device, eager=mode == "eager")
    return engines[variant, mode]


def work(job: Job, pipe: multiprocessing.connection.Connection) -> None:
    """A process: rows of ``run_job`` as JSON."""
    os.environ["RORQUAL_DEBUG"] = "1"  # what is free holds NaN, and NaN among logits is an error
    if job.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = job.gpu
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    for row in run_job(job):
        pipe.send_bytes(json.dumps(row).encode())


def spread(job: Job, workers: int) -> list[Job]:
    """Jobs of ``workers`` processes; neighbours in the order of settings stay together, GPUs take turns."""
    order = sorted(job.seeds, key=lambda seed: (variant_of(seed, job.policy), seed))
    cuts = [len(order) * i // workers for i in range(workers + 1)]
    gpus = _gpus() if job.device == "cuda" else [""]
    parts = [tuple(order[a:b]) for a, b in zip(cuts, cuts[1:], strict=False) if a < b]
    return [replace(job, seeds=part, gpu=gpus[i % len(gpus)]) for i, part in enumerate(parts)]


def _gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def run(job: Job, workers: int) -> list[dict[str, Any]]:
    """All rows, printed as they come. A process that ends early leaves rows that say so."""
    begun = time.monotonic()
    if workers == 1:
        rows = []
        for row in run_job(job):
            rows.append(row)
            _tell(row, begun)
        return rows
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.offload.scenario"])
    pipes, owners = [], {}
    for part in spread(job, workers):
        ours, theirs = context.Pipe(duplex=False)
        context.Process(target=work, args=(part, theirs), daemon=True).start()
        theirs.close()
        pipes.append(ours)
        owners[ours] = {(seed, mode) for seed in part.seeds for mode in part.modes}
    return _gather(pipes, owners, begun, job.until + _GRACE_S)


def _gather(pipes: list[Any], owners: dict[Any, set[tuple[int, str]]], begun: float, end: float) -> list[dict[str, Any]]:
    rows = []
    while pipes and time.monotonic() < end:
        for pipe in multiprocessing.connection.wait(pipes, 5.0):
            try:
                row = json.loads(pipe.recv_bytes())
            except EOFError:
                pipes.remove(pipe)
                continue
            owners[pipe].discard((row["seed"], row["mode"]))
            rows.append(row)
            _tell(row, begun)
    for pipe, left in owners.items():
        why = {"status": "late"} if pipe in pipes else {"status": "failed", "error": "its process ended"}
        rows += [{"seed": seed, "mode": mode} | why for seed, mode in sorted(left)]
    return rows


SHOWN = (
    "steps", "graph steps", "requests", "tokens", "aborts", "preemptions", "forced preemptions", "prefix hits", "spills", "drops",
    "restores", "leases grown", "leases shrunk", "hits", "misses", "moved", "unwritten",
)  # fmt: skip


def _tell(row: dict[str, Any], begun: float) -> None:
    shown = " ".join(f"{name} {row[name]}" for name in SHOWN if name in row)
    print(
        f"{time.monotonic() - begun:6.1f} s  seed {row['seed']} {row['mode']} {row['status']}: {shown} {row.get('error', '')}", flush=True
    )


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seeds by status, and sums over those that passed."""
    found: dict[str, Any] = {}
    for mode in sorted({row["mode"] for row in rows}):
        mine = [row for row in rows if row["mode"] == mode]
        states = {status: sum(row["status"] == status for row in mine) for status in ("passed", "idle", "failed", "late")}
        found[mode] = states | {name: sum(row.get(name, 0) for row in mine if row["status"] == "passed") for name in SHOWN}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--graphs", action="store_true", help="each seed a second time, from CUDA graphs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--policy", choices=("host", "hybrid", "both"), default="both")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="seeds that are not done by then do not count")
    parser.add_argument("--json", type=Path, help="file for all rows")
    args = parser.parse_args()
    if args.graphs and args.device == "cpu":
        parser.error("--graphs needs a CUDA device")
    os.environ["RORQUAL_DEBUG"] = "1"
    torch.set_num_threads(1)
    job = Job(
        seeds=tuple(range(args.first, args.first + args.seeds)), modes=("eager", "graphs") if args.graphs else ("eager",), steps=args.steps,
        device=args.device, policy=args.policy, until=time.monotonic() + args.budget_seconds,
    )  # fmt: skip
    begun = time.monotonic()
    rows = run(job, args.workers)
    found = summary(rows)
    if args.json:
        settings = asdict(job) | {"seeds": args.seeds, "first": args.first, "workers": args.workers, "until": str(args.budget_seconds)}
        args.json.write_text(
            json.dumps({"settings": settings, "seconds": time.monotonic() - begun, "summary": found, "rows": rows}, indent=1)
        )
    print(json.dumps(found))
    bad = [row for row in rows if row["status"] in ("idle", "failed")]
    sys.exit(1 if bad or not any(row["status"] == "passed" for row in rows) else 0)


if __name__ == "__main__":
    main()
