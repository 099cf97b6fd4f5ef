"""The parts of ``bench eplb-gpu`` that need no GPU: lists of ranks, what a replay makes of times, refusals."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch

from rorqual.launch.bench.eplb_gpu.command import _numbers
from rorqual.launch.bench.eplb_gpu.rank_lists import choose_slots, rank_lists
from rorqual.launch.bench.eplb_gpu.replay import POLICIES, Replayed, fitted_rows, host_timer, place, replay, rows_of, runner
from rorqual.launch.bench.eplb_gpu.slots import expert_state, sources
from rorqual.launch.cli import main
from rorqual.moe.eplb.locality.routing import Gate, make_router
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
    assert main(["bench", "eplb-gpu", "--device", "cpu", "--only", "slots"]) != 0
    assert "--only slots needs a CUDA device" in capsys.readouterr().err
    assert main(["bench", "eplb-gpu", "--device", "cpu", "--ranks", "0"]) != 0
    assert "--ranks must be at least 1, found 0" in capsys.readouterr().err
    assert main(["bench", "eplb-gpu", "--device", "cpu", "--prefill-tokens", "0", "--decode-tokens", "0"]) != 0
    assert "leave nothing to replay" in capsys.readouterr().err


def test_slots_to_permute_are_numbers():
    assert _numbers("9, 36") == [9, 36]
    for text in ("9,,3", "x", "1", "-4"):
        with pytest.raises(ValueError, match="--permuted must be numbers of slots"):
            _numbers(text)


def test_what_takes_no_longer_has_no_row():
    """More activated experts that take less time are noise; ranks without tokens have no part in a fit."""
    entry = Replayed(
        policy="plan", layer=0, tokens=np.array([10.0, 20.0, 30.0, 0.0]), activated=np.array([3.0, 2.0, 1.0, 0.0]),
        us=np.array([25.0, 45.0, 65.0, 0.0]),
    )  # fmt: skip
    rows = {row.name: row for row in fitted_rows("made", [entry], {})}
    assert set(rows) == {"time of a token, made"}
    assert rows["time of a token, made"].value == pytest.approx(2000.0)
    assert rows["time of a token, made"].params["fixed_us"] == pytest.approx(5.0)


def test_the_command_ends_on_a_cpu(tmp_path, capsys):
    """From end to end with what it takes when nothing is given: every policy in both kinds of steps, and a file of it."""
    place = tmp_path / "rows.json"
    began = time.process_time()
    assert main(["bench", "eplb-gpu", "--device", "cpu", "--output-json", str(place)]) == 0
    assert time.process_time() - began < 60.0
    rows = json.loads(place.read_text(encoding="utf-8"))["rows"]
    slowest = {row["name"]: row for row in rows if row["name"].startswith("experts of the slowest rank")}
    assert set(slowest) == {f"experts of the slowest rank, {step}, {policy}" for step in ("prefill", "decode") for policy in POLICIES}
    assert all(row["value"] >= row["peers"]["mean rank"] > 0 for row in slowest.values())
    assert slowest["experts of the slowest rank, prefill, in order"]["params"]["activated"] <= 8  # slots of a rank without replicas
    assert all(row["value"] > 0 for row in rows)
    assert "experts of the slowest rank, decode, activated" in capsys.readouterr().out
