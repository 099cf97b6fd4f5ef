"""Tokens and experts over several ranks: every backend and every path gives what the plainest one does."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch

from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.heap.shm import ShmHeap
from rorqual.comm.local import LocalDispatcher
from rorqual.comm.peer import PeerDispatcher
from rorqual.comm.select import make_dispatcher
from rorqual.moe.config import MoEConfig
from rorqual.moe.exchange import ExpertExchange
from rorqual.moe.layer import MoE
from rorqual.moe.load import ExpertLoad
from rorqual.moe.ops import MoEOps
from rorqual.moe.placement import Placement
from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.group import Group
from tests.ranks import run_ranks

CONFIG = MoEConfig(hidden=64, intermediate=48, n_experts=8, top_k=3, n_group=4, topk_group=2, n_shared=1, routed_scaling_factor=2.5)
BATCH = 6


class Beside:
    """A track that says it is beside, so that calls come in the order they have on CUDA."""

    beside = True

    def run(self, body: Any) -> tuple[Any, None]:
        return body(), None

    def join(self, end: None) -> None:
        pass


def make_layer(grid: Grid) -> MoE:
    """The layer with this rank's experts; equal weights on every layout."""
    layer = MoE(CONFIG, 0, n_slots=CONFIG.n_experts // grid.ep.size, inner=CONFIG.intermediate)
    whole = MoE(CONFIG, 0, n_slots=CONFIG.n_experts, inner=CONFIG.intermediate)
    generator = torch.Generator().manual_seed(0)
    for (_, mine), (_, full) in zip(layer.named_parameters(), whole.named_parameters(), strict=True):
        values = torch.randn(full.shape, generator=generator) * full.shape[-1] ** -0.5
        lo = grid.ep.index * len(mine)
        mine.data = values if mine.shape == full.shape else values[lo : lo + len(mine)]
    return layer


def outputs(layer: MoE, x: torch.Tensor, real: int, way: str) -> list[list[float]]:
    """The layer's results for the first ``real`` tokens."""
    if way == "torch":
        return layer(x[:real]).tolist()
    layer.exchange.ops = MoEOps.load("torch")
    if way == "fused":
        return layer(x[:real], None, BATCH).tolist()
    if way == "padded":
        return layer(x, torch.tensor([real], dtype=torch.int32), BATCH)[:real].tolist()
    layer.exchange.track = Beside()  # in halves of which the second may be empty
    cut, half = (real + 1) // 2, BATCH // 2
    parts = [x[:cut], x[cut:real]]
    flights = [layer.begin(part, None, half) for part in parts]
    beside = [layer.compute(part, flight) for part, flight in zip(parts, flights, strict=True)]
    found = [layer.finish(flight, shared) for flight, shared in zip(flights, beside, strict=True)]
    return torch.cat(found).tolist()


def rank_outputs(valid: list[int], payload: str) -> dict[str, tuple[Any, Any]]:
    """This rank's outputs and counted load, by backend and way."""
    world = len(valid)
    grid = Grid.create(GridSpec(dp=world), torch.device("cpu"), 30.0)
    placement = Placement.identity(n_layers=1, n_experts=CONFIG.n_experts, n_ranks=world)
    spec = EPSpec(
        n_ranks=world, n_slots=CONFIG.n_experts, hidden=CONFIG.hidden, top_k=CONFIG.top_k, max_tokens=BATCH, payload=payload
    )  # fmt: skip
    x = torch.randn(BATCH, CONFIG.hidden, generator=torch.Generator().manual_seed(10 + grid.rank))
    found: dict[str, tuple[Any, Any]] = {}
    for name in ("torch", "torch_static", "shm"):
        dispatcher = PeerDispatcher(grid.ep, spec, ShmHeap(grid.ep)) if name == "shm" else make_dispatcher(name, grid, spec)
        for way in ("torch", "fused", "padded", "halves"):
            if way == "padded" and not dispatcher.caps.graph:
                continue
            layer, load = make_layer(grid), ExpertLoad(1, CONFIG.n_experts)
            layer.attach(ExpertExchange(dispatcher=dispatcher, tp=Group.solo("tp"), placement=placement, load=load, spread=True))
            found[f"{name} {way}"] = outputs(layer, x, valid[grid.rank], way), load.counts.tolist()
        dispatcher.close()
    grid.close()
    return found


@pytest.mark.parametrize(("valid", "payload"), [([6, 6], "native"), ([4, 0], "fp8"), ([1, 6, 3, 0], "native")])
def test_all_ways_give_the_same(valid, payload):
    for rank, found in enumerate(run_ranks(rank_outputs, len(valid), valid, payload)):
        expected, load = found["torch torch"]
        assert len(found) == 11 and len(expected) == valid[rank]
        for way, (got, counted) in found.items():
            torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=2e-6, rtol=2e-6, msg=lambda m, w=way: f"{w}: {m}")
            assert counted == load, way


def many_tokens() -> float:
    """Largest difference where outputs are summed some tokens at a time."""
    from rorqual.moe import ranked

    grid = Grid.create(GridSpec(dp=int(os.environ["WORLD_SIZE"])), torch.device("cpu"), 30.0)
    placement = Placement.identity(n_layers=1, n_experts=CONFIG.n_experts, n_ranks=grid.ep.size)
    spec = EPSpec(n_ranks=grid.ep.size, n_slots=CONFIG.n_experts, hidden=CONFIG.hidden, top_k=CONFIG.top_k, max_tokens=30)
    layer, dispatcher = make_layer(grid), make_dispatcher("torch_static", grid, spec)
    load = ExpertLoad(1, CONFIG.n_experts)
    layer.attach(ExpertExchange(dispatcher=dispatcher, tp=Group.solo("tp"), placement=placement, load=load, spread=True))
    layer.exchange.ops = MoEOps.load("torch")
    x = torch.randn(29, CONFIG.hidden)
    whole = layer(x)
    ranked._MOST_CHOICES = 40
    difference = float((layer(x) - whole).abs().max())
    grid.close()
    return difference


def test_many_tokens_are_computed_some_at_a_time():
    assert max(run_ranks(many_tokens, 2)) < 2e-6


class Late(Beside):
    """A track whose results are NaN until they are joined, with a log of its own and of the exchange's parts."""

    def __init__(self, exchange: ExpertExchange, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        for part in ("begin", "compute"):
            monkeypatch.setattr(exchange, part, partial(self._noted, part, getattr(exchange, part)))

    def _noted(self, part: str, real: Any, *arguments: Any) -> Any:
        self.log.append(part)
        return real(*arguments)

    def run(self, body: Any) -> tuple[Any, Any]:
        self.log.append("run")
        result = body()
        if not isinstance(result, torch.Tensor):  # of tokens that travel
            return result, None
        late = torch.full_like(result, float("nan"))
        return late, (late, result)

    def join(self, end: Any) -> None:
        self.log.append("join")
        if end is not None:
            end[0].copy_(end[1])


def make_lone_layer(payload: str = "native") -> MoE:
    """The layer of a rank that has all experts."""
    spec = EPSpec(n_ranks=1, n_slots=CONFIG.n_experts, hidden=CONFIG.hidden, top_k=CONFIG.top_k, max_tokens=32, payload=payload)
    placement, load = Placement.identity(n_layers=1, n_experts=CONFIG.n_experts, n_ranks=1), ExpertLoad(1, CONFIG.n_experts)
    layer = MoE(CONFIG, 0, n_slots=CONFIG.n_experts, inner=CONFIG.intermediate)
    for values in layer.parameters():
        values.data = torch.randn(values.shape) * values.shape[-1] ** -0.5
    exchange = ExpertExchange(dispatcher=LocalDispatcher(spec), tp=Group.solo("tp"), placement=placement, load=load, spread=False)
    exchange.ops = MoEOps.load("torch")
    layer.attach(exchange)
    return layer


@pytest.mark.parametrize(("tokens", "payload", "aside"), [(1, "native", True), (16, "native", True), (17, "native", False),
                                                          (0, "native", False), (6, "fp8", False)])  # fmt: skip
def test_the_shared_expert_runs_beside_the_routing_of_few_tokens(tokens, payload, aside, monkeypatch):
    layer, x = make_lone_layer(payload), torch.randn(tokens, CONFIG.hidden)
    expected = layer(x)
    track = Late(layer.exchange, monkeypatch)
    layer.exchange.track = track
    assert torch.equal(layer(x), expected)
    assert (track.log == ["run", "begin", "compute", "join"]) == aside == layer.exchange._leaves_room(x)
    shared, layer.shared_experts = layer.shared_experts, None
    assert shared is not None and torch.equal(layer(x) + shared(x), expected)


def test_a_shared_expert_that_ranks_sum_keeps_its_place():
    layer = make_lone_layer()
    layer.exchange.track = Beside()
    assert layer.exchange._leaves_room(torch.randn(4, CONFIG.hidden))
    layer.exchange.tp.size = 2
    assert not layer.exchange._leaves_room(torch.randn(4, CONFIG.hidden))
