"""Files as other engines write them, written out by hand: what each key means, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from rorqual.moe.eplb.formats import read_load, read_map, sniff

# two MoE layers, four experts, six slots on two ranks: experts 1 and 3 twice in the first layer, 0 and 1 in the second
SLOTS = [[0, 1, 2, 3, 1, 3], [3, 1, 0, 2, 0, 1]]
PHYSICAL = [[[5, 3, 7, 1, 2, 0], [1, 2, 3, 4, 5, 6]], [[0, 0, 0, 0, 0, 0], [9, 0, 0, 0, 0, 0]]]
LOGICAL = [[[5, 5, 7, 1], [8, 8, 4, 1]], [[0, 0, 0, 0], [0, 0, 0, 9]]]


def test_vllm_window_of_slots():
    text = json.dumps({"expert_load_window": PHYSICAL, "physical_to_logical_map": SLOTS})
    assert sniff(text) == "vllm-load" and read_load(text).counts.tolist() == LOGICAL
    one = json.dumps({"expert_load_pass": PHYSICAL[0], "physical_to_logical_map": SLOTS, "moe_layer_ids": [3, 4]})
    assert read_load(one).counts.tolist() == LOGICAL[:1] and read_load(one).layer_ids == (3, 4)
    without = json.dumps({"expert_load_window": PHYSICAL})
    assert read_load(without).n_experts == 6
    found = read_load(without, slot_to_expert=np.array(SLOTS), layer_ids=[3, 4])
    assert found.counts.tolist() == LOGICAL and found.layer_ids == (3, 4)


def test_vllm_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    lines = [{"step": 0, "expert_load": PHYSICAL[0], "physical_to_logical_map": SLOTS}, {"step": 1, "expert_load": PHYSICAL[1]}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert sniff(path) == "vllm-load" and read_load(path).counts.tolist() == LOGICAL
    lines[1]["expert_load"] = PHYSICAL[1][:1]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match="must belong together"):
        read_load(path)
    path.write_text("\n".join(map(json.dumps, [{"expert_load": [[1, 2]]}, {"step": 1}])))
    with pytest.raises(ValueError, match="line 2: has none of"):
        read_load(path)
    path.write_text('{"expert_load": [[1, 2]]}\n{"expert_load": [[1, 2')
    with pytest.raises(ValueError, match="line 2: not valid JSON"):
        read_load(path)


@pytest.mark.parametrize("file", ["x.npy", "x.npz"])
def test_vllm_routed_experts(file, tmp_path):
    ids = np.array([[[0, 1], [2, 3]], [[0, 2], [2, 1]], [[-1, -1], [-1, -1]]], dtype=np.int16)
    path = tmp_path / file
    np.save(path, ids) if file == "x.npy" else np.savez(path, routed_experts=ids)
    assert sniff(path) == "vllm-routed-load"
    found = read_load(path, n_experts=4, layer_ids=[3, 4])
    assert found.counts.tolist() == [[[2, 1, 1, 0], [0, 1, 2, 1]]] and found.top_k == 2 and found.tokens.tolist() == [2]
    with pytest.raises(ValueError, match="give n_experts"):
        read_load(path)
    with pytest.raises(ValueError, match="from 0 to 2"):
        read_load(path, n_experts=3)


def test_sglang_two_dimensional_counts(tmp_path):
    torch.save({"rank": 0, "logical_count": torch.tensor(LOGICAL[0])}, tmp_path / "x.pt")
    assert read_load(tmp_path / "x.pt").counts.tolist() == LOGICAL[:1]


def test_sglang_records_of_two_batches_are_one_pass(tmp_path):
    """Halves of a step, and more than one rank, in one file."""
    halves = [
        {"forward_pass_id": 7, "rank": 0, "gatherer_key": key, "global_physical_count": torch.tensor(counts)}
        for key, counts in (("child_a", PHYSICAL[0]), ("child_b", PHYSICAL[1]))
    ]
    torch.save({"records": halves, "last_physical_to_logical_map": torch.tensor(SLOTS)}, tmp_path / "x.pt")
    found = read_load(tmp_path / "x.pt")
    assert found.counts.tolist() == (np.array(LOGICAL[0]) + LOGICAL[1])[None].tolist() and found.meta["passes"] == "7-7"


def test_sglang_records_without_a_map_are_refused(tmp_path):
    record = {"forward_pass_id": 7, "global_physical_count": torch.tensor(PHYSICAL[0])}
    torch.save({"records": [record]}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="no physical_to_logical_map; give the placement"):
        read_load(tmp_path / "x.pt")
    assert read_load(tmp_path / "x.pt", slot_to_expert=np.array(SLOTS)).counts.tolist() == LOGICAL[:1]
    torch.save({"records": [{"forward_pass_id": 7}]}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="neither global_physical_count nor topk_ids_of_layer"):
        read_load(tmp_path / "x.pt")
    torch.save({"records": []}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="no pass was recorded"):
        read_load(tmp_path / "x.pt")


def test_trtllm_yaml(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(f"num_slots: 6\ninitial_global_assignments:\n  4: {SLOTS[1]}\n  3: {SLOTS[0]}\nlayer_updates_per_iter: 2\n")
    found = read_map(path)
    assert sniff(path) == "trtllm-map" and found.layer_ids == (3, 4) and found.slot_to_expert.tolist() == SLOTS
    assert found.meta == {"layer_updates_per_iter": "2"}


def test_trtllm_statistics_of_ranks(tmp_path):
    for rank in range(2):
        save_file(
            {f"{step}_{3 + i}": np.array(LOGICAL[step][i]) for step in range(2) for i in range(2)}, tmp_path / f"rank{rank}.safetensors"
        )
    (tmp_path / "meta_info.json").write_text(json.dumps({"num_experts": 4, "num_experts_per_token": 2, "ep_size": 2}))
    found = read_load(tmp_path)
    assert sniff(tmp_path) == "trtllm-load" and found.counts.tolist() == (2 * np.array(LOGICAL)).tolist()
    assert found.layer_ids == (3, 4) and found.top_k == 2 and found.n_ranks == 2
    (tmp_path / "rank1.safetensors").unlink()
    with pytest.raises(ValueError, match="ep_size is 2 and 1 ranks have dumped"):
        read_load(tmp_path)
    save_file({"0_3": np.array(LOGICAL[0][0]), "1_4": np.array(LOGICAL[0][0])}, tmp_path / "rank0.safetensors")
    with pytest.raises(ValueError, match=r"\(0, 4\)"):
        read_load(tmp_path)


def test_ascend_map_of_uneven_devices():
    devices = [{"device_id": 1, "device_expert": SLOTS[0][4:]}, {"device_id": 0, "device_expert": SLOTS[0][:4]}]
    found = read_map(json.dumps({"moe_layer_count": 1, "layer_list": [{"layer_id": 5, "device_count": 2, "device_list": devices}]}))
    assert found.slot_to_expert.tolist() == SLOTS[:1] and found.layer_ids == (5,) and found.topology.slots == (4, 2)


def test_eplb_tensors_must_agree(tmp_path):
    """The worked example of EPLB's description (first layer): its three outputs say the same."""
    phy2log = np.array([[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]])
    logcnt = np.array([[1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]])
    save_file({"phy2log": phy2log, "logcnt": logcnt}, tmp_path / "x.safetensors")
    found = read_map(tmp_path / "x.safetensors")
    assert found.n_experts == 12 and not found.missing() and (found.slot_to_expert == phy2log).all()
    logcnt[0, 3] = 2
    save_file({"phy2log": phy2log, "logcnt": logcnt}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="logcnt does not agree"):
        read_map(tmp_path / "x.safetensors")
    torch.save(torch.rand(2, 12), tmp_path / "bare.pt")
    assert sniff(tmp_path / "bare.pt") == "eplb-load"


def test_map_of_local_indices():
    local = [[[0, 1, -1, 2], [-1, 1, 0, -1]]]
    found = read_map(json.dumps({"expert_map": local}))
    assert found.slot_to_expert.tolist() == [[0, 1, 3, 2, 1]] and found.topology.slots == (3, 2)


def test_a_map_that_lacks_experts_says_so():
    found = read_map(json.dumps({"physical_to_logical_map": [[0, 1, 1], [2, 0, 1]]}), n_experts=3)
    assert found.missing() == [(0, 2)]
