"""Files that are damaged, hostile or of another kind: refused with a ValueError that says why, and nothing in them is run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.moe.eplb.formats import read_load, read_map, write_load
from rorqual.moe.eplb.load.synth import synth
from rorqual.moe.eplb.load.synth_config import SynthConfig

TRACE = synth(SynthConfig(n_layers=3, n_experts=64, top_k=4, n_steps=2, tokens=4000))


class Evil:
    ran = False

    def __reduce__(self):
        return (setattr, (Evil, "ran", True))


def test_nothing_is_unpickled(tmp_path):
    torch.save({"logical_count": Evil()}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="not read"):
        read_load(tmp_path / "x.pt")
    np.savez(tmp_path / "x.npz", weight=np.array([[Evil()]], dtype=object))
    with pytest.raises(ValueError, match="Python objects"):
        read_load(tmp_path / "x.npz")
    np.save(tmp_path / "x.npy", np.array([[Evil()]], dtype=object))
    with pytest.raises(ValueError, match="Python objects"):
        read_load(tmp_path / "x.npy")
    assert not Evil.ran


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"), ("{", "not valid JSON"), ("[1, 2]", "no known format"), ('{"a": 1}', "keys .'a'"), ("\x00\x01\xff", "."),
        ("a: [", "neither JSON nor YAML"), ('{"rorqual": "load", "version": 99, "layer_ids": [], "n_experts": 4}', "update rorqual"),
        ('{"logical_count": [[1, -2]]}', "below zero"), ('{"logical_count": [[1, 2], [1]]}', "different numbers"),
        ('{"logical_count": [1, 2]}', "steps, layers, experts"), ('{"logical_count": [["a"]]}', "numbers"),
        ('{"physical_to_logical_map": [[0, 1]]}', "is a map .sglang-map., a load was asked for"),
        ('{"expert_load": [[1, 2]], "physical_to_logical_map": [[0, 0, 1]]}', "must belong together"),
        ('{"records": []}', "no known format"),
    ],
)  # fmt: skip
def test_wrong_loads_are_refused(text, message, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        read_load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"physical_to_logical_map": [[0, 1], [0]]}', "different lengths"),
        ('{"physical_to_logical_map": [[0, 1.5]]}', "whole numbers"),
        ('{"physical_to_logical_map": [[0, -2]]}', "holds expert -2"),
        ('{"physical_to_logical_map": []}', "2 dimensions"),
        ('{"physical_to_logical_map": [[0, 1]], "logical_to_physical_map": [[[1], [0]]]}', "puts expert 0 in slot 1"),
        ('{"physical_to_logical_map": [[0, 1]], "logical_to_physical_map": [[1]]}', "must be .layers, experts, replicas"),
        ('{"moe_layer_count": 2, "layer_list": []}', "some are missing"),
        ('{"layer_list": [{"layer_id": 0, "device_list": [{"device_id": 1, "device_expert": [0]}]}]}', "each once"),
        ('{"num_slots": 3, "initial_global_assignments": {"3": [0, 1]}}', "num_slots is 3"),
        ('{"initial_global_assignments": {}}', "leaves the placement"),
        ('{"expert_map": [[[0, 0]]]}', "two experts of a layer in one slot"),
        ('{"logical_count": [[1, 2]]}', "is a load .sglang-load., a map was asked for"),
    ],
)
def test_wrong_maps_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        read_map(text)


def test_names_are_checked(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_load(tmp_path / "absent.pt")
    with pytest.raises(ValueError, match="neither dumps"):
        read_load(tmp_path)
    with pytest.raises(ValueError, match="no format of a load has the suffix '.csv'"):
        write_load(TRACE, tmp_path / "x.csv")
    with pytest.raises(ValueError, match="no format is named 'sglang'"):
        write_load(TRACE, tmp_path / "x.pt", format="sglang")
    with pytest.raises(ValueError, match="cannot be written"):
        write_load(TRACE, tmp_path / "x.npy", format="vllm-routed-load")


def test_damaged_files_raise_nothing_but_value_errors(tmp_path):
    """Any prefix, and any changed byte, of any file: it is read, or refused."""
    rng = np.random.default_rng(0)
    for file in ("x.jsonl", "x.parquet", "x.pt", "x.json", "x.npz"):
        data = write_load(TRACE.select(np.arange(1)), tmp_path / file).read_bytes()
        for attempt in range(12):
            broken = bytearray(data[: int(rng.integers(len(data)))] if attempt % 2 else data)
            if len(broken):
                broken[int(rng.integers(len(broken)))] ^= 1 << int(rng.integers(8))
            (tmp_path / "broken").write_bytes(broken)
            try:
                read_load(tmp_path / "broken")
            except ValueError:
                pass
