"""Random lives of small engines with offloading, and the tokens that every request must get whatever happens to it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rorqual import LLM, SamplingParams
from rorqual.engine.plan import StepPlan
from rorqual.engine.text.tokenizer import Tokenizer
from tests.offload.engines import counters, expect_idle, shuffle
from tests.offload.live import Live

TINY = Path(__file__).resolve().parents[2] / "launch" / "tiny"
LONGEST = 640  # tokens of a prompt
OUTPUT = 96  # tokens of an output at most
#: A request ends before its first token whose two highest logits are closer than this. Batches of different sizes round differently, now
#: and then two keys at the edge of a selection change places, and that moves logits of this model by up to 0.02.
MARGIN = 0.03
LEAST = 8  # tokens of an output; prompts whose right output is less sure are not used
#: settings that take turns, seed by seed; each device holds what four or five requests need at least
VARIANTS: tuple[dict[str, Any], ...] = tuple(
    {"kv_offload": policy, "kv_hot_policy": hot, **size}
    for size in (
        {"page_size": 16, "kv_hot_slots": 128, "kv_device_tokens": 896},
        {"page_size": 64, "kv_hot_slots": 128, "kv_device_tokens": 768, "disable_overlap_schedule": True},
    )
    for hot in ("score", "lru")
    for policy in ("host", "hybrid")
)
_BASE: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "float32", "disable_log_stats": True, "max_model_len": 1024, "cuda_graph_capture": "lazy",
}  # fmt: skip
_POOL = {"max_total_tokens": 1200, "max_num_seqs": 6, "max_num_batched_tokens": 128, "kv_host_memory": 0.25, "cuda_graph_bs": (6,)}


class Late(Exception):
    """The time is over before the seed is."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt and what must follow it."""

    ids: list[int]
    expected: list[int]


def offloaded(variant: int, *, device: str, eager: bool, **settings: Any) -> LLM:
    """The engine under test: free memory is NaN (RORQUAL_DEBUG), but steps are those of production, which check nothing."""
    llm = LLM("tiny", device=device, enforce_eager=eager, **{**_BASE, **_POOL, **VARIANTS[variant], **settings})
    runner = llm.engine.runner
    execute, cache, runner.debug, runner.tables.sampling.debug = runner.execute, runner.cache, False, False

    def poisoned(plan: StepPlan) -> Any:
        if len(plan.freed_pages):
            cache.poison(plan.freed_pages)
        return execute(plan)

    runner.execute = poisoned
    return llm


def resident(device: str, **settings: Any) -> LLM:
    """An engine without offloading, with room for everything: its tokens are the right ones."""
    args = {"max_total_tokens": 65536, "max_num_seqs": 48, "max_num_batched_tokens": 2048, "cuda_graph_bs": (48,), **settings}
    return LLM("tiny", device=device, **{**_BASE, **args})


def text_ids() -> list[int]:
    """Token ids of English text that the model has not seen."""
    return Tokenizer.load(TINY).encode((TINY / "eval" / "heldout.txt").read_text(encoding="utf-8"), add_special_tokens=False)


def draw_prompts(rng: random.Random, text: Sequence[int], count: int) -> list[list[int]]:
    """Prompts of 1 to ``LONGEST`` tokens. Many begin like another one; some are no longer than what every token attends to."""

    def piece(length: int) -> list[int]:
        start = rng.randrange(len(text) - length)
        return list(text[start : start + length])

    bases = [piece(rng.randrange(200, 500)) for _ in range(3)]
    prompts = []
    for _ in range(count):
        kind, base = rng.random(), rng.choice(bases)
        if kind < 0.4:  # a shared beginning, an end of its own
            prompts.append(base[: rng.randrange(20, len(base))] + piece(rng.randrange(1, 140)))
        elif kind < 0.55:  # the beginning alone: short ones read every key of it
            prompts.append(base[: rng.randrange(17, 126)])
        elif kind < 0.65:
            prompts.append(piece(rng.randrange(1, 120)))
        elif kind < 0.75:  # no text
            prompts.append([rng.randrange(6, 4096) for _ in range(rng.randrange(1, 400))])
        else:
            prompts.append(piece(rng.randrange(140, LONGEST)))
    return prompts


def right_tokens(llm: LLM, prompts: Sequence[list[int]]) -> list[Prompt]:
    """What an engine without offloading makes of the prompts, up to the first close call; prompts that begin with one are left out."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=2)
    found = []
    for output in llm.generate(list(prompts), params, use_tqdm=False):
        completion, count = output.outputs[0], 0
        for row in completion.logprobs:
            first, second = sorted((entry.logprob for entry in row.values()), reverse=True)[:2]
            if first - second < MARGIN:
                break
            count += 1
        if count >= LEAST:
            found.append(Prompt(ids=output.prompt_token_ids, expected=completion.token_ids[:count]))
    llm.reset_prefix_cache()
    return found


def live_through(llm: LLM, seed: int, prompts: Sequence[Prompt], *, steps: int, deadline: float = float("inf")) -> dict[str, Any]:
    """``steps`` steps of an idle engine, and what is left to end then.

    Returns:
        What has happened: numbers of steps, requests and so on.

    Raises:
        AssertionError: a wrong token, a page that is still held at the end, a row that was read and never written.
        Late: it is ``deadline`` (time.monotonic).
    """
    live, rng = Live(llm), random.Random(seed)
    begin_again(llm, seed)
    before, first, begun = _counts(llm), live.steps, time.monotonic()
    aborts = forced = 0
    while live.steps - first < steps:
        while len(live.open) < 4 or (len(live.open) < 14 and rng.random() < 0.1):
            place = rng.randrange(len(prompts))
            params = SamplingParams(temperature=0.0, max_tokens=len(prompts[place].expected), ignore_eos=True)
            live.add(place, prompts[place].ids, params, rng.randrange(3))
        if rng.random() < 0.008:
            live.abort(rng.choice(list(live.open)))
            aborts += 1
        if rng.random() < 0.01:
            forced += live.preempt(rng.randrange(6))
        live.step()
        if time.monotonic() > deadline:
            raise Late
    for name in list(live.open):
        live.abort(name)
    live.finish(time.monotonic() + 120.0)
    for asked in live.ended:
        wanted = prompts[asked.place].expected
        assert asked.tokens == wanted[: len(asked.tokens)], f"prompt {prompts[asked.place].ids}: {asked.tokens} instead of {wanted}"
        assert asked.aborted if asked.ended == "abort" else len(asked.tokens) == len(wanted), asked
    expect_idle(llm)
    found = {name: count - before[name] for name, count in _counts(llm).items()}
    found |= {
        "requests": len(live.ended),
        "aborts": aborts,
        "forced preemptions": forced,
        "prefix hits": sum(a.cached > 0 for a in live.ended),
    }
    return found | {"tokens": sum(len(a.tokens) for a in live.ended), "seconds": round(time.monotonic() - begun, 2)}


def begin_again(llm: LLM, seed: int) -> None:
    """An idle engine forgets everything: no prefix is cached, free memory of both tiers is NaN, all page numbers are in other orders."""
    expect_idle(llm)
    llm.reset_prefix_cache()
    tier, mover = llm.engine.leader.scheduler.tier, llm.engine.runner.mover
    assert tier.book._host_pages.n_used == 0 and tier.n_free == tier.limits.n_device_pages
    if llm.engine.grid.device.type == "cuda":
        torch.cuda.synchronize()  # copies to the host
    for layer in llm.engine.runner.cache.layers:
        layer.tier.host.bytes.fill_(0xFF)
    assert mover is not None
    shuffle(llm, seed)


def _counts(llm: LLM) -> dict[str, int]:
    scheduler, stats = llm.engine.leader.scheduler, llm.engine.runner.stats
    tier = scheduler.tier.stats()
    found = {"steps": stats.steps, "graph steps": stats.graph_steps, "preemptions": scheduler.stats.preemptions}
    found |= {"spills": tier["spilled"], "drops": tier["dropped"], "mirrors": tier["mirrored"], "restores": tier["restored"]}
    found |= {"leases grown": tier["leases_grown"], "leases shrunk": tier["leases_shrunk"]}
    return found | {"cached tokens": scheduler.stats.cached_tokens} | counters(llm)
