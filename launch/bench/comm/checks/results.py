"""What comes home: right sums, the same bits again, whatever the others do and whenever they do it."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from .....comm.dispatcher import Dispatcher
from .....comm.rows import rounded
from .arrivals import SIZES
from .inputs import exact, magnitude, make_tokens
from .party import Party, alone, answer, by_rank, dequantised, require, trip

_STEP = {"float32": 2.0**-23, "bfloat16": 2.0**-8}  # relative, between neighbours


def results(party: Party, thorough: bool = True) -> dict[str, Any]:
    """Every routing against fp64, and the bits of the plain sums: of one rank if deterministic, of ranks ascending if not."""
    record: dict[str, Any] = {}
    for deterministic in party.reach.sums:
        for dtype in party.reach.dtypes if thorough else party.reach.dtypes[:1]:
            dispatcher = party.make(party.spec(deterministic=deterministic, dtype=dtype))
            spec, worst = dispatcher.spec, 0.0
            for number, kind in enumerate(party.reach.kinds):
                size = list(SIZES.values())[number % len(SIZES)]
                tokens = party.here(make_tokens(party.rank, size(party.rank), spec, kind, 300 + number))
                out = trip(dispatcher, party.rank, tokens, party.layout(number))
                if len(out):
                    error = (out.double() - exact(*tokens)).abs() / magnitude(*tokens).clamp(min=1e-3)
                    worst = max(worst, float(error.max()))
                plain = alone(spec, tokens) if deterministic else by_rank(spec, tokens)
                if party.bits and (deterministic or not party.backend.endswith("_node")):
                    require(torch.equal(out, plain), "results have the bits of the plain sums", kind, deterministic, dtype)
            step = _STEP[dtype]
            require(worst <= 6 * step, "results are near fp64", worst, 6 * step, deterministic, dtype)
            record[f"error_{dtype}{'_deterministic' if deterministic else ''}"] = worst
            dispatcher.close()
    return record


def identity(party: Party) -> dict[str, Any]:
    """Experts that change nothing, and weights that are powers of two and add up to one: the tokens come back bit for bit."""
    for dtype in party.reach.dtypes:
        dispatcher = party.make(party.spec(top_k=4, dtype=dtype))
        x, ids, _ = party.here(make_tokens(party.rank, 20, dispatcher.spec, "random", 1))
        routed = dispatcher.dispatch(x, ids, torch.full((20, 4), 0.25, device=x.device))
        require(torch.equal(dispatcher.combine(dequantised(routed, dispatcher.spec), routed), x), "identity experts give x", dtype)
        x, ids, weights = party.here(make_tokens(party.rank, 20, dispatcher.spec, "with_none", 2))
        routed = dispatcher.dispatch(x, ids, weights)
        out = dispatcher.combine(dequantised(routed, dispatcher.spec), routed).double()
        total = torch.where(ids >= 0, weights, 0).double().sum(dim=1, keepdim=True)
        bound = (2.0**-7 if dtype == "bfloat16" else 2.0**-21) * x.double().abs() * total
        require(bool(((out - x.double() * total).abs() <= bound).all()), "identity experts give x times its valid weights", dtype)
        dispatcher.close()
    return {}


def repeats(party: Party) -> dict[str, Any]:
    """The same again has the same bits; other rows, their order and their values change no bit of a row."""
    for deterministic in party.reach.sums:
        dispatcher = party.make(party.spec(deterministic=deterministic, hidden=129))
        n = dispatcher.spec.max_tokens
        x, ids, weights = party.here(make_tokens(party.rank, n, dispatcher.spec, "with_none", 2))
        want = trip(dispatcher, party.rank, (x, ids, weights))
        require(torch.equal(trip(dispatcher, party.rank, (x, ids, weights)), want), "the same again has the same bits")
        order = torch.randperm(n, generator=torch.Generator().manual_seed(party.rank)).to(party.device)
        shuffled = trip(dispatcher, party.rank, (x[order], ids[order], weights[order]))
        require(torch.equal(shuffled, want[order]), "the order of rows changes no bit of a row")
        start = 3 + party.rank % 3
        part = trip(dispatcher, party.rank, (x[start:10], ids[start:10], weights[start:10]))
        require(torch.equal(part, want[start:10]), "fewer rows change no bit of a row")
        spoilt = x.clone()
        spoilt[::2] = float("nan")
        require(torch.equal(trip(dispatcher, party.rank, (spoilt, ids, weights))[1::2], want[1::2]), "NaN stays in its own rows")
        dispatcher.close()
    return {}


def padding(party: Party) -> dict[str, Any]:
    """Rows from n_valid on, whatever they hold, change nothing and come back as zeros; in every layout."""
    for deterministic in party.reach.sums:
        dispatcher = party.make(party.spec(deterministic=deterministic))
        for number, layout in enumerate(party.reach.layouts):
            n = (3 * party.rank + number) % 9
            x, ids, weights = party.here(make_tokens(party.rank, 12, dispatcher.spec, "with_none", 40 + number))
            x[n:], weights[n:] = float("nan"), float("nan")
            count = torch.tensor([n], dtype=torch.int32, device=party.device)
            out = trip(dispatcher, party.rank, (x, ids, weights), layout, n_valid=count)
            require(not out[n:].any() and bool(torch.isfinite(out).all()), "padding comes back as zeros", layout, n)
            want = trip(dispatcher, party.rank, (x[:n], ids[:n], weights[:n]), layout)
            require(torch.equal(out[:n], want), "padding changes no bit of a valid row", layout, n)
            filled = torch.full_like(out, float("nan"))
            routed = dispatcher.dispatch(x, ids, weights, count, layout=layout)
            y, index = answer(routed, dispatcher.spec, party.rank)
            back = dispatcher.combine_recv(dispatcher.combine_send(y, routed, index=index), filled)
            require(back is filled and torch.equal(filled, out), "every row of out is written", layout)
        dispatcher.close()
    return {}


def overlap(party: Party, share: int = 1) -> dict[str, Any]:
    """Two dispatches on their way, in every legal order of their halves, have the bits of one after the other; a third is refused.

    Every ``share``-th order is tried.
    """
    orders = 0
    for deterministic in party.reach.sums:
        dispatcher = party.make(party.spec(deterministic=deterministic))
        a, b = (party.here(make_tokens(party.rank, 5 + n, dispatcher.spec, "random", 900 + n)) for n in (0, 3))
        want = [trip(dispatcher, party.rank, a), trip(dispatcher, party.rank, b)]
        for order in _interleavings()[::share]:
            got = _run_order(dispatcher, party.rank, [a, b], order)
            require(all(torch.equal(g, w) for g, w in zip(got, want, strict=True)), "interleaved halves change no bit", order)
            orders += 1
        tickets = [dispatcher.dispatch_send(*a) for _ in range(dispatcher.spec.depth)]
        try:
            dispatcher.dispatch_send(*a)
            raise AssertionError("a dispatch past EPSpec.depth must be refused")
        except RuntimeError as error:
            require("EPSpec.depth 2" in str(error), "the refusal names the depth", error)
        for ticket in tickets:
            routed = dispatcher.dispatch_recv(ticket)
            out = dispatcher.combine(answer(routed, dispatcher.spec, party.rank)[0], routed)
            require(torch.equal(out, want[0]), "a refused dispatch harms none that are on their way")
        dispatcher.close()
    return {"orders": orders}


def _interleavings() -> list[tuple[int, ...]]:
    """Orders of the four halves of flights 0 and 1 that begin with 0."""
    found: list[tuple[int, ...]] = []

    def extend(done: tuple[int, ...]) -> None:
        if len(done) == 8:
            found.append(done)
        for flight in (0, 1):
            if len(done) < 8 and done.count(flight) < 4:
                extend((*done, flight))

    extend((0,))
    return found


def _run_order(dispatcher: Dispatcher, rank: int, tokens: list[Any], order: tuple[int, ...]) -> list[torch.Tensor]:
    state: list[Any] = [None, None]
    step = [0, 0]
    for flight in order:
        if step[flight] == 0:
            state[flight] = dispatcher.dispatch_send(*tokens[flight])
        elif step[flight] == 1:
            state[flight] = dispatcher.dispatch_recv(state[flight])
        elif step[flight] == 2:
            state[flight] = dispatcher.combine_send(answer(state[flight], dispatcher.spec, rank)[0], state[flight])
        else:
            state[flight] = dispatcher.combine_recv(state[flight])
        step[flight] += 1
    return state


def alternation(party: Party) -> dict[str, Any]:
    """Calls of many and of few tokens, with and without a capacity, follow each other without anything in between."""
    dispatcher = party.make(party.spec(max_tokens=96))
    sizes = [96, 1, 40, 0, 3, 96]
    cases = [party.here(make_tokens(party.rank, n, dispatcher.spec, "with_none", n)) for n in sizes]
    first = [trip(dispatcher, party.rank, tokens) for tokens in cases]
    for turn in (1, 2):
        for number, tokens in enumerate(cases):
            more = {"capacity": max(sizes[number], 1)} if (number + turn) % 2 else {}
            out = trip(dispatcher, party.rank, tokens, party.layout(number + turn), **more)
            require(torch.equal(out, first[number]), "large and small calls alternate", number, turn)
    dispatcher.close()
    return {}


def delays(party: Party, rounds: int = 100) -> dict[str, Any]:
    """Ranks that come late, at seeded random times and halves, change no bit."""
    dispatcher = party.make(party.spec())
    tokens = party.here(make_tokens(party.rank, 9, dispatcher.spec, "with_none", 7))
    want = trip(dispatcher, party.rank, tokens)
    for number in range(rounds):
        rng = random.Random(1000 * number + party.rank)

        def late(rng: random.Random = rng) -> None:
            if rng.random() < 0.4:
                time.sleep(rng.random() * 0.004)

        late()
        ticket = dispatcher.dispatch_send(*tokens)
        late()
        routed = dispatcher.dispatch_recv(ticket)
        y = answer(routed, dispatcher.spec, party.rank)[0]
        late()
        back = dispatcher.combine_send(y, routed)
        late()
        require(torch.equal(dispatcher.combine_recv(back), want), "late ranks change no bit", number)
    dispatcher.close()
    return {"rounds": rounds}


def rounding(party: Party) -> dict[str, Any]:
    """FP8 payloads: the results are those of the quantised tokens, so that the way adds no error of its own."""
    worst = 0.0
    for payload in ("fp8", "fp8_ue8m0"):
        dispatcher = party.make(party.spec(payload=payload, hidden=300))
        tokens = party.here(make_tokens(party.rank, 9, dispatcher.spec, "random", 8))
        quantised = (rounded(dispatcher.spec, tokens[0]), *tokens[1:])
        out = trip(dispatcher, party.rank, tokens, "contiguous")
        error = (out.double() - exact(*quantised)).abs() / magnitude(*quantised).clamp(min=1e-3)
        worst = max(worst, float(error.max()))
        dispatcher.close()
    require(worst <= 6 * _STEP[dispatcher.spec.dtype], "FP8 transport adds no error", worst)
    return {"error": worst}
