"""The conformance checks of ``bench comm --check`` over the stand-in for deep_ep, between real ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rorqual.comm.deep_ep.elastic import ElasticDispatcher
from rorqual.comm.deep_ep.limits import low_latency_tokens
from rorqual.comm.deep_ep.low_latency import LowLatencyDispatcher
from rorqual.comm.dispatcher import EPSpec
from rorqual.launch.bench.comm.checks import applicable, run
from rorqual.launch.bench.comm.checks.grids import over_grid
from rorqual.parallel.grid import Grid, GridSpec
from tests.comm.deep_ep import fake
from tests.comm.routing import make_tokens
from tests.ranks import run_ranks

#: what such a backend is asked; the others need something that the library does not tell
ASKED = {
    "deep_ep": {"arrivals", "payloads", "shapes", "results", "identity", "repeats", "padding", "overlap", "alternation", "delays"},
    "deep_ep_ll": {"results", "identity", "repeats", "padding", "overlap", "alternation", "delays"},
}
ALWAYS = {"rounding", "graphs", "busy", "refusals", "disagreement"}


def checks(world: int, backend: str) -> list[str]:
    """The checks that ran on this rank."""
    grid = Grid.create(GridSpec(dp=world), torch.device("cpu"), 60.0)
    make = ElasticDispatcher if backend == "deep_ep" else LowLatencyDispatcher
    party = replace(over_grid(grid, backend), make=lambda spec: make(grid.ep, spec, library=fake))
    done = run(party, applicable(party, fault_mask=False, brief=True))
    grid.close()
    return list(done)


@pytest.mark.parametrize("backend", ASKED)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks(world: int, backend: str) -> None:
    found = run_ranks(checks, world, world, backend, timeout=200.0)
    assert [set(names) for names in found] == [ASKED[backend] | ALWAYS] * world


def repeated(world: int) -> list[bool]:
    """Whether a slot that a token names twice has both weights, by the library."""
    grid, good = Grid.create(GridSpec(dp=world), torch.device("cpu"), 60.0), []
    for make, hidden in ((ElasticDispatcher, 256), (LowLatencyDispatcher, 2048)):
        spec = EPSpec(n_ranks=world, n_slots=4 * world, hidden=hidden, top_k=3, max_tokens=5, dtype="bfloat16")
        dispatcher = make(grid.ep, spec, library=fake)
        x, ids, _ = make_tokens(grid.ep.index, 5, spec, "repeated", 4)
        weights = torch.tensor([0.125, 0.375, 0.5]).expand(5, 3)
        assert bool((ids[:, 0] == ids[:, 1]).all())
        routed = dispatcher.dispatch(x, ids, weights, layout="masked")
        good.append(torch.equal(dispatcher.combine(routed.x, routed), x))
        dispatcher.close()
    grid.close()
    return good


def test_a_slot_that_is_named_twice_counts_with_both_weights() -> None:
    assert run_ranks(repeated, 2, 2, timeout=60.0) == [[True, True]] * 2


@pytest.mark.parametrize(("ranks", "tokens", "most"), [(2, 7, 8), (3, 7, 8), (4, 7, 7), (8, 1, 1), (6, 5, 6), (1, 9, 12)])
def test_rows_of_a_slot_can_be_laid_out(ranks: int, tokens: int, most: int) -> None:
    spec = EPSpec(n_ranks=ranks, n_slots=4 * ranks, hidden=2048, top_k=3, max_tokens=tokens, dtype="bfloat16")
    assert low_latency_tokens(spec) == most and ranks * most % 4 == 0
    assert low_latency_tokens(spec, 11, down=True) * ranks % 4 == 0 and 8 <= low_latency_tokens(spec, 11, down=True) <= 11
