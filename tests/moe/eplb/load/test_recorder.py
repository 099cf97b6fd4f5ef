"""Recorded counts are exact: every choice of every token of every rank once, padding never."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.moe.eplb.load.gathered import common_phase
from rorqual.moe.eplb.load.recorder import LoadRecorder
from rorqual.moe.eplb.trace import PHASES
from rorqual.moe.kernels.router_torch import route
from rorqual.moe.load import ExpertLoad
from rorqual.parallel.grid import Grid, GridSpec
from tests.ranks import run_ranks

E, K = 16, 4


def one_step(load, layers, tokens, padded, seed):
    """Route ``tokens`` tokens and as many rows of padding as make ``padded``; the ids of the real tokens."""
    rng, found = torch.Generator().manual_seed(seed), []
    for layer in layers:
        ids, _, _ = route(
            torch.randn(padded, E, generator=rng), torch.zeros(E), n_group=1, topk_group=1, top_k=K, scoring="sigmoid",
            method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=1.0, counts=load.counts[layer],
            n_valid=torch.tensor([tokens], dtype=torch.int32),
        )  # fmt: skip
        load.keep(layer, ids[:tokens])
        found.append(ids[:tokens])
    return torch.stack(found)


def test_padding_is_never_counted():
    load = ExpertLoad(3, E)
    recorder = LoadRecorder(load, layer_ids=[1, 2], top_k=K, mode="stat")
    for step, (tokens, padded) in enumerate([(5, 8), (0, 8), (8, 8), (1, 64)]):
        one_step(load, [1, 2], tokens, padded, step)
        recorder.after_step(step, tokens=tokens)
    trace = recorder.trace()
    assert trace.tokens.tolist() == [5, 0, 8, 1]
    assert (trace.counts.sum(-1) == trace.tokens[:, None] * K).all()
    assert trace.layer_ids == (1, 2) and trace.top_k == K and trace.n_ranks == 1


def test_counts_are_those_of_the_ids():
    load = ExpertLoad(2, E)
    recorder = LoadRecorder(load, layer_ids=[0, 1], top_k=K, mode="per_token")
    ids, n = [], 12
    for step in range(n):
        ids.append(one_step(load, [0, 1], 7, 9, step))
        recorder.after_step(step, tokens=7, phase="decode", domain="chat", positions=torch.arange(7))
    trace, records = recorder.trace(), recorder.token_records()
    for step in range(n):
        assert (records[step].ids == ids[step]).all() and records[step].step == step
        assert records[step].positions.tolist() == list(range(7)) and records[step].token_ids is None
        for layer in range(2):
            assert (np.bincount(ids[step][layer].numpy().ravel(), minlength=E) == trace.counts[step, layer]).all()
    assert trace.domain == ("chat",) * n and (trace.phase == PHASES.index("decode")).all()


def test_two_parts_of_a_step_are_one():
    """A step cut in halves routes each layer twice."""
    load = ExpertLoad(1, E)
    recorder = LoadRecorder(load, layer_ids=[0], top_k=K, mode="per_token")
    halves = [one_step(load, [0], 3, 3, 0), one_step(load, [0], 2, 2, 1)]
    recorder.after_step(0, tokens=5)
    assert (recorder.token_records()[0].ids == torch.cat(halves, 1)).all()
    assert recorder.trace().counts.sum() == 5 * K


@pytest.mark.parametrize(("size", "expected"), [(3, [7, 8, 9]), (100, list(range(10))), (None, list(range(10)))])
def test_the_buffer_keeps_the_newest_steps(size, expected, monkeypatch):
    monkeypatch.setattr("rorqual.moe.eplb.load.step_buffer._CHUNK", 4)
    load = ExpertLoad(1, E)
    recorder = LoadRecorder(load, layer_ids=[0], top_k=K, mode="per_pass", buffer=size)
    for step in range(10):
        load.counts[0, step] += step + 1
        recorder.after_step(step, tokens=0)
    counts = recorder.trace().counts
    assert counts.shape == (len(expected), 1, E)
    assert [int(counts[i].sum()) for i in range(len(expected))] == [step + 1 for step in expected]
    assert [note.step for note in recorder.notes] == expected


def test_clearing_forgets_what_was_counted_meanwhile():
    load = ExpertLoad(1, E)
    recorder = LoadRecorder(load, layer_ids=[0], top_k=K, mode="stat")
    load.counts += 1
    recorder.after_step(0, tokens=4)
    load.counts += 100  # warming up
    recorder.clear()
    with pytest.raises(ValueError, match="no step was recorded"):
        recorder.trace()
    load.counts += 2
    recorder.after_step(1, tokens=8)
    assert (recorder.trace().counts == 2).all()


@pytest.mark.parametrize("length", [1, 5, 32, 33, 100])
def test_windows_cover_the_last_steps(length):
    load = ExpertLoad(2, E)
    load.counts += 7  # before the recorder
    recorder = LoadRecorder(load, layer_ids=[0, 1], top_k=K, window=length)
    for step in range(1, 300):
        load.counts[:, 0] += step
        recorder.after_step(step, tokens=0)
        covered = recorder.window_steps
        assert min(step, length) <= covered <= min(step, length + 2 * (-(-length // 32) - 1))
        assert recorder.window()[0, 0] == sum(range(step - covered + 1, step + 1))
    assert recorder.window()[:, 1:].sum() == 0


def test_layers_that_do_not_lie_together():
    load = ExpertLoad(5, E)
    recorder = LoadRecorder(load, layer_ids=[0, 2, 4], top_k=K, mode="stat")
    load.counts += torch.arange(5)[:, None]
    recorder.after_step(0, tokens=0)
    assert recorder.trace().counts[0, :, 0].tolist() == recorder.window()[:, 0].tolist() == [0, 2, 4]


def test_it_says_on_how_many_layers_it_records():
    load = ExpertLoad(4, E)
    assert "3 MoE layers (1 to 3) of 16 experts" in LoadRecorder(load, layer_ids=[1, 2, 3], top_k=K).describe()
    with pytest.raises(ValueError, match="no MoE layer"):
        LoadRecorder(load, layer_ids=[], top_k=K)
    with pytest.raises(ValueError, match="stat, stat_approx, per_pass, per_token"):
        LoadRecorder(load, layer_ids=[0], top_k=K, mode="stats")
    with pytest.raises(ValueError, match="layers 0 to 3"):
        LoadRecorder(load, layer_ids=[4], top_k=K)
    load.enabled = False
    with pytest.raises(ValueError, match="enable_expert_load"):
        LoadRecorder(load, layer_ids=[0], top_k=K)


def test_a_long_recording_does_not_grow():
    load = ExpertLoad(1, E)
    recorder = LoadRecorder(load, layer_ids=[0], top_k=K, mode="stat", buffer=8)
    sizes = set()
    for step in range(1000):
        recorder.after_step(step, tokens=1)
        if step >= 8:
            sizes.add((len(recorder.notes), recorder._buffer._ring.numel(), recorder._window._ring.numel()))
    assert len(sizes) == 1


def test_the_phase_of_a_step_is_what_ranks_with_tokens_agree_on():
    prefill, decode, mixed = (PHASES.index(name) for name in ("prefill", "decode", "mixed"))
    phases = np.array([[prefill, prefill, decode, mixed, mixed], [prefill, decode, prefill, decode, mixed]])
    tokens = np.array([[4, 4, 4, 0, 0], [4, 4, 0, 4, 0]])
    assert common_phase(phases, tokens).tolist() == [prefill, mixed, decode, decode, mixed]


def record_on_ranks():
    """Each replica routes its own tokens; of two tp ranks each routes half of them."""
    grid = Grid.create(GridSpec(dp=2, tp=2), torch.device("cpu"), 30.0)
    load = ExpertLoad(2, E)
    recorder = LoadRecorder(load, layer_ids=[0, 1], top_k=K, mode="stat")
    ep = grid.ep
    for step in range(4):
        tokens = 6 + 2 * grid.dp_rank + step * 2
        one_step(load, [0, 1], tokens // 2, 16, seed=100 * step + ep.index)
        recorder.after_step(step, tokens=tokens if grid.tp.index == 0 else 0, phase="prefill" if grid.dp_rank else "mixed")
    trace = recorder.trace(ep)
    assert (trace.counts.sum(-1) == trace.tokens[:, None] * K).all() and trace.n_ranks == 4
    assert trace.tokens.tolist() == [14 + 4 * step for step in range(4)]
    recorder.after_step(4, tokens=0)
    if ep.index == 2:
        recorder.after_step(5, tokens=0)
    with pytest.raises(ValueError, match="different steps"):
        recorder.trace(ep)
    grid.close()
    return trace.counts.tolist()


def test_ranks_sum_to_tokens_times_top_k():
    """Any data parallelism, any tensor parallelism: no rank's choices are missing and none are counted twice."""
    found = run_ranks(record_on_ranks, 4)
    assert found.count(found[0]) == 4
