"""Predicted load of hash-routed layers equals what a router that looks every token up would count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from rorqual.moe.eplb.load.hash_routed import fill_hash_layers, hash_load, hash_trace, read_tables, token_histogram
from rorqual.moe.eplb.load.recorder import LoadRecorder
from rorqual.moe.eplb.trace import LoadTrace
from rorqual.moe.load import ExpertLoad

VOCABULARY, E, K = 500, 32, 6
RNG = np.random.default_rng(0)
TABLES = {layer: np.stack([RNG.choice(E, K, replace=False) for _ in range(VOCABULARY)]) for layer in range(3)}


def test_prediction_equals_recorded_counts():
    """Three hash-routed layers over steps with padding: recorded by lookup, predicted from histograms alone."""
    load = ExpertLoad(3, E)
    recorder = LoadRecorder(load, layer_ids=[0, 1, 2], top_k=K, mode="stat")
    tokens = [np.minimum(RNG.zipf(1.3, 100 + 50 * step) - 1, VOCABULARY - 1) for step in range(4)]
    for step, ids in enumerate(tokens):
        padded = np.concatenate([ids, np.full(20, -1)])
        for layer in range(3):
            chosen = np.where(padded[:, None] < 0, -1, TABLES[layer][np.maximum(padded, 0)])
            load.add(layer, torch.from_numpy(chosen))
        recorder.after_step(step, tokens=len(ids))
    recorded = recorder.trace()
    predicted = hash_trace(np.stack([token_histogram(ids, VOCABULARY) for ids in tokens]), TABLES, E)
    assert (predicted.counts == recorded.counts).all() and (predicted.tokens == recorded.tokens).all()
    assert predicted.top_k == K and predicted.layer_ids == (0, 1, 2)


def test_layers_that_a_recorder_left_out_are_filled():
    histograms = RNG.integers(0, 9, (2, VOCABULARY))
    exact = hash_trace(histograms, TABLES, E)
    scored = RNG.integers(0, 50, (2, 2, E))
    absent = LoadTrace(counts=scored, layer_ids=(3, 4))
    zero = LoadTrace(counts=np.concatenate([np.zeros((2, 3, E), np.int64), scored], 1), layer_ids=(0, 1, 2, 3, 4))
    for trace in (absent, zero):
        filled = fill_hash_layers(trace, histograms, TABLES)
        assert filled.layer_ids == (0, 1, 2, 3, 4)
        assert (filled.counts[:, :3] == exact.counts).all() and (filled.counts[:, 3:] == scored).all()
    assert (fill_hash_layers(filled, histograms, TABLES).counts == filled.counts).all()
    filled.counts[1, 2, 5] += 1
    with pytest.raises(ValueError, match="layer 2: the recorded counts of step 1"):
        fill_hash_layers(filled, histograms, TABLES)
    with pytest.raises(ValueError, match="1 histograms for 2 steps"):
        fill_hash_layers(absent, histograms[:1], TABLES)


def test_tables_are_found_in_a_checkpoint(tmp_path):
    save_file({"model.layers.0.mlp.gate.tid2eid": TABLES[0], "norm": np.ones(3)}, tmp_path / "a.safetensors")
    save_file({"layers.2.ffn.gate.tid2eid": TABLES[2].astype(np.int32)}, tmp_path / "b.safetensors")
    found = read_tables(tmp_path)
    assert list(found) == [0, 2] and (found[0] == TABLES[0]).all() and (found[2] == TABLES[2]).all()
    assert list(read_tables([tmp_path / "b.safetensors"])) == [2]
    save_file({"norm": np.ones(3)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="no table"):
        read_tables(tmp_path / "b.safetensors")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, 1], [3, 3]], "token 1 names an expert twice"),
        ([[0, 1], [0, 4]], "token 1 names experts .0, 4., there are 0 to 3"),
        ([[0, -1], [0, 1]], "token 0 names experts"),
        ([[0.0, 1.0], [0.0, 1.0]], "integers"),
        ([[0, 1]], "needs .vocabulary. and"),
    ],
)
def test_wrong_tables_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        hash_load([1, 1], table, 4)


def test_token_ids_outside_the_vocabulary_are_refused():
    assert token_histogram([[1, -1], [1, 2]], 4).tolist() == [0, 2, 1, 0]
    with pytest.raises(ValueError, match="between 0 and 3"):
        token_histogram([4], 4)
