"""What arrives: every wanted row once, bit for bit, in every layout, with counts that are the histogram of the ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .....comm.dispatcher import EPSpec, Routed
from .....comm.fp8 import dequantise, quantise
from .....comm.rows import is_fp8, rounded
from .inputs import make_tokens
from .party import Party, Tokens, answer, dequantised, require

#: tokens per rank: usual, unequal, none on some ranks, none at all, the most there may be
SIZES: dict[str, Callable[[int], int]] = {
    "equal": lambda rank: 7,
    "unequal": lambda rank: (5 * rank + 3) % 11,
    "some_empty": lambda rank: 6 if rank % 2 else 0,
    "only_first": lambda rank: 0 if rank else 9,
    "none": lambda rank: 0,
    "full": lambda rank: 24,
}


def wanted(slot: int, everybody: list[Tokens]) -> list[tuple[int, int, int]]:
    """(source rank, token, column) of every choice of a global slot, by rank, token and column."""
    return [(r, int(t), int(c)) for r, (_, ids, _) in enumerate(everybody) for t, c in (ids == slot).nonzero().tolist()]


def check_routed(routed: Routed, spec: EPSpec, rank: int, everybody: list[Tokens], origins: bool = True) -> None:
    """Exactly the rows that name this rank's slots, in the order of the layout, with what belongs to them."""
    sent = [(rounded(spec, x), w) for x, _, w in everybody]
    first = rank * spec.slots_per_rank
    x, weights = dequantised(routed, spec).cpu(), None if routed.weights is None else routed.weights.cpu()
    if spec.payload == "bytes":
        x = routed.x.cpu()
    if routed.layout == "rank":
        _check_rank_layout(routed, x, spec, first, everybody, sent)
        return
    assert weights is not None and routed.offsets is not None and routed.sources is not None
    counts, offsets, sources = routed.host_counts(), routed.offsets.tolist(), routed.sources.cpu()
    flat = [t.reshape(-1, *t.shape[2:]) if routed.layout == "masked" else t for t in (x, weights, sources)]
    x, weights, sources = flat
    for slot in range(spec.slots_per_rank):
        want = wanted(first + slot, everybody)
        if routed.layout == "masked":  # a token is there once, however often it names the slot
            want = list({(r, t): (r, t, c) for r, t, c in reversed(want)}.values())[::-1]
        require(counts[slot] == len(want), "counts are the histogram of the ids", slot, counts[slot], len(want))
        start = offsets[slot]
        if routed.layout == "contiguous":
            require(start % spec.alignment == 0, "slots start at multiples of the alignment", start)
            end = -(-(start + len(want)) // spec.alignment) * spec.alignment
            require(offsets[slot + 1] == end, "offsets hold the rows and no more than their padding", offsets[slot + 1], end)
            require(not x[start + len(want) : end].any(), "padding rows are zeros", slot)
        for place, (source, token, column) in enumerate(want, start):
            require(torch.equal(x[place], sent[source][0][token]), "rows arrive bit for bit", slot, source, token)
            if routed.layout == "contiguous":
                require(bool(weights[place] == sent[source][1][token, column]), "weights are matched to rows", slot, source, token)
            if origins:
                found = int(sources[place])
                require(found == source * spec.max_tokens + token, "sources name rank and token", found, source, token)


def _check_rank_layout(
    routed: Routed, x: torch.Tensor, spec: EPSpec, first: int, everybody: list[Tokens], sent: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Rows that somebody wants, by source and token; all others are holes."""
    assert routed.slots is not None and routed.shares is not None
    slots, shares = routed.slots.cpu(), routed.shares.cpu()
    there = (slots >= 0).any(dim=1)
    found = {}
    for row in there.nonzero().view(-1).tolist():
        at = row if routed.sources is None else int(routed.sources[row])
        height = len(slots) // spec.n_ranks if routed.sources is None else spec.max_tokens
        found[at // height, at % height] = row
    want: dict[tuple[int, int], dict[int, list[float]]] = {}
    for slot in range(spec.slots_per_rank):
        for r, t, c in wanted(first + slot, everybody):
            want.setdefault((r, t), {}).setdefault(slot, []).append(float(everybody[r][2][t, c]))
    require(found.keys() == want.keys(), "rows are there exactly if wanted", sorted(found), sorted(want))
    for (source, token), row in found.items():
        require(torch.equal(x[row], sent[source][0][token]), "rows arrive bit for bit", source, token)
        have: dict[int, list[float]] = {}
        for slot, share in zip(slots[row].tolist(), shares[row].tolist(), strict=True):
            if slot >= 0:
                have.setdefault(slot, []).append(share)
            else:
                require(share == 0 or routed.sources is not None, "holes have no share", source, token, share)
        same = {s: sorted(v) for s, v in have.items()} == {s: sorted(v) for s, v in want[source, token].items()}
        require(same, "slots and shares of a row are those that were sent", source, token, have, want[source, token])


def arrivals(party: Party, thorough: bool = True) -> dict[str, Any]:
    """Every routing and size; ids int32 and int64 by turns; layouts by turns."""
    usual, more = ("random", "with_none"), tuple(SIZES) if thorough else ("some_empty", "full")
    cases = [(k, s) for k in party.reach.kinds for s in SIZES if s == "equal" or (k in usual and s in more)]
    dispatchers = {a: party.make(party.spec(alignment=a)) for a in ((1, 128) if thorough else (1,))}
    for number, (kind, size) in enumerate(cases):
        for alignment, dispatcher in dispatchers.items():
            spec, layout = dispatcher.spec, party.layout(number + alignment)
            everybody = [make_tokens(r, SIZES[size](r), spec, kind, number) for r in range(party.size)]
            x, ids, weights = party.here(everybody[party.rank])
            capacity = max(max(SIZES[size](r) for r in range(party.size)), 1) if number % 3 == 2 else None
            routed = dispatcher.dispatch(x, ids.int() if number % 2 else ids, weights, layout=layout, capacity=capacity)
            check_routed(routed, spec, party.rank, everybody)
            y, index = answer(routed, spec, party.rank)
            out = dispatcher.combine(y, routed, index=index)
            require(out.shape == x.shape and out.dtype == x.dtype and out.device == x.device, "results have x's shape", kind, size)
    for dispatcher in dispatchers.values():
        dispatcher.close()
    return {"cases": len(cases)}


def payloads(party: Party) -> dict[str, Any]:
    """bf16, FP8 with either scales, tokens that come quantised, and bytes; scales stay with their rows in every layout."""
    worst = 0.0
    wide = {"dtype": "bfloat16", "hidden": 300}
    variants: list[dict[str, Any]] = [
        {"dtype": "bfloat16"}, {"payload": "bf16", "hidden": 41}, {"payload": "fp8"}, {"payload": "fp8", **wide},
        {"payload": "fp8_ue8m0", **wide}, {"payload": "bytes", "hidden": 53},
    ]  # fmt: skip
    if not party.reach.raw:
        variants.pop()
    for number, changes in enumerate(variants):
        dispatcher = party.make(party.spec(**changes))
        spec = dispatcher.spec
        for layout in party.reach.layouts:
            everybody = [make_tokens(r, 6, spec, "with_none", 70 + number) for r in range(party.size)]
            x, ids, weights = party.here(everybody[party.rank])
            scales = None
            if is_fp8(spec) and layout == "rank":
                x, scales = quantise(x, ue8m0=spec.payload == "fp8_ue8m0")
            routed = dispatcher.dispatch(x, ids, weights, layout=layout, scales=scales)
            check_routed(routed, spec, party.rank, everybody)
            if routed.scales is not None and spec.payload == "fp8_ue8m0":
                there = routed.scales[routed.scales > 0]
                require(bool((torch.frexp(there).mantissa == 0.5).all()) or layout == "rank", "ue8m0 scales are powers of two", layout)
            y, index = answer(routed, spec, party.rank) if spec.payload != "bytes" else (_nothing(routed, spec), None)
            dispatcher.combine(y, routed, index=index)
        if is_fp8(spec):
            worst = max(worst, _fp8_error(spec, everybody[party.rank][0]))
        dispatcher.close()
    require(worst <= 1 / 16 + 1e-6, "FP8 rounds by at most half a step", worst)
    return {"fp8_error": worst}


def _nothing(routed: Routed, spec: EPSpec) -> torch.Tensor:
    return torch.zeros(routed.x.shape, dtype=getattr(torch, spec.dtype), device=routed.x.device)


def _fp8_error(spec: EPSpec, x: torch.Tensor) -> float:
    """Largest error of x's FP8 values, relative to the value or to the step near zero."""
    values, scales = quantise(x, ue8m0=spec.payload == "fp8_ue8m0")
    back = dequantise(values, scales, torch.float32)
    step = scales.repeat_interleave(128, dim=1)[:, : spec.hidden] / 64  # least normal value
    error = (back - x.float()).abs() / torch.maximum(x.float().abs(), step)
    return float(error.max()) if error.numel() else 0.0


def shapes(party: Party, hiddens: tuple[int, ...] = (64, 2048, 3584, 7168), ks: tuple[int, ...] = (1, 6, 8, 16)) -> dict[str, Any]:
    """Widths and numbers of choices; int32 and int64 ids give the same bits."""
    for hidden, top_k in zip(hiddens, ks, strict=True):
        dispatcher = party.make(party.spec(hidden=hidden, top_k=top_k, max_tokens=5, n_slots=8 * party.size))
        everybody = [make_tokens(r, (r + 2) % 5, dispatcher.spec, "random", hidden) for r in range(party.size)]
        x, ids, weights = party.here(everybody[party.rank])
        outs = []
        for kind in (torch.int32, torch.int64):
            routed = dispatcher.dispatch(x, ids.to(kind), weights)
            check_routed(routed, dispatcher.spec, party.rank, everybody)
            outs.append(dispatcher.combine(answer(routed, dispatcher.spec, party.rank)[0], routed))
        require(torch.equal(outs[0], outs[1]), "ids of 32 and 64 bits give the same results", hidden, top_k)
        dispatcher.close()
    return {}
