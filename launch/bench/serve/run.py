"""One run against a server: ready, warm, empty the cache, load, figures."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..datasets.config import DatasetConfig
from ..datasets.make import ONLY_IDS, Words, dataset_of, make_requests, with_text
from ..datasets.request import Request
from .arrivals import arrival_times
from .ask import Asker
from .config import ServeBenchConfig, TargetConfig
from .figures import detailed, figures, samples
from .http import Client
from .load import Load, probe
from .outcome import Outcome
from .target import call, check_ready, flush_cache, make_client, served_models, server_facts

#: tokens of a random prompt when no flag says; vLLM's
INPUT_LEN = 1024
#: a client that is this late, in ms, at one request of a hundred is itself what is measured
LATE_MS = 20.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run gave."""

    figures: dict[str, Any]  # see ``figures``
    details: dict[str, Any]  # see ``detailed``
    facts: dict[str, Any]  # of server, model and dataset
    errors: dict[str, int]  # what went wrong, and how often
    warnings: tuple[str, ...]  # that a reader of the figures should know


def say(text: str) -> None:
    """Tell it on stderr; stdout holds results."""
    print(text, file=sys.stderr, flush=True)


async def measure(model: str | None, target: TargetConfig, load: ServeBenchConfig, dataset: DatasetConfig) -> Measured:
    """Run the benchmark.

    Raises:
        ValueError: a setting is wrong, or the server is not there or refuses what is asked.
    """
    client = make_client(target)
    try:
        return await _measure(client, model, target, load, dataset)
    finally:
        client.close()


async def _measure(client: Client, model: str | None, target: TargetConfig, load: ServeBenchConfig, dataset: DatasetConfig) -> Measured:
    entry = await _model_entry(client, model, target)
    name = str(entry["id"])
    words = words_of(model, target, entry)
    text = words.has_text and not target.skip_tokenizer_init and dataset_of(dataset) not in ONLY_IDS
    requests = make_requests(dataset, words, seed=load.seed, input_len=INPUT_LEN)
    if text:
        requests = with_text(requests, words)
    talks = any(r.then for r in requests)
    asker = Asker.of(target, load, name, as_ids=not text, want_ids=talks and not text)
    if target.ready_check_timeout_sec > 0:
        await check_ready(client, asker, asker.first(_short(requests[0])), target.ready_check_timeout_sec)
    facts = {"model_id": name, "dataset": dataset_of(dataset), "server": {**server_facts_of(entry), **await server_facts(client)}}
    await _warm_up(client, asker, requests, load, target)
    flushed = await flush_cache(client) if load.flush_cache else None
    outcomes, seconds, probes = await _timed(client, asker, requests, load, target)
    result = figures(outcomes, seconds, load)
    if load.probe_request_rate > 0:
        result |= _probe_figures(probes)
    start = min((o.sent for o in outcomes), default=0.0)
    return Measured(
        figures=result, details=detailed(outcomes, start), facts=facts, errors=_errors(outcomes),
        warnings=tuple(_warnings(outcomes, result, load, flushed, sum(1 + len(r.then) for r in requests))),
    )  # fmt: skip


async def _model_entry(client: Client, model: str | None, target: TargetConfig) -> dict[str, Any]:
    """What the server tells of the model: of the one that was named, of its first where a folder here was; {"id": NAME} if nothing."""
    name = target.served_model_name or (model if model is not None and tokenizer_folder(model, must=False) is None else None)
    try:
        entries = await served_models(client, target.ready_check_timeout_sec)
    except ValueError:
        if name is None:
            raise
        return {"id": name}
    named = [entry for entry in entries if entry.get("id") in (name, model)]
    return {**entries[0], **(named[0] if named else {"id": name or entries[0]["id"]})}


def server_facts_of(entry: dict[str, Any]) -> dict[str, Any]:
    """What /v1/models tells beyond names."""
    return {key: entry[key] for key in ("max_model_len", "vocab_size", "layout", "dp_size", "owned_by") if entry.get(key) is not None}


def words_of(model: str | None, target: TargetConfig, entry: dict[str, Any]) -> Words:
    """Tokenizer and vocabulary: of the flags, of the model where it is a folder here, or as the server says."""
    told = entry.get("vocab_size")
    size = target.vocab_size or (told if isinstance(told, int) else None)
    folder = tokenizer_folder(target.tokenizer or model, must=target.tokenizer is not None)
    if folder is None or target.skip_tokenizer_init:
        return Words(size)
    from ....engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    return Words(size or tokenizer.vocab_size, tokenizer.encode, tokenizer.decode)


def tokenizer_folder(name: str | None, *, must: bool) -> Path | None:
    """The folder that ``name`` means, if it has a tokenizer; with ``must`` ValueError when it has none."""
    if name is None:
        return None
    folder = Path(__file__).resolve().parents[2] / "tiny" if name == "tiny" else Path(name)
    if (folder / "tokenizer.json").is_file():
        return folder
    if must:
        raise ValueError(f"--tokenizer {name}: no folder with a tokenizer.json")
    return None


def _short(request: Request) -> Request:
    """A few tokens of the request, in reverse: it must not warm the cache for it."""
    turned = request.turned()
    return replace(turned, token_ids=turned.token_ids[:8], text=None if turned.text is None else turned.text[:16])


async def _warm_up(client: Client, asker: Asker, requests: Sequence[Request], load: ServeBenchConfig, target: TargetConfig) -> None:
    if load.num_warmups == 0:
        return
    others = [requests[i % len(requests)].turned() for i in range(load.num_warmups)]
    runner = Load(client=client, asker=asker, timeout_s=target.request_timeout_s, limit=load.max_concurrency)
    outcomes, _ = await runner.run(others, [0.0] * len(others))
    wrong = [o.error for o in outcomes if o.error is not None]
    if len(wrong) == len(outcomes):
        raise ValueError(f"all {len(wrong)} warm-up requests failed: {wrong[0]}")


async def _timed(
    client: Client, asker: Asker, requests: Sequence[Request], load: ServeBenchConfig, target: TargetConfig
) -> tuple[list[Outcome], float, list[Outcome]]:
    from tqdm import tqdm

    times = arrival_times(load, len(requests))
    if all(r.at is not None for r in requests):  # a trace says itself
        times = [r.at or 0.0 for r in requests]
    total = sum(1 + len(r.then) for r in requests)
    if load.profile:
        await _profile(client, "/start_profile")
    with tqdm(total=total, desc="requests", unit="req", disable=load.disable_tqdm or not sys.stderr.isatty(), dynamic_ncols=True) as bar:
        runner = Load(client=client, asker=asker, timeout_s=target.request_timeout_s, limit=load.max_concurrency, told=bar.update)
        watcher = None
        if load.probe_request_rate > 0:
            prompt = asker.first(_short(requests[0]))
            watcher = asyncio.create_task(probe(client, asker, load.probe_request_rate, prompt, timeout_s=target.request_timeout_s))
        outcomes, seconds = await runner.run(requests, times)
    probes: list[Outcome] = []
    if watcher is not None:
        watcher.cancel()
        probes = await watcher
    if load.profile:
        await _profile(client, "/stop_profile")
    return outcomes, seconds, probes


async def _profile(client: Client, path: str) -> None:
    status, body = await call(client, "POST", path)
    if status != 200:
        raise ValueError(f"POST {path}: HTTP {status}, {str(body)[:200]}; the server does not profile (leave out --profile)")
    say(f"{path}: {body}")


def _probe_figures(probes: Sequence[Outcome]) -> dict[str, Any]:
    good = [1000.0 * value for value in samples([o for o in probes if o.success])["e2el"]]
    ordered = sorted(good)
    return {
        "probe_completed": len(good),
        "probe_failed": len(probes) - len(good),
        "probe_mean_e2el_ms": sum(good) / len(good) if good else None,
        "probe_median_e2el_ms": ordered[len(ordered) // 2] if good else None,
        "probe_max_e2el_ms": ordered[-1] if good else None,
    }


def _errors(outcomes: Sequence[Outcome]) -> dict[str, int]:
    found: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            found[outcome.error] = found.get(outcome.error, 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _warnings(outcomes: Sequence[Outcome], result: dict[str, Any], load: ServeBenchConfig, flushed: str | None, planned: int) -> list[str]:
    found = []
    if len(outcomes) < planned:
        found.append(f"{planned - len(outcomes)} later turns of conversations were never asked: the turn before them had failed")
    if load.flush_cache and flushed is None:
        found.append("the server has no route to forget cached prefixes: prompts of an earlier run may still be there")
    if result["short_outputs"] and load.ignore_eos is not False:
        found.append(f"{result['short_outputs']} requests made fewer tokens than asked for")
    late = sorted(1000.0 * (o.started - o.planned) for o in outcomes)
    worst = late[int(0.99 * (len(late) - 1))] if late else 0.0
    if worst > LATE_MS and any(o.planned > outcomes[0].planned for o in outcomes):
        found.append(
            f"this client was late: 1 request of 100 was sent {worst:.0f} ms or more after its time; it is part of what was measured"
        )
    return found


def now() -> str:
    """Date and time for file names, as vLLM writes it."""
    return time.strftime("%Y%m%d-%H%M%S")
