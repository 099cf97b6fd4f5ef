"""Which decode steps are replayed from a captured graph, and from which one: a rule over numbers that all ranks agree on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from .plan import I32, StepPlan

#: (up to this batch size, distance of the sizes): padding rows cost little, every graph costs time at the start
_STRIDES = ((32, 8), (128, 16), (1 << 20, 32))
#: most sequences of a graph unless asked for otherwise
_MAX_BATCH = 256
#: factor from one context length to the next
_GROWTH = 8
#: where a replica has a row that is no plain decode
NOT_DECODE = -1


@dataclass(frozen=True, kw_only=True, order=True)
class GraphKey:
    """One captured graph."""

    batch: int  # rows, those of padding included
    context: int  # longest context that its kernels are sized for
    offloaded: bool = False  # rows are looked for in all tiers


def graph_sizes(max_num_seqs: int, max_bs: int | None, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Batch sizes with a graph, ascending: ``sizes``, or 1, 2, 4, 8, 16, 24, 32, 48, ... up to ``max_bs`` and ``max_num_seqs``.

    Raises:
        ValueError: a size below 1.
    """
    bad = [size for size in [*(sizes or ()), *([] if max_bs is None else [max_bs])] if size < 1]
    if bad:
        raise ValueError(f"batch sizes of CUDA graphs must be at least 1, found {bad[0]}; use --enforce-eager for no graphs")
    most = max_num_seqs if max_bs is None else min(max_num_seqs, max_bs)
    if not sizes:
        most = min(most, _MAX_BATCH) if max_bs is None else most
        sizes = [1, 2, 4]
        for limit, stride in _STRIDES:
            first = sizes[-1] // stride * stride + stride
            sizes += range(first, min(limit, most) + 1, stride)
        sizes.append(most)
    return tuple(sorted({min(size, most) for size in sizes}))


def context_classes(max_len: int, dense: int | None) -> tuple[int, ...]:
    """Context lengths that graphs are sized for, ascending, the last one ``max_len``.

    Kernels launch for the longest context that may come, so short contexts get graphs of their own: up to ``dense`` keys, where
    sparse attention needs no selection, and then in steps of a factor, since a little room costs little.
    """
    first = dense or 2048
    lengths = []
    while first <= max_len // 2:
        lengths.append(first)
        first *= _GROWTH
    return (*lengths, max_len)


def decode_context(plan: StepPlan) -> int:
    """What one replica says of its plan: its longest context if every row is one token and samples, 0 without rows, else -1."""
    if plan.n_rows == 0:
        return 0
    if not plan.samples.all() or int(plan.counts.max()) != 1:
        return NOT_DECODE
    return int(plan.starts.max()) + 1


def choose_graph(
    dp_tokens: I32, dp_context: I32, sizes: Sequence[int], contexts: Sequence[int], dp_offloaded: I32 | None = None, dense: int = 0
) -> GraphKey | None:
    """The graph of a step, None when it runs eagerly; the same on every rank, as it depends on agreed numbers only.

    Args:
        dp_tokens: [dp] tokens of the step on every replica.
        dp_context: [dp] ``decode_context`` of every replica.
        sizes: batch sizes with a graph, ascending.
        contexts: context lengths with a graph, ascending.
        dp_offloaded: [dp] whether a replica has requests with absent pages or hot rows; None without offloading.
        dense: contexts up to this length are read whole, so that all of their pages are on the device.

    All replicas replay a graph of one size, since experts are shared: one with fewer rows, or none, pads.
    """
    tokens, said = dp_tokens.tolist(), dp_context.tolist()
    if not sizes or not said or min(said) == NOT_DECODE:
        return None
    most, context = max(tokens), max(said)
    if most > sizes[-1] or context > contexts[-1] or most == 0:
        return None
    offloaded = dp_offloaded is not None and bool(dp_offloaded.any()) and context > dense
    return GraphKey(batch=sizes[bisect_left(sizes, most)], context=contexts[bisect_left(contexts, context)], offloaded=offloaded)
