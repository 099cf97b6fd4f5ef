"""The parts of ``bench eplb-gpu`` that need no GPU: lists of ranks, what a replay makes of times, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.launch.bench.eplb_gpu.rank_lists import choose_slots, rank_lists
from rorqual.launch.bench.eplb_gpu.replay import fitted_rows, host_timer, place, replay, rows_of, runner
from rorqual.launch.bench.eplb_gpu.slots import expert_state, sources
from rorqual.launch.cli import main
from rorqual.moe.eplb.locality.soft.routing import Gate, make_router
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.kernels.fused_experts_torch import ExpertWeights
from rorqual.moe.ops import MoEOps

TOPOLOGY = Topology.even(n_slots=40, n_ranks=8, n_nodes=2)
GATE = Gate(n_experts=32, top_k=4, n_groups=4, topk_groups=2)
ROUTER = make_router(n_layers=2, gate=GATE, topics=1, seed=3)


def test_every_choice_is_on_one_rank_where_its_expert_is():
    routing = ROUTER.sample(400, seed=1)
    slots, topology = place("plan", routing.load, TOPOLOGY)
    chosen = choose_slots(routing.ids[0], slots[0], 32, topology)
    assert (slots[0][chosen] == routing.ids[0]).all()
    lists = rank_lists(chosen, topology)
    assert sum(part.n_tokens for part in lists) == 400 * 4
    assert all(int(part.slots.max()) < 5 and bool((part.slots >= 0).any(1).all()) for part in lists)
    assert [part.activated for part in lists] == [len(set(part.slots[part.slots >= 0].tolist())) for part in lists]


def test_ranks_together_compute_what_one_rank_would():
    ids = ROUTER.sample(16, seed=2).ids[0]
    slots, topology = place("in order", np.ones((1, 32)), Topology.even(n_slots=32, n_ranks=8))
    generator = torch.Generator().manual_seed(0)
    weights = {"gate_up": torch.randn(32, 16, 8, generator=generator), "down": torch.randn(32, 8, 8, generator=generator)}
    x, ops = torch.randn(1, 8, generator=generator).repeat(16, 1), MoEOps.load("torch")
    whole = ops.fused_experts(x, torch.from_numpy(ids).int(), torch.full((16, 4), 0.25), ExpertWeights(**weights))
    total = torch.zeros(8)
    for rank, part in enumerate(rank_lists(choose_slots(ids, slots[0], 32, topology), topology)):
        mine = ExpertWeights(**{name: value[4 * rank : 4 * rank + 4] for name, value in weights.items()})
        total += runner(ops, mine, x)(part)().sum(0)
    torch.testing.assert_close(total, whole.sum(0), rtol=1e-4, atol=1e-4)


def test_replay_turns_uneven_load_into_time():
    """With a made time of 2 us a token, the slowest rank takes what its tokens take, and the fit finds the 2 us again."""
    planned, routing = ROUTER.sample(4000, seed=4).load, ROUTER.sample(1600, seed=5)
    found = []
    for policy in ("in order", "EPLB", "plan", "plan filled"):
        found += replay(policy, planned, routing, TOPOLOGY, lambda part: lambda: part.n_tokens, lambda call: 2.0 * call() + 5.0)
    for entry in found:
        np.testing.assert_allclose(entry.us, 2.0 * entry.tokens + 5.0)
        assert entry.tokens.sum() == 1600 * 4
    rows = {row.name.split(", ")[-1]: row for row in rows_of("made", found, {})}
    assert rows["in order"].value > rows["plan"].value > rows["plan filled"].value
    assert rows["plan filled"].params["imbalance"] < 1.05
    assert all(row.peers["mean rank"] == pytest.approx(2.0 * 800 + 5.0) for row in rows.values())
    fitted = {row.name: row for row in fitted_rows("made", found, {})}
    assert fitted["time of a token, made"].value == pytest.approx(2000.0)
    assert fitted["time of a token, made"].params["fixed_us"] == pytest.approx(5.0, abs=0.1)
    with pytest.raises(ValueError, match="policy of the replay must be one of in order"):
        place("best", planned, TOPOLOGY)


def test_permutations_are_permutations_and_slots_have_the_size_of_experts():
    for n in (4, 9):
        for name, source in sources(n).items():
            assert sorted(source) == list(range(n)), name
    assert sum(t[0].numel() * t.element_size() for t in expert_state(1, 256, 128, torch.device("cpu"))) == 3 * 256 * 128 + 4 * (4 + 2)
    assert host_timer(lambda: None) >= 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_refusals(capsys):
    assert main(["bench", "eplb-gpu"]) != 0
    assert "needs a CUDA device" in capsys.readouterr().err
    assert main(["bench", "eplb-gpu", "--device", "cpu", "--hidden", "100"]) != 0
    assert "multiples of 128" in capsys.readouterr().err
