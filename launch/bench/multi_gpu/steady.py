"""Rates of a call: of its prompts, and of the steps in which every request decodes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ...errors import rank


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Of one call."""

    all_begun_s: float  # from the start until every request had its first token
    tokens_per_s: float  # of all requests, from then until the first one ended; 0 where there is no such time
    cached: float  # share of the prompts' tokens that were cached
    seconds: float  # of the whole call


def run_steady(llm: Any, prompts: list[list[int]], n: int) -> Steady | None:
    """Generate ``n`` tokens for each prompt. Collective; None off rank 0.

    While some prompts are still computed others decode already, and at the end some have ended: neither counts for ``tokens_per_s``.
    """
    from ....engine.sampling_params import SamplingParams

    begun: set[int] = set()
    start, first, last, made, cached = time.monotonic(), 0.0, 0.0, 0, 0
    for chunk in llm.generate_stream(prompts, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)):
        now = time.monotonic()
        if first and not last:
            made += len(chunk.token_ids)
        begun.add(chunk.prompt_index)
        if not first and len(begun) == len(prompts):
            first = now
        if chunk.output is not None:
            last = last or now
            cached += chunk.output.metrics.cached_tokens
    end = time.monotonic()
    if rank() != 0:
        return None
    rate = made / (last - first) if first and last > first else 0.0
    return Steady(all_begun_s=first - start, tokens_per_s=rate, cached=cached / sum(map(len, prompts)), seconds=end - start)
