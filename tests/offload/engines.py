"""Small engines with offloading whose ids are shuffled, and the tokens that they must give."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from typing import Any

from rorqual import LLM, SamplingParams
from rorqual.attention.kv.host.allocator import HostPageAllocator
from rorqual.attention.kv.tier import TierCounter
from tests.checkpoints import checkpoint
from tests.engine.parity import ragged_prompts

PROMPTS = ragged_prompts(12, longest=90)
N_TOKENS = 12


class ShuffledHostPages:
    """An allocator whose numbers are permuted, so that no host page has the number of a device or logical page by habit."""

    def __init__(self, pages: HostPageAllocator, seed: int) -> None:
        self._pages = pages
        self._ours = random.Random(seed).sample(range(pages.n_pages), pages.n_pages)
        self._theirs = {page: place for place, page in enumerate(self._ours)}

    def take(self, count: int, after: int | None = None) -> list[int]:
        return [self._ours[page] for page in self._pages.take(count, None if after is None else self._theirs[after])]

    def drop(self, pages: Iterable[int]) -> None:
        self._pages.drop([self._theirs[page] for page in pages])

    @property
    def n_used(self) -> int:
        return self._pages.n_used


def make(policy: str, *, seed: int = 0, name: str = "v32", **settings: Any) -> LLM:
    """A pool of 240 tokens for up to 5 requests, of which the device holds 100: nearly always short of everything."""
    base = {
        "skip_tokenizer_init": True, "dtype": "float32", "disable_log_stats": True, "page_size": 4, "max_total_tokens": 240,
        "max_num_seqs": 5, "max_num_batched_tokens": 32,
    }  # fmt: skip
    if policy != "off":
        base |= {"kv_offload": policy, "kv_host_memory": 0.2, "kv_device_tokens": 100}
    llm = LLM(str(checkpoint(name)), **{**base, **settings})
    shuffle(llm, seed)
    return llm


def shuffle(llm: LLM, seed: int) -> None:
    """Logical, device and host pages come in random orders."""
    leader = llm.engine.leader
    if leader is None or leader.scheduler.tier is None:
        return
    rng, book = random.Random(seed), leader.scheduler.tier.book
    rng.shuffle(book.free)
    rng.shuffle(leader.scheduler._pool.pages._free)
    if leader.scheduler.share is None:  # a directory has its own ideas of numbers
        pages = book._host_pages  # of an engine that is used again they are shuffled already
        book._host_pages = ShuffledHostPages(pages._pages if isinstance(pages, ShuffledHostPages) else pages, seed)


def params(n: int = N_TOKENS, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, **more)


@functools.cache
def _plain(name: str) -> LLM:
    return make("off", name=name, max_total_tokens=4000)


@functools.cache
def alone(place: int, name: str = "v32") -> list[int]:
    """Tokens of a lone run without offloading."""
    return _plain(name).generate([PROMPTS[place]], params(), use_tqdm=False)[0].outputs[0].token_ids


def counters(llm: LLM) -> dict[str, int]:
    """Sums of the tier counters of this rank."""
    counts = llm.engine.runner.mover.counts.now().sum(0)
    return {counter.name.lower(): int(counts[counter]) for counter in TierCounter}


def expect_idle(llm: LLM) -> None:
    """Nothing is held but what the prefix tree has, and no row was read that was never written."""
    scheduler = llm.engine.leader.scheduler
    scheduler.check()
    assert scheduler.idle and scheduler.tier.idle
    pool = scheduler._pool
    assert scheduler.tier.book._host_pages.n_used == pool.pages.n_used == pool.cache.n_pages
    assert counters(llm)["unwritten"] == 0
