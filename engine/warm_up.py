"""Steps on padding, so that few requests wait for kernels to be compiled. What decode steps need, the capture of their graphs compiles.

Kernels are compiled in a few kinds by the number of tokens and the longest context of a step; the shapes here meet all of them
for steps of one prompt. Not among them: steps with pages on the host, sampling, and decode steps where no graphs are captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ..moe.load import ExpertLoad
from .graph_key import NOT_DECODE
from .plan import StepPlan
from .runner import Runner

#: up to so many tokens every number is a kind of its own: they share programs
_FEW = 8
#: tokens of steps behind contexts of all lengths, beside the most: the end of a cached prompt, and more than kernels for few take
_BEHIND = (64, 256)
#: shortest context that counts as long
_LONG = 16384


def warm_up_shapes(most_tokens: int, max_len: int) -> list[tuple[int, int]]:
    """(tokens, context at their end) of the steps, most tokens first.

    Args:
        most_tokens: of a step.
        max_len: tokens of the longest request.
    """
    most = min(most_tokens, max_len)
    lengths = {most, *range(1, min(_FEW, most)), *_doubled(1, most)}
    contexts = {max_len, *_doubled(_LONG, max_len)}
    shapes = {(tokens, tokens) for tokens in lengths} | {(tokens, max_len) for tokens in _doubled(1, min(most, max(_BEHIND)))}
    shapes |= {(tokens, context) for tokens in {most, *_BEHIND} for context in contexts if tokens <= min(most, context)}
    return sorted(shapes, reverse=True)


def _doubled(first: int, last: int) -> Iterator[int]:
    """first, 2 * first, 4 * first, .. up to ``last``."""
    while first <= last:
        yield first
        first *= 2


def warm_up(runner: Runner, *, most_tokens: int, max_len: int) -> int:
    """Run a step of every shape on each replica, on the padding's slot and page. Collective; the number of steps.

    The first one writes all rows of that page, which the others read. The load of experts is as it was afterwards.

    Raises:
        RuntimeError: a step takes more memory than there is, as a request of that length would have found out.
    """
    shapes = warm_up_shapes(most_tokens, max_len)
    with _load_kept(runner.stage.load):
        for tokens, context in shapes:
            try:
                runner.rehearse(_plan(runner, tokens, context))  # to its end: what it takes is given back before the next
            except torch.OutOfMemoryError as error:
                raise RuntimeError(
                    f"a step of {tokens} tokens that end at {context} does not fit the device's memory: lower --max-num-batched-tokens, "
                    f"--max-model-len or --gpu-memory-utilization ({error})"
                ) from error
    return len(shapes)


@contextmanager
def _load_kept(load: ExpertLoad | None) -> Iterator[None]:
    """Counts afterwards are those before. They are counted all the same: kernels that count are other ones."""
    if load is None:
        yield
        return
    counts, kept, load.kept = load.counts.clone(), load.kept, None
    try:
        yield
    finally:
        load.counts.copy_(counts)
        load.kept = kept


def _plan(runner: Runner, tokens: int, context: int) -> StepPlan:
    """One row that ends in the middle of a prompt, on every replica."""
    return StepPlan(
        step=-1,
        slots=np.array([runner.tables.spare_slot], dtype=np.int32),
        starts=np.array([context - tokens], dtype=np.int32),
        counts=np.array([tokens], dtype=np.int32),
        samples=np.zeros(1, dtype=np.bool_),
        dp_tokens=np.full(runner.grid.spec.dp, tokens, dtype=np.int32),
        dp_context=np.full(runner.grid.spec.dp, NOT_DECODE, dtype=np.int32),
        dp_offloaded=np.zeros(runner.grid.spec.dp, dtype=np.int32),
    )
