"""What is suspicious about a load trace: parts that are missing, and counts that are not what they should be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..topology import Ints
from ..trace import LoadTrace

Kind = Literal[
    "empty", "physical", "one-rank", "multiple", "part", "padding", "layers-differ", "top-k", "zero-layers", "layer-gaps", "even"
]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that makes conclusions from a trace wrong."""

    kind: Kind  # for programs
    text: str  # what is wrong and what to do, for people


def problems(trace: LoadTrace, *, n_experts: int | None = None, top_k: int | None = None) -> list[Problem]:
    """Everything suspicious, worst first; empty for a good trace.

    Args:
        trace: as it was read.
        n_experts: logical experts of a layer of the model, where known.
        top_k: choices of a token, where the trace does not say.
    """
    total = trace.total
    if not total.any():
        return [Problem(kind="empty", text="No expert has a token: the recorder was off, or dumped before the first step.")]
    found: list[Problem] = []
    choices = trace.top_k or top_k
    found += _physical(trace, n_experts)
    one_rank = _one_rank(total)
    found += one_rank
    by_tokens = _against_tokens(trace, choices)
    found += by_tokens
    if not any(problem.kind == "multiple" for problem in by_tokens):
        found += _common_factor(trace)
    if not one_rank:
        found += _layers_differ(trace)
        found += _even(trace, choices)
    found += _top_k(trace, choices)
    found += _layers(trace)
    return found


def zero_layers(trace: LoadTrace) -> tuple[int, ...]:
    """Layer ids whose experts have no token in any step."""
    return tuple(layer for layer, row in zip(trace.layer_ids, trace.total, strict=True) if not row.any())


def drop_zero_layers(trace: LoadTrace) -> LoadTrace:
    """The trace without layers that have no load: dense layers, in dumps that number all layers of the model."""
    rows = np.flatnonzero(trace.total.any(1))
    return replace(trace, counts=trace.counts[:, rows], layer_ids=tuple(trace.layer_ids[row] for row in rows))


def _physical(trace: LoadTrace, n_experts: int | None) -> list[Problem]:
    if n_experts is None or trace.n_experts == n_experts:
        return []
    what = (
        "these are counts of physical slots, replicas apart: give the placement they were recorded under"
        if trace.n_experts > n_experts
        else "this is a trace of another model, or of one rank's experts only"
    )
    return [Problem(kind="physical", text=f"Counts are of {trace.n_experts} experts a layer and the model has {n_experts}: {what}.")]


def _one_rank(total: Ints) -> list[Problem]:
    """In every layer the same number of experts, at most half of them, has all of many tokens."""
    n_experts = total.shape[1]
    busy = total[total.any(1)]
    active = (busy > 0).sum(1)
    if len(set(active.tolist())) != 1 or active[0] > n_experts // 2 or busy.sum(1).min() < 20 * active[0]:
        return []
    columns = np.flatnonzero(busy.any(0))
    together = len(columns) == active[0] and columns[-1] - columns[0] + 1 == len(columns)
    where = f"{columns[0]} to {columns[-1]}" if together else f"{active[0]} in each layer"
    ranks = n_experts // int(active[0])
    text = f"Only experts {where} of {n_experts} have tokens: this is the dump of one rank of about {ranks}. Give the dumps of all ranks."
    return [Problem(kind="one-rank", text=text)]


def _against_tokens(trace: LoadTrace, top_k: int | None) -> list[Problem]:
    """Choices against tokens, where both are known: they are equal in every layer of every step."""
    if trace.tokens is None or top_k is None:
        return []
    sums = trace.counts.sum(2)
    busy = sums.any(0)
    due = trace.tokens * top_k
    stepped = due > 0
    if not stepped.any() or not busy.any():
        return []
    ratio = sums[stepped][:, busy] / due[stepped, None]
    if (ratio == 1.0).all():
        return []
    mean = float(ratio.mean())
    if np.ptp(ratio) == 0 and mean > 1 and mean == round(mean):
        text = (
            f"Counts are {mean:.0f} times tokens * top_k: each choice was counted {mean:.0f} times (dp or tp size?). Divide by {mean:.0f}."
        )
        return [Problem(kind="multiple", text=text)]
    if mean < 1:
        text = f"Counts are {mean:.3g} times tokens * top_k: choices are missing, of other ranks or of replicas that were not summed."
        return [Problem(kind="part", text=text)]
    return [Problem(kind="padding", text=f"Counts are up to {ratio.max():.3g} times tokens * top_k: padding or dummy tokens were counted.")]


def _common_factor(trace: LoadTrace) -> list[Problem]:
    """Real counts of many experts have no common divisor."""
    values = np.unique(trace.counts[trace.counts > 0])
    if len(values) < 16:
        return []
    factor = int(np.gcd.reduce(values))
    if factor == 1:
        return []
    text = f"Every count is a multiple of {factor}: each choice was counted {factor} times (dp or tp size?). Divide by {factor}."
    return [Problem(kind="multiple", text=text)]


def _layers_differ(trace: LoadTrace) -> list[Problem]:
    """All MoE layers of a step route the same tokens."""
    sums = trace.counts.sum(2)
    sums = sums[:, sums.any(0)]
    most, least = sums.max(1), sums.min(1)
    if (most == least).all():
        return []
    step = int(((most - least) / np.maximum(most, 1)).argmax())
    low, high = int(least[step]), int(most[step])
    text = (
        f"Layers of a step have different numbers of choices ({low} to {high} in step {step}): tokens are missing or padding was counted."
    )
    return [Problem(kind="layers-differ", text=text)]


def _even(trace: LoadTrace, top_k: int | None) -> list[Problem]:
    """Chance alone makes experts differ by the root of their load, unless tokens choose most of them anyway."""
    busy = trace.total[trace.total.any(1)]
    mean = busy.mean(1, keepdims=True)
    if trace.n_experts < max(8, 2 * (top_k or 0)) or mean.min() < 50 or (abs(busy - mean) > 0.5 * np.sqrt(mean) + 1).any():
        return []
    text = "All experts have the same load, more evenly than chance: routing was faked for a benchmark, this is not the model's."
    return [Problem(kind="even", text=text)]


def _top_k(trace: LoadTrace, top_k: int | None) -> list[Problem]:
    if top_k is None or trace.tokens is not None or not (trace.counts.sum(2) % top_k).any():
        return []
    text = f"Choices of a step are not a multiple of top_k {top_k}: some are missing, or were counted more often than others."
    return [Problem(kind="top-k", text=text)]


def _layers(trace: LoadTrace) -> list[Problem]:
    found: list[Problem] = []
    idle = zero_layers(trace)
    if idle:
        text = (
            f"Layers {_spans(idle)} have no tokens: dense layers, which may be dropped, or layers that the recorder does not see "
            "(hash-routed layers can be computed from the tokens)."
        )
        found.append(Problem(kind="zero-layers", text=text))
    ids = set(trace.layer_ids)
    gaps = tuple(layer for layer in range(min(ids), max(ids)) if layer not in ids)
    if gaps or len(ids) < len(trace.layer_ids):
        what = f"Layers {_spans(gaps)} are missing" if gaps else "Layer ids repeat"
        found.append(
            Problem(kind="layer-gaps", text=f"{what}: a placement made from this trace leaves them as they are, or shifts layers.")
        )
    return found


def _spans(numbers: tuple[int, ...]) -> str:
    """As in "0-2, 7"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)
