"""What is written is read again, exactly, and told apart from every other format by its contents."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from rorqual.moe.eplb.formats import (
    FORMATS,
    ExpertMap,
    drop_zero_layers,
    problems,
    read_load,
    read_map,
    sniff,
    summed,
    write_load,
    write_map,
)
from rorqual.moe.eplb.load.synth import synth
from rorqual.moe.eplb.load.synth_config import SynthConfig
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.eplb.trace import LoadTrace
from tests.moe.eplb.formats.random_trips import trip

E, SLOTS, RANKS, LAYERS = 16, 24, 4, (3, 4, 5)
CONFIG = SynthConfig(
    n_layers=3, n_experts=E, top_k=4, n_steps=5, tokens=300, decode_tokens=20, decode_share=0.5, domains=("a", "ü"), dwell=1.5
)
TRACE = replace(synth(CONFIG), n_ranks=RANKS, meta={"model": "tiny", "note": 'with "quotes" and ü'})
BARE = LoadTrace(counts=TRACE.counts, layer_ids=LAYERS)


def placement(seed=0, layers=3):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(np.concatenate([np.arange(E), rng.integers(0, E, SLOTS - E)])) for _ in range(layers)])


EVEN = ExpertMap(
    slot_to_expert=placement(), n_experts=E, layer_ids=LAYERS, topology=Topology.even(n_slots=SLOTS, n_ranks=RANKS), meta={"by": "ü"}
)


def holed():
    """Empty slots, a failed rank, uneven ranks, speeds and named nodes."""
    slots = placement(1)
    topology = Topology(slots=(7, 5, 9, 3), nodes=(0, 0, 4, 4), failed=frozenset([3]), speeds=(1.0, 0.5, 1.25, 1.0))
    slots[:, ~topology.usable] = -1
    slots[1, 2] = -1
    return ExpertMap(slot_to_expert=slots, n_experts=E, layer_ids=(0, 7, 60), topology=topology)


def same(found, expected):
    assert (found.counts == expected.counts).all() and found.counts.dtype == np.int64
    assert (found.layer_ids, found.top_k, found.domain, found.n_ranks, found.meta) == (
        expected.layer_ids, expected.top_k, expected.domain, expected.n_ranks, expected.meta,
    )  # fmt: skip
    for name in ("tokens", "phase"):
        a, b = getattr(found, name), getattr(expected, name)
        assert (a is None) == (b is None) and (a is None or (a == b).all()), name


WHOLE = [("jsonl-load", "x.jsonl"), ("parquet-load", "x.parquet"), ("sglang-load", "x.pt"), ("sglang-pass-load", "x.pt"),
         ("vllm-load", "x.json"), ("vllm-lines-load", "x.jsonl")]  # fmt: skip


@pytest.mark.parametrize("trace", [TRACE, BARE], ids=["all known", "counts only"])
@pytest.mark.parametrize(("name", "file"), WHOLE)
def test_loads_come_back_whole(name, file, trace, tmp_path):
    path = write_load(trace, tmp_path / file, format=name)
    assert sniff(path) == ("vllm-load" if name == "vllm-lines-load" else name)
    same(read_load(path), trace)
    assert [p.name for p in tmp_path.iterdir()] == [file]  # no part is left behind


def test_trtllm_statistics_come_back(tmp_path):
    path = write_load(TRACE, tmp_path / "statistics", format="trtllm-load")
    assert sniff(path) == "trtllm-load"
    found = read_load(path)
    assert (found.counts == TRACE.counts).all() and found.layer_ids == LAYERS and found.top_k == 4


@pytest.mark.parametrize("file", ["w.safetensors", "w.npz", "w.pt"])
def test_eplb_weights_come_back(file, tmp_path):
    one = summed(TRACE)
    path = write_load(one, tmp_path / file, format="eplb-load")
    assert sniff(path) == "eplb-load"
    found = read_load(path)
    assert (found.counts == one.counts).all() and found.layer_ids == LAYERS
    with pytest.raises(ValueError, match="5 steps; sum them"):
        write_load(TRACE, tmp_path / file, format="eplb-load")


def test_a_trace_without_steps(tmp_path):
    empty = TRACE.select(np.arange(0))
    for file in ("x.jsonl", "x.parquet"):
        same(read_load(write_load(empty, tmp_path / file)), empty)


@pytest.mark.parametrize("expert_map", [EVEN, holed()], ids=["even", "with holes"])
@pytest.mark.parametrize("file", ["m.jsonl", "m.parquet"])
def test_our_maps_come_back_whole(file, expert_map, tmp_path):
    path = write_map(expert_map, tmp_path / file)
    assert sniff(path) == f"{file.split('.')[1]}-map"
    found = read_map(path)
    assert (found.slot_to_expert == expert_map.slot_to_expert).all()
    assert replace(found, slot_to_expert=EVEN.slot_to_expert) == replace(expert_map, slot_to_expert=EVEN.slot_to_expert)
    assert read_map(path, layer_ids=expert_map.layer_ids[1:]).layer_ids == expert_map.layer_ids[1:]


FOREIGN = [("sglang-map", "m.json"), ("sglang-map", "m.pt"), ("vllm-map", "m.json"), ("trtllm-map", "m.yaml"), ("ascend-map", "m.json"),
           ("eplb-map", "m.pt"), ("eplb-map", "m.npz"), ("eplb-map", "m.safetensors"), ("local-map", "m.npz")]  # fmt: skip


@pytest.mark.parametrize(("name", "file"), FOREIGN)
def test_maps_of_other_engines_come_back(name, file, tmp_path):
    expert_map = EVEN
    if name == "local-map":  # knows no two copies on a rank
        slots = np.stack([np.concatenate([np.arange(E), np.arange(SLOTS - E)])] * 3)
        expert_map = replace(EVEN, slot_to_expert=slots)
    path = write_map(expert_map, tmp_path / file, format=name)
    assert sniff(path) == name
    found = read_map(path, layer_ids=LAYERS)
    assert (found.slot_to_expert == expert_map.slot_to_expert).all()
    assert found.layer_ids == LAYERS and found.n_experts == E
    if name in ("ascend-map", "local-map"):
        assert found.topology.slots == EVEN.topology.slots
    else:
        assert found.topology is None and read_map(path, layer_ids=LAYERS, topology=EVEN.topology).topology == EVEN.topology


def test_maps_say_their_layers(tmp_path):
    """SGLang's rows are all model layers, dense ones trivially filled; the others name theirs."""
    path = write_map(EVEN, tmp_path / "m.json")
    assert json.loads(path.read_text()).keys() == {"physical_to_logical_map"}
    whole = read_map(path)
    assert whole.layer_ids == tuple(range(6)) and (whole.slot_to_expert[0] == np.arange(SLOTS) % E).all() and not whole.missing()
    for name in ("vllm-map", "trtllm-map", "ascend-map", "eplb-map", "local-map"):
        if name != "local-map":
            path = write_map(EVEN, tmp_path / "n.json", format=name)
            assert read_map(path).layer_ids == LAYERS, name
            assert (read_map(path, layer_ids=[5, 3]).slot_to_expert == EVEN.slot_to_expert[[2, 0]]).all(), name
            with pytest.raises(ValueError, match="9"):
                read_map(path, layer_ids=[9])


def test_json_as_text():
    text = json.dumps({"physical_to_logical_map": placement().tolist()})
    assert sniff(text) == "sglang-map" and (read_map(text).slot_to_expert == placement()).all()
    counts = TRACE.counts[0].tolist()
    assert sniff(json.dumps({"logical_count": counts})) == "sglang-load"
    assert (read_load(json.dumps({"logical_count": counts})).counts == TRACE.counts[:1]).all()


@pytest.mark.parametrize("name", [f.name for f in FORMATS if f.what == "map" and f.name not in ("jsonl-map", "parquet-map")])
def test_what_a_format_cannot_say_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="empty|topology|twice"):
        write_map(holed(), tmp_path / "m.json", format=name)
    assert not list(tmp_path.iterdir())


def test_dense_layers_can_be_dropped():
    """Dumps that number all layers of the model have zeros for dense ones."""
    every = np.zeros((5, 6, E), dtype=np.int64)
    every[:, 3:] = TRACE.counts
    dump = LoadTrace(counts=every, layer_ids=tuple(range(6)))
    assert [problem.kind for problem in problems(dump)] == ["zero-layers"]
    same(drop_zero_layers(dump), BARE)


def test_layers_can_be_picked(tmp_path):
    for file in ("x.parquet", "x.jsonl", "x.pt"):
        path = write_load(TRACE, tmp_path / file)
        found = read_load(path, layer_ids=[5, 3])
        assert found.layer_ids == (5, 3) and (found.counts == TRACE.counts[:, [2, 0]]).all()
        with pytest.raises(ValueError, match="9"):
            read_load(path, layer_ids=[9])


def test_a_parquet_file_is_a_table_for_others(tmp_path):
    """Another reader finds one row for each step and layer, with plain columns."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(write_load(TRACE, tmp_path / "x.parquet"))
    assert table.num_rows == 15 and table.column_names == ["step", "layer", "tokens", "phase", "domain", "counts"]
    row = table.slice(7, 1).to_pylist()[0]
    assert (row["step"], row["layer"], row["counts"]) == (2, 4, TRACE.counts[2, 1].tolist()) and row["domain"] == TRACE.domain[2]


def test_random_loads_and_maps_come_back(tmp_path):
    """The first seeds of ``python -m tests.moe.eplb.formats.random_trips``."""
    assert sum(trip(seed, tmp_path) for seed in range(6)) >= 6 * 15
