"""Puts together what the ranks of one run, and the stages of a pipeline, dumped apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..load.gathered import common_phase
from ..trace import LoadTrace


def merge(traces: Sequence[LoadTrace]) -> LoadTrace:
    """The sum of the ranks' traces, step by step. Traces of different layers, of the stages of a pipeline, are joined.

    Passes that not all ranks have recorded, because they were told to dump at different times, are left out at both ends.

    Raises:
        ValueError: dumps of one rank twice, dumps that each have all ranks already, or of different models or runs.
    """
    if not traces:
        raise ValueError("merge: no dump was given")
    if len(traces) == 1:
        return traces[0]
    stages: dict[tuple[int, ...], list[LoadTrace]] = {}
    for trace in traces:
        stages.setdefault(trace.layer_ids, []).append(trace)
    whole = [_merged_ranks(stage) for stage in stages.values()]
    return whole[0] if len(whole) == 1 else _joined(sorted(whole, key=lambda trace: trace.layer_ids))


def _merged_ranks(traces: Sequence[LoadTrace]) -> LoadTrace:
    """The sum of traces of the same layers."""
    if len(traces) == 1:
        return traces[0]
    _check_apart(traces)
    first, last = _common(traces)
    parts = [_between(trace, first, last) for trace in traces]
    if len({part.n_steps for part in parts}) != 1:
        found = [part.n_steps for part in parts]
        raise ValueError(
            f"merge: the dumps have different numbers of steps, {found}, and do not say which; dump all ranks at the same step"
        )
    head = parts[0]
    tokens = [part.tokens for part in parts if part.tokens is not None]
    phases = [part.phase for part in parts if part.phase is not None]
    known = len(tokens) == len(phases) == len(parts)
    ranks = sum(part.n_ranks or 1 for part in parts)
    said = ",".join(rank for trace in traces for rank in _ranks(trace))
    meta = {key: value for key, value in head.meta.items() if key not in ("rank", "ranks", "passes")}
    return LoadTrace(
        counts=np.sum([part.counts for part in parts], axis=0),
        layer_ids=head.layer_ids,
        top_k=head.top_k,
        tokens=np.sum(tokens, axis=0) if len(tokens) == len(parts) else None,
        phase=common_phase(np.stack(phases), np.stack(tokens)) if known else None,
        domain=head.domain,
        n_ranks=ranks,
        meta=meta | ({"ranks": said} if said else {}) | ({"passes": f"{first}-{last}"} if first is not None else {}),
    )


def _joined(stages: Sequence[LoadTrace]) -> LoadTrace:
    """The layers of all stages; each stage computes all tokens.

    Raises:
        ValueError: layers that several have, or of different models or runs.
    """
    head = stages[0]
    layers = tuple(layer for stage in stages for layer in stage.layer_ids)
    twice = sorted({layer for layer in layers if layers.count(layer) > 1})
    shapes = sorted({(stage.n_steps, stage.n_experts) for stage in stages})
    if twice or len(shapes) != 1:
        what = f"layers {twice} are in several dumps that have other layers too" if twice else f"steps and experts differ: {shapes}"
        raise ValueError(f"merge: {what}; they are not of the stages of one run, or not of one model")
    if any(stage.tokens is not None and head.tokens is not None and (stage.tokens != head.tokens).any() for stage in stages):
        raise ValueError("merge: the stages computed different numbers of tokens; they are of different runs")
    return replace(head, counts=np.concatenate([stage.counts for stage in stages], axis=1), layer_ids=layers)


def summed(trace: LoadTrace) -> LoadTrace:
    """The whole trace as one step."""
    tokens = None if trace.tokens is None else trace.tokens.sum(keepdims=True)
    return LoadTrace(
        counts=trace.counts.sum(0, keepdims=True),
        layer_ids=trace.layer_ids,
        top_k=trace.top_k,
        tokens=tokens,
        n_ranks=trace.n_ranks,
        meta=trace.meta | {"summed_steps": str(trace.n_steps)},
    )


def _ranks(trace: LoadTrace) -> list[str]:
    """Ranks that a dump says it is of."""
    return [rank for rank in trace.meta.get("ranks", trace.meta.get("rank", "")).split(",") if rank]


def _check_apart(traces: Sequence[LoadTrace]) -> None:
    experts = sorted({trace.n_experts for trace in traces})
    if len(experts) != 1:
        raise ValueError(f"merge: the dumps have different numbers of experts, {experts}; they are not of one model")
    choices = sorted({trace.top_k for trace in traces if trace.top_k is not None})
    if len(choices) > 1:
        raise ValueError(f"merge: tokens of the dumps have different numbers of choices, top_k {choices}; they are not of one model")
    said = [rank for trace in traces for rank in _ranks(trace)]
    twice = sorted({rank for rank in said if said.count(rank) > 1})
    if twice:
        raise ValueError(f"merge: rank {', '.join(twice)} is there more than once; give one dump of each rank")
    busy = [trace for trace in traces if trace.counts.any()]
    if len(busy) > 1 and all(np.array_equal(trace.counts, busy[0].counts) for trace in busy[1:]):
        raise ValueError("merge: all dumps have the same counts: each has those of all ranks already; read one of them")


def _passes(trace: LoadTrace) -> tuple[int, int] | None:
    """First and last pass, if the dump says so and has all between."""
    first, _, last = trace.meta.get("passes", "").partition("-")
    if not (first.isdigit() and last.isdigit()) or int(last) - int(first) + 1 != trace.n_steps:
        return None
    return int(first), int(last)


def _common(traces: Sequence[LoadTrace]) -> tuple[int | None, int | None]:
    """First and last pass that all have; None if they do not say."""
    spans = [_passes(trace) for trace in traces]
    known = [span for span in spans if span is not None]
    if len(known) < len(spans):
        return None, None
    first, last = max(span[0] for span in known), min(span[1] for span in known)
    if first > last:
        raise ValueError(f"merge: no pass is in all dumps, which have passes {known}; they are of different runs")
    return first, last


def _between(trace: LoadTrace, first: int | None, last: int | None) -> LoadTrace:
    span = _passes(trace)
    if first is None or last is None or span is None:
        return trace
    return trace.select(np.arange(first - span[0], last - span[0] + 1))
