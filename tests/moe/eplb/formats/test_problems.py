"""Dumps that mislead are told: one rank's, counted several times, slots for experts, layers absent, padding in them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rorqual.moe.eplb.formats import merge, problems, read_load, write_load
from rorqual.moe.eplb.formats.expert_map import logical_to_physical, physical_to_logical
from rorqual.moe.eplb.load.synth import synth
from rorqual.moe.eplb.load.synth_config import SynthConfig
from rorqual.moe.eplb.trace import LoadTrace

E, K, RANKS = 64, 4, 4
TRACE = synth(SynthConfig(n_layers=3, n_experts=E, top_k=K, n_steps=6, tokens=4000, first_layer=3))
BARE = LoadTrace(counts=TRACE.counts, layer_ids=TRACE.layer_ids)


def kinds(trace, **more):
    return [problem.kind for problem in problems(trace, **more)]


def of_rank(rank, counts=TRACE.counts):
    """Counts of the experts of one rank only."""
    part = np.zeros_like(counts)
    held = slice(rank * E // RANKS, (rank + 1) * E // RANKS)
    part[..., held] = counts[..., held]
    return part


@pytest.mark.parametrize("seed", range(20))
def test_good_traces_are_not_suspected(seed):
    rng = np.random.default_rng(seed)
    trace = synth(
        SynthConfig(
            n_layers=4, n_experts=int(rng.choice([8, 64, 256])), top_k=int(rng.choice([1, 2, 8])), n_steps=4,
            tokens=int(rng.choice([1, 7, 300, 20000])), sigma=(0.3, float(rng.choice([0.5, 1.05, 2.0]))), seed=seed,
        )
    )  # fmt: skip
    assert kinds(trace, n_experts=trace.n_experts) == []
    assert kinds(LoadTrace(counts=trace.counts, layer_ids=trace.layer_ids), top_k=trace.top_k) == []


# ---- one rank of several


@pytest.mark.parametrize("rank", range(RANKS))
def test_the_dump_of_one_rank_is_told(rank):
    found = problems(LoadTrace(counts=of_rank(rank), layer_ids=(3, 4, 5)))
    assert [problem.kind for problem in found] == ["one-rank"]
    assert f"{rank * 16} to {rank * 16 + 15} of 64" in found[0].text and "one rank of about 4" in found[0].text


def test_one_rank_of_a_placement_is_told():
    """Experts of a rank lie anywhere, other ones in each layer."""
    rng, part = np.random.default_rng(0), np.zeros_like(TRACE.counts)
    for layer in range(3):
        held = rng.permutation(E)[:16]
        part[:, layer, held] = np.maximum(TRACE.counts[:, layer, held], 1)
    found = problems(LoadTrace(counts=part, layer_ids=(3, 4, 5)))
    assert [problem.kind for problem in found] == ["one-rank"] and "16 in each layer" in found[0].text


def rank_dump(path, rank, passes, counts, placement):
    """As a rank of SGLang writes mode per_pass: only its own slots have counts."""
    records = [
        {
            "forward_pass_id": int(at),
            "rank": rank,
            "gatherer_key": "primary",
            "global_physical_count": torch.from_numpy(counts[i]).int(),
        }
        for i, at in enumerate(passes)
    ]
    torch.save({"records": records, "last_physical_to_logical_map": torch.from_numpy(placement)}, path)


def test_dumps_of_all_ranks_are_summed(tmp_path):
    """Counts of slots, replicas and all; ranks that stopped at different passes."""
    rng = np.random.default_rng(1)
    placement = np.stack([rng.permutation(np.concatenate([np.arange(E), rng.integers(0, E, 16)])) for _ in range(3)])
    physical = logical_to_physical(TRACE.counts, placement)
    for rank in range(RANKS):
        mine = np.zeros_like(physical)
        mine[..., rank * 20 : rank * 20 + 20] = physical[..., rank * 20 : rank * 20 + 20]
        last = 6 if rank != 2 else 5
        rank_dump(tmp_path / f"expert_distribution_recorder_1712345.6_{rank}.pt", rank, range(10, 10 + last), mine, placement)
    files = sorted(tmp_path.iterdir())
    for source in (tmp_path, files, list(reversed(files))):
        found = read_load(source)
        assert (found.counts == TRACE.counts[:5]).all() and found.n_ranks == RANKS and found.meta["passes"] == "10-14"
        assert kinds(found, top_k=K) == []
    assert "part" in kinds(replace(read_load(files[0]), top_k=K, tokens=TRACE.tokens))
    assert kinds(LoadTrace(counts=of_rank(0), layer_ids=(3, 4, 5)), n_experts=E) == ["one-rank"]
    with pytest.raises(ValueError, match="rank 1 is there more than once"):
        read_load([files[1], files[1]])


def test_dumps_that_each_have_all_ranks_are_not_summed(tmp_path):
    for rank in range(2):
        torch.save(
            {"rank": rank, "logical_count": torch.from_numpy(TRACE.counts)}, tmp_path / f"expert_distribution_recorder_9.5_{rank}.pt"
        )
    with pytest.raises(ValueError, match="each has those of all ranks already"):
        read_load(tmp_path)


def test_dumps_of_other_runs_are_not_summed():
    apart = [LoadTrace(counts=of_rank(r), layer_ids=(3, 4, 5), meta={"rank": str(r), "passes": f"{10 * r}-{10 * r + 5}"}) for r in range(2)]
    with pytest.raises(ValueError, match="different runs"):
        merge(apart)
    with pytest.raises(ValueError, match="different numbers of steps"):
        merge([BARE, LoadTrace(counts=of_rank(1)[:3], layer_ids=BARE.layer_ids)])
    with pytest.raises(ValueError, match="not of one model"):
        merge([BARE, LoadTrace(counts=of_rank(1)[..., :60], layer_ids=BARE.layer_ids)])
    with pytest.raises(ValueError, match="layers .3. are in several"):
        merge([BARE, LoadTrace(counts=BARE.counts[:, :1], layer_ids=(3,))])
    with pytest.raises(ValueError, match="steps and experts differ"):
        merge([BARE, LoadTrace(counts=BARE.counts[:2], layer_ids=(6, 7, 8))])
    with pytest.raises(ValueError, match="no dump"):
        merge([])


def test_stages_of_a_pipeline_are_joined():
    """Two stages, of which two ranks have dumped each."""
    ranks = [
        [LoadTrace(counts=of_rank(0)[:, layers] + of_rank(rank)[:, layers] * (rank > 0), layer_ids=ids, n_ranks=1) for rank in range(2)]
        for layers, ids in ((slice(0, 2), (3, 4)), (slice(2, 3), (5,)))
    ]
    found = merge([ranks[1][0], ranks[0][0], ranks[1][1], ranks[0][1]])
    assert found.layer_ids == (3, 4, 5) and (found.counts == 2 * of_rank(0) + of_rank(1)).all()
    with pytest.raises(ValueError, match="different numbers of tokens"):
        merge([TRACE, replace(TRACE, layer_ids=(6, 7, 8), tokens=TRACE.tokens + 1)])


# ---- wrong units


@pytest.mark.parametrize("times", [2, 3, 8])
def test_counts_times_the_number_of_ranks_are_told(times):
    counted = replace(TRACE, counts=TRACE.counts * times)
    assert kinds(counted) == ["multiple"] and f"Divide by {times}" in problems(counted)[0].text
    unknown = LoadTrace(counts=counted.counts, layer_ids=(3, 4, 5))
    assert kinds(unknown) == ["multiple"] and f"multiple of {times}" in problems(unknown)[0].text


def test_counts_of_some_ranks_only_are_told():
    """Each rank counts its own tokens on all experts: no expert is missing, but tokens are."""
    half = synth(SynthConfig(n_layers=3, n_experts=E, top_k=K, n_steps=6, tokens=2000, first_layer=3))
    found = problems(replace(half, tokens=TRACE.tokens))
    assert [problem.kind for problem in found] == ["part"] and "0.5 times" in found[0].text


def test_padding_is_told():
    counts = TRACE.counts.copy()
    counts[2, :, 0] += 96 * K  # padding tokens all choose the same experts
    assert kinds(replace(TRACE, counts=counts)) == ["padding"]
    counts = TRACE.counts.copy()
    counts[1, 2, 5] += 3
    assert kinds(replace(BARE, counts=counts)) == ["layers-differ"]
    assert kinds(replace(BARE, counts=counts), top_k=K) == ["layers-differ", "top-k"]


@pytest.mark.parametrize("shares", ["one", "top_k", "means"])
def test_shares_and_means_are_not_counts(shares, tmp_path):
    sums = TRACE.counts[0].sum(-1, keepdims=True)
    values = {"one": TRACE.counts[0] / sums, "top_k": K * TRACE.counts[0] / sums, "means": TRACE.counts.mean(0)}[shares]
    np.savez(tmp_path / "w.npz", weight=values)
    message = "means over steps" if shares == "means" else f"shares, not counts: every layer sums to {1 if shares == 'one' else K}"
    with pytest.raises(ValueError, match=message):
        read_load(tmp_path / "w.npz")
    found = read_load(tmp_path / "w.npz", scale=1e6)
    assert found.counts[0] / 1e6 == pytest.approx(values, abs=1e-6)


def test_counts_of_slots_are_told_from_counts_of_experts(tmp_path):
    rng = np.random.default_rng(2)
    placement = np.stack([rng.permutation(np.concatenate([np.arange(E), rng.integers(0, E, 8)])) for _ in range(3)])
    physical = logical_to_physical(TRACE.counts, placement)
    torch.save({"logical_count": torch.from_numpy(physical)}, tmp_path / "x.pt")
    found = problems(read_load(tmp_path / "x.pt"), n_experts=E)
    assert [problem.kind for problem in found] == ["physical"] and "72 experts a layer and the model has 64" in found[0].text
    assert "another model" in problems(LoadTrace(counts=TRACE.counts[..., :60], layer_ids=(3, 4, 5)), n_experts=E)[0].text
    assert (physical_to_logical(physical, placement, E) == TRACE.counts).all()
    with pytest.raises(ValueError, match="must belong together"):
        physical_to_logical(physical[..., :70], placement, E)


def test_replicas_share_evenly_and_empty_slots_get_nothing():
    placement = np.array([[0, 1, 0, -1, 0]])
    physical = logical_to_physical(np.array([[11, 5]]), placement)
    assert physical.tolist() == [[4, 5, 4, 0, 3]] and physical_to_logical(physical, placement, 2).tolist() == [[11, 5]]
    with pytest.raises(ValueError, match="calls empty have counts"):
        physical_to_logical(np.array([[4, 5, 4, 1, 3]]), placement, 2)


def test_faked_routing_is_told():
    assert kinds(LoadTrace(counts=np.full((3, 2, E), 1000), layer_ids=(3, 4))) == ["even"]
    by_turns = np.full((3, 2, E), 1000) + (np.arange(E) < 7)
    assert kinds(LoadTrace(counts=by_turns, layer_ids=(3, 4))) == ["even"]
    chance = np.random.default_rng(0).multinomial(64000, np.full(E, 1 / E), (3, 2))
    assert kinds(LoadTrace(counts=chance, layer_ids=(3, 4))) == []


# ---- layers


def test_layers_that_are_absent_or_zero_are_told():
    counts = TRACE.counts[:, [0, 0, 1, 2]].copy()
    counts[:, 0] = 0
    trace = LoadTrace(counts=counts, layer_ids=(2, 3, 5, 9))
    found = problems(trace)
    assert [problem.kind for problem in found] == ["zero-layers", "layer-gaps"]
    assert "Layers 2 have no tokens" in found[0].text and "hash-routed" in found[0].text
    assert "Layers 4, 6-8 are missing" in found[1].text
    assert kinds(LoadTrace(counts=np.zeros((2, 3, E), np.int64), layer_ids=(3, 4, 5))) == ["empty"]


def test_a_file_says_which_layers_it_has(tmp_path):
    """A map made for layers 3 to 5 cannot be taken for layers 0 to 2."""
    for file in ("x.pt", "x.json", "x.jsonl", "x.parquet", "x.npz"):
        trace = read_load(write_load(TRACE.select(np.arange(1)), tmp_path / file))
        assert trace.layer_ids == (3, 4, 5), file
