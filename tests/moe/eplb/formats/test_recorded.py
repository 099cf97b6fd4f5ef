"""What an engine records can be read again: each mode, on one rank and on several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rorqual.moe.eplb.formats import problems, read_load, sniff
from rorqual.moe.eplb.formats.recorded import dump
from rorqual.moe.eplb.load.recorder import LoadRecorder
from rorqual.moe.load import ExpertLoad
from rorqual.parallel.grid import Grid, GridSpec
from tests.ranks import run_ranks

E, K, LAYERS = 12, 3, (1, 2)


def recorded(mode, rank=0, steps=4, window=8):
    """A recorder after some steps with padding, and the ids of all its tokens [steps][layers, tokens, k]."""
    load, rng, found = ExpertLoad(3, E), np.random.default_rng(rank), []
    recorder = LoadRecorder(load, layer_ids=LAYERS, top_k=K, mode=mode, window=window)
    for step in range(steps):
        tokens = 5 + step + rank
        ids = np.stack([np.stack([rng.permutation(E)[:K] for _ in range(tokens)]) for _ in LAYERS])
        padded = np.concatenate([ids, np.full((2, 3, K), -1)], 1)
        for i, layer in enumerate(LAYERS):
            load.add(layer, torch.from_numpy(padded[i]))
            load.keep(layer, torch.from_numpy(padded[i]))
        positions = torch.arange(tokens + 3)
        recorder.after_step(10 + step, tokens=tokens, phase="decode", token_ids=positions * 2, positions=positions)
        found.append(ids)
    return recorder, found


def counts_of(ids):
    return np.stack([[np.bincount(layer.ravel(), minlength=E) for layer in step] for step in ids])


@pytest.mark.parametrize(("mode", "name"), [("stat", "sglang-load"), ("stat_approx", "sglang-load"), ("per_pass", "sglang-pass-load")])
def test_a_dump_is_as_sglang_writes_it(mode, name, tmp_path):
    recorder, ids = recorded(mode)
    (path,) = dump(recorder, tmp_path / "sub" / "x.pt")
    assert sniff(path) == name
    found = read_load(path)
    assert (found.counts == counts_of(ids)).all() and found.layer_ids == LAYERS and found.tokens.tolist() == [5, 6, 7, 8]
    assert problems(found, n_experts=E) == [] and found.meta["recorder_mode"] == mode
    data = torch.load(path, weights_only=True)
    if mode == "per_pass":
        assert [record["forward_pass_id"] for record in data["records"]] == [10, 11, 12, 13]
        assert data["records"][0]["global_physical_count"].shape == data["last_physical_to_logical_map"].shape == (3, E)
    else:
        assert data["logical_count"].shape == (4, 3, E) and not data["logical_count"][:, 0].any()


@pytest.mark.parametrize("file", ["x.jsonl", "x.parquet", "x.json"])
def test_a_dump_in_another_format(file, tmp_path):
    recorder, ids = recorded("per_pass")
    found = read_load(dump(recorder, tmp_path / file)[0])
    assert (found.counts == counts_of(ids)).all() and set(found.phase) == {2}


def test_records_of_slots_know_their_placement(tmp_path):
    """With replicas: counts of slots, which come back as counts of experts."""
    recorder, ids = recorded("per_pass")
    rng = np.random.default_rng(3)
    placement = np.stack([rng.permutation(np.concatenate([np.arange(E), [0, 0, 5, 7]])) for _ in LAYERS])
    (path,) = dump(recorder, tmp_path / "x.pt", slot_to_expert=placement)
    data = torch.load(path, weights_only=True)
    assert data["records"][0]["global_physical_count"].shape == (3, 16)
    assert (data["last_physical_to_logical_map"][1:].numpy() == placement).all()
    assert (read_load(path).counts == counts_of(ids)).all()


def test_tokens_have_the_slots_that_they_chose(tmp_path):
    recorder, ids = recorded("per_token")
    placement = np.stack([np.roll(np.arange(E), 3)] * 2)
    (path,) = dump(recorder, tmp_path / "x.pt", slot_to_expert=placement)
    assert path.name == "x_0.pt"
    record = torch.load(path, weights_only=True)["records"][2]
    slots = record["topk_ids_of_layer"].numpy()
    assert (placement[0][slots[1:]] == ids[2]).all() and (slots[0] == -1).all()
    assert record["positions"].tolist() == list(range(7)) and record["input_ids"].tolist() == list(range(0, 14, 2))
    data = torch.load(path, weights_only=True)
    for each in data["records"]:
        del each["global_physical_count"]
    del data["rorqual"]
    torch.save(data, path)
    assert (read_load(path, n_experts=E, layer_ids=LAYERS).counts == counts_of(ids)).all()  # from the tokens alone


def dump_on_ranks(folder):
    grid, found = Grid.create(GridSpec(dp=2), torch.device("cpu"), 30.0), {}
    for mode in ("stat", "per_token"):
        recorder, ids = recorded(mode, rank=grid.rank)
        files = dump(recorder, Path(folder) / f"{mode}.pt", grid.ep)
        found[mode] = [str(path) for path in files], counts_of(ids).tolist()
    grid.close()
    return found


def test_dumps_of_several_ranks(tmp_path):
    ranks = run_ranks(dump_on_ranks, 2, str(tmp_path))
    for mode, n_files in (("stat", 1), ("per_token", 2)):
        files = [path for found in ranks for path in found[mode][0]]
        assert len(files) == n_files
        trace = read_load(files)
        assert (trace.counts == np.sum([found[mode][1] for found in ranks], 0)).all()
        assert trace.tokens.tolist() == [11, 13, 15, 17] and trace.n_ranks == 2
        assert problems(trace, n_experts=E) == [] and set(trace.phase) == {2}


def test_an_empty_recording_is_refused(tmp_path):
    recorder, _ = recorded("stat", steps=0)
    with pytest.raises(ValueError, match="no step was recorded"):
        dump(recorder, tmp_path / "x.pt")
