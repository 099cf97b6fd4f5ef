"""Placements with replicas and empty slots, and the table that says where tokens meet an expert."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.local import LocalDispatcher
from rorqual.moe.config import MoEConfig
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.exchange import ExpertExchange
from rorqual.moe.layer import MoE
from rorqual.moe.load import ExpertLoad
from rorqual.moe.ops import MoEOps
from rorqual.moe.placement import Placement
from rorqual.moe.ways import ExpertIds, SlotIds, Ways, way_of_rows
from rorqual.parallel.group import Group

CONFIG = MoEConfig(hidden=8, intermediate=6, n_experts=8, top_k=3, n_group=4, topk_group=2, n_shared=0)


def test_redundant_slots_begin_with_the_first_experts_again():
    placement = Placement.identity(n_layers=2, n_experts=6, n_ranks=4, n_redundant=2)
    assert placement.slot_to_expert.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]] * 2
    assert placement.counts().tolist() == [[2, 2, 1, 1, 1, 1]] * 2
    assert placement.first_slots().tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_placements_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"6 routed experts and 3 redundant slots .* nearest valid numbers of redundant slots: \[2, 6\]"):
        Placement.identity(n_layers=1, n_experts=6, n_ranks=4, n_redundant=3)
    with pytest.raises(ValueError, match="5 expert slots do not divide over 2 .* next number is 6"):
        Placement(slot_to_expert=torch.zeros(1, 5, dtype=torch.int64), n_experts=1, n_ranks=2)
    for wrong in ([[0, 3]], [[0, -2]]):
        with pytest.raises(ValueError, match="must hold experts 0 to 2"):
            Placement(slot_to_expert=torch.tensor(wrong), n_experts=3, n_ranks=1)
    with pytest.raises(ValueError, match="layer 1 has no slot for expert 0"):
        Placement.of(np.array([[0, 1, -1], [1, 1, -1]]), n_experts=2, n_ranks=1)


def test_rows_are_replaced_in_a_new_placement():
    old = Placement.identity(n_layers=3, n_experts=3, n_ranks=2, n_redundant=1)
    new = old.replaced([2, 0], np.array([[0, 1, 2, -1], [2, 2, 1, 0]]))
    assert new.slot_to_expert.tolist() == [[2, 2, 1, 0], [0, 1, 2, 0], [0, 1, 2, -1]]
    assert old.slot_to_expert.tolist() == [[0, 1, 2, 0]] * 3
    assert new.local_experts(2, 1) == [2, -1]
    with pytest.raises(ValueError, match=r"rows must be \[1, 4\]"):
        old.replaced([1], np.array([[0, 1, 2]]))


@pytest.mark.parametrize("n_ways", [1, 3, 64])
def test_any_few_rows_take_ways_evenly(n_ways):
    way = way_of_rows(1000, n_ways, "cpu")
    assert way.min() >= 0 and way.max() < n_ways
    for first, count in ((0, 64), (17, 200), (500, 500)):
        taken = torch.bincount(way[first : first + count], minlength=n_ways).double() / count
        assert (taken - 1 / n_ways).abs().max() <= 3 / count


def test_ids_are_mapped_once():
    ways = Ways.static(Placement.identity(n_layers=1, n_experts=3, n_ranks=1, n_redundant=1), source=0)
    mapped = ways.slots(0, ExpertIds(torch.tensor([[1, 2], [0, -1]])))
    assert isinstance(mapped, SlotIds) and mapped.ids[0].tolist() == [1, 2] and mapped.ids[1, 1] == -1 and mapped.ids[1, 0] in (0, 3)
    for again in (mapped, mapped.ids):
        with pytest.raises(TypeError, match="maps them once"):
            ways.slots(0, again)


def test_a_table_is_written_where_it_is():
    placement = Placement.identity(n_layers=2, n_experts=4, n_ranks=2, n_redundant=2)
    ways, topology = Ways.static(placement, source=1), Topology.even(n_slots=6, n_ranks=2)
    where, before = ways.table.data_ptr(), ways.table.clone()
    moved = placement.replaced([1], np.array([[3, 2, 1, 0, 3, 2]]))
    ways.write([1], ways.deal(moved, topology, source=1, layers=[1]))
    assert ways.table.data_ptr() == where and torch.equal(ways.table[0], before[0])
    assert torch.equal(ways.table, Ways.static(moved, source=1).table) and not torch.equal(ways.table[1], before[1])
    with pytest.raises(ValueError, match=r"a table of shape \(1, 4, 64\)"):
        ways.write([1], ways.table.numpy())
    assert Ways.static(Placement.identity(n_layers=2, n_experts=4, n_ranks=2), source=0).n_ways == 1


def make_layer(order: torch.Tensor, ops: str | None) -> MoE:
    """One rank that holds all slots; the same experts whatever ``order`` [slots] is."""
    placement = Placement.of(order[None], n_experts=CONFIG.n_experts, n_ranks=1)
    layer = MoE(CONFIG, 0, n_slots=len(order), inner=CONFIG.intermediate)
    generator = torch.Generator().manual_seed(2)
    for param in layer.gate.parameters():
        param.data = torch.randn(param.shape, generator=generator)
    for name, shape in (("gate_up", (8, 2, 6, 8)), ("down", (8, 8, 6))):
        values = torch.randn(shape, generator=generator)[order]
        values[order < 0] = float("nan")  # nobody looks there
        getattr(layer.experts, name).data = values
    spec = EPSpec(n_ranks=1, n_slots=len(order), hidden=8, top_k=3, max_tokens=64)
    exchange = ExpertExchange(
        dispatcher=LocalDispatcher(spec), tp=Group.solo(), placement=placement, load=ExpertLoad(1, 8), spread=True
    )  # fmt: skip
    exchange.ops = None if ops is None else MoEOps.load(ops)
    layer.attach(exchange)
    return layer


@pytest.mark.parametrize("ops", [None, "torch"])
def test_results_and_load_do_not_depend_on_where_experts_are(ops):
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(4))
    plain = make_layer(torch.arange(8), ops)
    moved = make_layer(torch.tensor([5, -1, 2, 7, 0, 1, 6, 3, 4, 5, 0, 5]), ops)
    torch.testing.assert_close(moved(x), plain(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(moved.exchange.load.counts, plain.exchange.load.counts)
    slots = moved.exchange.begin(0, x, moved.gate).slots.ids
    used = set(slots.flatten().tolist())
    assert {0, 9, 11} <= used and 1 not in used  # all replicas of expert 5, not the empty slot
