"""What every backend must do, on 1, 2, 3, 4 and 8 ranks: one start of processes runs all checks of a world size."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rorqual.comm.dispatcher import Dispatcher, EPSpec
from rorqual.comm.fp8 import dequantise, quantise
from rorqual.comm.local import LocalDispatcher
from rorqual.comm.rows import RowLayout
from rorqual.comm.torch_flat import TorchDispatcher
from rorqual.comm.torch_node import TorchNodeDispatcher
from rorqual.comm.torch_static import TorchStaticDispatcher
from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.group import Group
from tests.comm.routing import KINDS, exact, magnitude, make_tokens, run_experts, whole_trip
from tests.ranks import run_ranks

HIDDEN, TOP_K, MAX_TOKENS = 40, 3, 24
#: tokens per rank: usual, unequal, none on some ranks, none at all, the most there may be
SIZES: dict[str, Callable[[int], int]] = {
    "equal": lambda rank: 7,
    "unequal": lambda rank: (5 * rank + 3) % 11,
    "some_empty": lambda rank: 6 if rank % 2 else 0,
    "only_first": lambda rank: 0 if rank else 9,
    "none": lambda rank: 0,
    "full": lambda rank: MAX_TOKENS,
}


def make_spec(world: int, **changes: Any) -> EPSpec:
    return replace(EPSpec(n_ranks=world, n_slots=4 * world, hidden=HIDDEN, top_k=TOP_K, max_tokens=MAX_TOKENS), **changes)


def build(backend: str, group: Group, spec: EPSpec, node_of: tuple[int, ...]) -> Dispatcher:
    if backend == "torch_node":
        return TorchNodeDispatcher(group, spec, node_of)
    return TorchStaticDispatcher(group, spec) if backend == "torch_static" else TorchDispatcher(group, spec)


def local_result(spec: EPSpec, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same tokens with all experts on one rank."""
    alone = LocalDispatcher(replace(spec, n_ranks=1))
    return whole_trip(alone, 0, x, ids, weights)


def check_arrivals(routed: Any, spec: EPSpec, rank: int, all_tokens: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    """Exactly the rows that name this rank's slots, by (slot, source rank, token, column), values and weights bit-equal."""
    rows, weights, counts = [], [], []
    for slot in range(rank * spec.slots_per_rank, (rank + 1) * spec.slots_per_rank):
        before = len(rows)
        for x, ids, w in all_tokens:
            for token, column in (ids == slot).nonzero().tolist():
                rows.append(x[token])
                weights.append(w[token, column])
        counts.append(len(rows) - before)
    assert routed.counts.tolist() == counts and routed.counts.dtype == torch.int64 and routed.counts.device.type == "cpu"
    assert torch.equal(routed.x, torch.stack(rows) if rows else torch.empty(0, spec.hidden, dtype=routed.x.dtype))
    assert torch.equal(routed.weights, torch.stack(weights) if weights else torch.empty(0))
    assert routed.weights.dtype == torch.float32 and routed.x.is_contiguous()


def conform(dispatchers: dict[bool, Dispatcher], grid: Grid, seed: int) -> None:
    """Arrivals and results of every routing and size, deterministic (bits of one rank) and not (1e-6)."""
    rank, world = grid.ep.index, grid.ep.size
    cases = [(k, s) for k in KINDS for s in SIZES if s in ("equal", "some_empty") or k in ("random", "with_none")]
    for number, (kind, sizes) in enumerate(cases):
        for deterministic, dispatcher in dispatchers.items():
            spec = dispatcher.spec
            tokens = [make_tokens(r, SIZES[sizes](r), spec, kind, 100 * seed + number) for r in range(world)]
            x, ids, weights = tokens[rank]
            if number % 2:
                ids = ids.to(torch.int32)
            routed = dispatcher.dispatch(x, ids, weights)
            check_arrivals(routed, spec, rank, tokens)
            out = dispatcher.combine(run_experts(routed.x, routed.counts, spec, rank), routed)
            assert out.shape == x.shape and out.dtype == x.dtype, (kind, sizes)
            assert (out.double() - exact(x, ids, weights)).abs().max().item() < 1e-6 if len(x) else True, (kind, sizes)
            if deterministic:
                assert torch.equal(out, local_result(spec, x, ids, weights)), (kind, sizes, "bits")


def overlap(dispatcher: Dispatcher, grid: Grid) -> None:
    """Two micro-batches in flight, in every legal order of their halves, give the bits of one after the other."""
    rank, spec = grid.ep.index, dispatcher.spec
    a, b = (make_tokens(rank, 5 + n, spec, "random", 900 + n) for n in (0, 3))
    want_a, want_b = whole_trip(dispatcher, rank, *a), whole_trip(dispatcher, rank, *b)
    ticket_a, ticket_b = dispatcher.dispatch_send(*a), dispatcher.dispatch_send(*b)
    routed_a, routed_b = dispatcher.dispatch_recv(ticket_a), dispatcher.dispatch_recv(ticket_b)
    back_a = dispatcher.combine_send(run_experts(routed_a.x, routed_a.counts, spec, rank), routed_a)
    back_b = dispatcher.combine_send(run_experts(routed_b.x, routed_b.counts, spec, rank), routed_b)
    assert torch.equal(dispatcher.combine_recv(back_a), want_a) and torch.equal(dispatcher.combine_recv(back_b), want_b)
    ticket_a = dispatcher.dispatch_send(*a)
    routed_a = dispatcher.dispatch_recv(ticket_a)
    ticket_b = dispatcher.dispatch_send(*b)
    back_a = dispatcher.combine_send(run_experts(routed_a.x, routed_a.counts, spec, rank), routed_a)
    routed_b = dispatcher.dispatch_recv(ticket_b)
    back_b = dispatcher.combine_send(run_experts(routed_b.x, routed_b.counts, spec, rank), routed_b)
    assert torch.equal(dispatcher.combine_recv(back_b), want_b) and torch.equal(dispatcher.combine_recv(back_a), want_a)


def traffic(backend: str, group: Group, spec: EPSpec, node_of: tuple[int, ...]) -> None:
    """bytes_sent equals the formula: a row per (token, rank), or per (token, node) and then per (token, rank) in the node."""
    dispatcher, rank, world = build(backend, group, spec, node_of), group.index, group.size
    tokens = [make_tokens(r, SIZES["unequal"](r), spec, "with_none", 77) for r in range(world)]
    whole_trip(dispatcher, rank, *tokens[rank])
    row, result = RowLayout(spec=spec).row_bytes, spec.hidden * getattr(torch, spec.dtype).itemsize
    want = [0] * world

    def pay(src: int, dst: int, rows: int, results: int) -> None:
        """src sent rows to dst; dst sent results back."""
        if src == rank != dst:
            want[dst] += rows * row
        if dst == rank != src:
            want[src] += results * result

    for src, (x, ids, _) in enumerate(tokens):
        homes = torch.where(ids >= 0, ids // spec.slots_per_rank, -1)
        for token in range(len(x) if backend != "torch_static" else 0):
            chosen = [r for r in homes[token].tolist() if r >= 0]
            if backend == "torch":
                for dst in set(chosen):
                    pay(src, dst, 1, chosen.count(dst) if spec.deterministic else 1)
                continue
            place = [r for r in range(world) if node_of[r] == node_of[src]].index(src)
            for node in {node_of[r] for r in chosen}:
                inside = [r for r in chosen if node_of[r] == node]
                forwarder = [r for r in range(world) if node_of[r] == node][place]
                pay(src, forwarder, 1, len(inside) if spec.deterministic else 1)
                for dst in set(inside):
                    pay(forwarder, dst, 1, inside.count(dst) if spec.deterministic else 1)
    if backend == "torch_static":
        each = spec.max_tokens * (row + result * (spec.top_k if spec.deterministic else 1))
        want = [0 if r == rank else each for r in range(world)]
    assert dispatcher.bytes_sent() == want, (backend, dispatcher.bytes_sent(), want)


def other_payloads(backend: str, group: Group, spec: EPSpec, node_of: tuple[int, ...]) -> None:
    """bf16 tokens, bf16 and FP8 payloads: what arrives is the quantiser's value, bit for bit; results equal one rank's bits."""
    rank = group.index
    fp8_wide = {"payload": "fp8", "dtype": "bfloat16", "hidden": 300}
    for changes in ({"dtype": "bfloat16"}, {"payload": "bf16", "hidden": 41}, {"payload": "fp8"}, fp8_wide):
        for deterministic in (True, False):
            chosen = replace(spec, deterministic=deterministic, **changes)
            dispatcher = build(backend, group, chosen, node_of)
            tokens = [make_tokens(r, 6, chosen, "with_none", 55) for r in range(group.size)]
            x, ids, weights = tokens[rank]
            routed = dispatcher.dispatch(x, ids, weights)
            if chosen.payload == "fp8":
                tokens = [(dequantise(*quantise(x), x.dtype), ids, w) for x, ids, w in tokens]
            elif chosen.payload == "bf16":
                tokens = [(x.bfloat16().to(x.dtype), ids, w) for x, ids, w in tokens]
            check_arrivals(routed, chosen, rank, tokens)
            out = dispatcher.combine(run_experts(routed.x, routed.counts, chosen, rank), routed)
            alone = local_result(chosen, x, ids, weights)
            if deterministic:
                assert torch.equal(out, alone), (backend, changes)
            else:
                step = 2.0**-8 if chosen.dtype == "bfloat16" else 2.0**-23
                bound = 4 * step * magnitude(tokens[rank][0], ids, weights)  # roundings: rank's sum, node's sum, the end, twice
                assert bool(((out.double() - alone.double()).abs() <= bound).all()), (backend, changes)


def refusals(dispatcher: Dispatcher, grid: Grid) -> None:
    """Bad calls raise before anything is sent, on every rank, and the next call works."""
    spec, rank = dispatcher.spec, grid.ep.index
    x, ids, weights = make_tokens(rank, 4, spec, "random", 5)
    want = whole_trip(dispatcher, rank, x, ids, weights)
    many = make_tokens(rank, spec.max_tokens + 1, spec, "random", 5)
    with pytest.raises(ValueError, match=rf"{spec.max_tokens + 1} tokens, but the dispatcher was made for at most {spec.max_tokens}"):
        dispatcher.dispatch(*many)
    with pytest.raises(ValueError, match=rf"x must be \[T, {spec.hidden}\], found \[4, {spec.hidden - 1}\]"):
        dispatcher.dispatch(x[:, 1:], ids, weights)
    with pytest.raises(ValueError, match="x must be float32, found float16"):
        dispatcher.dispatch(x.half(), ids, weights)
    with pytest.raises(ValueError, match=rf"slot_ids must be \[4, {spec.top_k}\], found \[4, {spec.top_k - 1}\]"):
        dispatcher.dispatch(x, ids[:, 1:], weights)
    with pytest.raises(ValueError, match="slot_ids must be int32 or int64, found float32"):
        dispatcher.dispatch(x, ids.float(), weights)
    os.environ["RORQUAL_DEBUG"] = "1"
    try:
        with pytest.raises(ValueError, match=rf"slot ids must be -1 or 0..{spec.n_slots - 1}, found -1..{spec.n_slots}"):
            dispatcher.dispatch(x, torch.tensor([[-1, spec.n_slots, 0]] * 4), weights)
        assert torch.equal(whole_trip(dispatcher, rank, x, ids, weights), want)
    finally:
        del os.environ["RORQUAL_DEBUG"]
    routed = dispatcher.dispatch(x, ids, weights)
    y = run_experts(routed.x, routed.counts, spec, rank)
    with pytest.raises(ValueError, match=rf"combine: y must be \[{len(y)}, {spec.hidden}\], found \[{len(y) + 1}, {spec.hidden}\]"):
        dispatcher.combine(torch.cat([y, y.new_zeros(1, spec.hidden)]), routed)
    assert torch.equal(dispatcher.combine(y, routed), want)
    dispatcher.close()
    with pytest.raises(RuntimeError, match="dispatcher is closed"):
        dispatcher.dispatch(x, ids, weights)


def disagreement(backend: str, grid: Grid, node_of: tuple[int, ...]) -> None:
    """Specs that differ are refused on every rank."""
    group, first = grid.ep, grid.ep.index == 0
    with pytest.raises(ValueError, match="the ranks of the expert group disagree on max_tokens: 16 on rank 0, 32 on rank 1"):
        build(backend, group, make_spec(group.size, max_tokens=16 if first else 32), node_of)
    with pytest.raises(ValueError, match="disagree on payload: '(native|fp8)' on rank"):
        build(backend, group, make_spec(group.size, payload="native" if first else "fp8"), node_of)


def all_checks(world: int, plan: list[tuple[str, tuple[int, ...]]]) -> int:
    """Everything above, for backends with their node maps; returns the number of backends run."""
    grid = Grid.create(GridSpec(dp=world), torch.device("cpu"), 60.0)
    for seed, (backend, node_of) in enumerate(plan):
        spec = make_spec(world)
        dispatchers = {d: build(backend, grid.ep, replace(spec, deterministic=d), node_of) for d in (False, True)}
        conform(dispatchers, grid, seed)
        overlap(dispatchers[False], grid)
        overlap(dispatchers[True], grid)
        for deterministic in (False, True):
            traffic(backend, grid.ep, replace(spec, deterministic=deterministic), node_of)
        other_payloads(backend, grid.ep, spec, node_of)
        refusals(dispatchers[False], grid)
        if world > 1:
            disagreement(backend, grid, node_of)
    grid.close()
    return len(plan)


PLANS: dict[int, list[tuple[str, tuple[int, ...]]]] = {
    2: [("torch", (0, 0)), ("torch_node", (0, 1)), ("torch_static", (0, 0))],
    3: [("torch", (0, 0, 0)), ("torch_node", (0, 1, 2))],
    4: [("torch", (0,) * 4), ("torch_node", (0, 0, 1, 1)), ("torch_node", (0, 1, 0, 1)), ("torch_static", (0,) * 4)],
    8: [("torch_node", (0, 0, 0, 0, 1, 1, 1, 1)), ("torch_node", (0, 0, 1, 1, 2, 2, 3, 3))],
}


@pytest.mark.parametrize("backend", ["torch", "torch_node", "torch_static"])
def test_one_rank(backend: str) -> None:
    assert all_checks(1, [(backend, (0,))]) == 1


@pytest.mark.parametrize("world", PLANS)
def test_ranks(world: int) -> None:
    assert run_ranks(all_checks, world, world, PLANS[world], timeout=150.0) == [len(PLANS[world])] * world


def test_local_arrivals_and_results() -> None:
    for deterministic in (False, True):
        spec = make_spec(1, deterministic=deterministic)
        conform({deterministic: LocalDispatcher(spec)}, Grid.single(torch.device("cpu")), 3)
        refusals(LocalDispatcher(spec), Grid.single(torch.device("cpu")))


def test_weights_that_are_powers_of_two_are_exact() -> None:
    spec = make_spec(1, top_k=2)
    x, ids, _ = make_tokens(0, 20, spec, "random", 1)
    dispatcher = LocalDispatcher(spec)
    routed = dispatcher.dispatch(x, ids, torch.full((20, 2), 0.5))
    assert torch.equal(dispatcher.combine(routed.x, routed), x)


def test_other_tokens_change_no_bit_of_a_token() -> None:
    spec = make_spec(1, n_slots=8, hidden=129)
    x, ids, weights = make_tokens(0, MAX_TOKENS, spec, "random", 2)
    whole = whole_trip(LocalDispatcher(spec), 0, x, ids, weights)
    for start, stop in ((0, 1), (3, 10), (MAX_TOKENS - 1, MAX_TOKENS)):
        part = whole_trip(LocalDispatcher(spec), 0, x[start:stop], ids[start:stop], weights[start:stop])
        assert torch.equal(part, whole[start:stop])
    holes = ids.clone()
    holes[::2] = -1
    assert torch.equal(whole_trip(LocalDispatcher(spec), 0, x, holes, weights)[1::2], whole[1::2])


def test_not_a_number_stays_in_its_token() -> None:
    spec = make_spec(1)
    x, ids, weights = make_tokens(0, 6, spec, "with_none", 2)
    x[2] = float("nan")
    out = whole_trip(LocalDispatcher(spec), 0, x, ids, weights)
    assert torch.isfinite(out[[0, 1, 3, 4, 5]]).all()
