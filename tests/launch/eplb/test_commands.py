"""`rorqual eplb`: every command on a small load, and users' errors in one line."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from rorqual.launch import cli
from rorqual.launch.eplb import record_command
from rorqual.moe.eplb.formats import read_load, read_map, write_map
from tests.launch.fakes import FakeLLM, fake_open

SMALL = ["--layers", "3", "--experts", "16", "--top-k", "2", "--steps", "30", "--tokens", "512", "--drift", "5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A load, a later one, a map for the first and one that follows the second."""
    found = tmp_path_factory.mktemp("eplb")
    words = [
        ["synth", *SMALL, "--out", str(found / "load.parquet")],
        ["synth", *SMALL, "--seed", "1", "--out", str(found / "later.jsonl")],
        ["plan", str(found / "load.parquet"), "--ranks", "4", "--nodes", "2", "--redundant", "8", "--out", str(found / "map.parquet")],
        ["plan", str(found / "later.jsonl"), "--previous", str(found / "map.parquet"), "--out", str(found / "next.json")],
    ]
    for one in words:
        assert cli.main(["eplb", *one]) == 0
    return found


def said(capsys, *words):
    assert cli.main(["eplb", *map(str, words)]) == 0
    return capsys.readouterr().out


def error_of(capsys, *words):
    assert cli.main(["eplb", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    last = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert len(last) == 1 and last[0].startswith("rorqual: error: ")
    return last[0].removeprefix("rorqual: error: ")


def test_synth_writes_what_was_asked_for(folder):
    trace = read_load(folder / "load.parquet")
    assert trace.counts.shape == (30, 3, 16) and trace.layer_ids == (3, 4, 5) and trace.top_k == 2
    assert (trace.counts.sum(2) == 1024).all()


def test_analyze(folder, capsys):
    text = said(capsys, "analyze", folder / "load.parquet", "--ranks", 4)
    for word in (
        "30 steps, 3 MoE layers (3-5) of 16 experts",
        "mean/max (SGLang)",
        "(max-mean)/mean (TRT-LLM)",
        "still hottest later",
        "orth it",
    ):
        assert word in text
    found = json.loads(said(capsys, "analyze", folder / "load.parquet", "--ranks", 4, "--json"))
    assert found["rank_balance"]["all steps"]["imbalance"] > 1 and found["foresight"]["promised"] < found["foresight"]["in_order"]
    assert "Give --ranks N" in said(capsys, "analyze", folder / "load.parquet")


def test_plans_follow_a_load_and_move_little(folder, capsys):
    made, after = read_map(folder / "map.parquet"), read_map(folder / "next.json", n_experts=16)
    assert made.slot_to_expert.shape == (3, 24) and made.topology.nodes == (0, 0, 1, 1) and made.layer_ids == (3, 4, 5)
    assert (after.slot_to_expert >= 0).all()  # SGLang's format knows no empty slots
    words = ["plan", folder / "later.jsonl", "--previous", folder / "map.parquet", "--json"]
    found = json.loads(said(capsys, *words))
    assert found["after"]["imbalance"] < found["before"]["imbalance"] and 0 < found["after"]["moved_share"] < 0.6
    stay = json.loads(said(capsys, *words, "--budget", "0"))
    assert stay["after"]["moved_experts"] == 0
    slack = json.loads(said(capsys, "plan", folder / "load.parquet", "--ranks", 4, "--redundant", 8, "--objective", "slack", "--json"))
    assert slack["after"]["imbalance"] < 1.05 < slack["before"]["imbalance"]
    text = said(capsys, "plan", folder / "load.parquet", "--ranks", 4, "--redundant", 8, "--explain", "4:3")
    assert "layer 4, expert 3: load" in text and "planned from nothing" in text


def test_a_budget_holds_where_empty_slots_are_filled(folder, capsys, tmp_path):
    words = ["plan", folder / "later.jsonl", "--previous", folder / "map.parquet", "--budget", "3", "--expert-bytes", "1", "--json"]
    found = json.loads(said(capsys, *words, "--out", tmp_path / "m.json"))
    assert found["after"]["moved_experts"] <= 3 and (read_map(tmp_path / "m.json").slot_to_expert >= 0).all()


def test_compare(folder, capsys):
    text = said(capsys, "compare", folder / "later.jsonl", folder / "map.parquet", folder / "next.json")
    assert "means/maxima (vLLM)" in text and "the loss of a rank loses up to" in text
    found = json.loads(said(capsys, "compare", folder / "later.jsonl", folder / "map.parquet", folder / "next.json", "--json"))
    first, second = found.values()
    assert first["bytes_to_move"] == 0 < second["bytes_to_move"] and second["balance"]["imbalance"] < first["balance"]["imbalance"]


def test_simulate(folder, capsys):
    words = ["simulate", folder / "load.parquet", "--ranks", 4, "--redundant", 8]
    text = said(capsys, *words)
    assert "a plan every 6 steps from the last 6" in text and "With perfect balance a step takes" in text
    found = json.loads(said(capsys, *words, "--policies", "none", "live", "--interval", 10, "--start", folder / "map.parquet", "--json"))
    assert [one["policy"] for one in found["policies"]] == ["none", "live"]
    assert all(one["step_ms"] > found["floor_step_ms"] for one in found["policies"])


def test_a_machine_that_the_published_algorithm_cannot_plan_for_is_simulated_without_it(folder, capsys):
    words = ["simulate", folder / "load.parquet", "--ranks", 4, "--redundant", 10, "--failed", 3, "--json"]
    assert cli.main(["eplb", *map(str, words)]) == 0
    out, err = capsys.readouterr()
    assert "note: without policy eplb: EPLB plans for ranks of equal size" in err
    found = json.loads(out)["policies"]
    assert [one["policy"] for one in found] == ["none", "static", "incremental", "live"]
    assert found[1]["balance_of_all_steps"]["imbalance"] < found[0]["balance_of_all_steps"]["imbalance"]


def test_advise(folder, capsys):
    text = said(capsys, "advise", folder / "load.parquet", "--ranks", 4, "--target", 1.05)
    assert "<- the least memory for imbalance 1.05" in text
    found = json.loads(said(capsys, "advise", folder / "load.parquet", "--ranks", 4, "--slots", 16, 24, "--json"))
    assert [one["slots"] for one in found["options"]] == [16, 24]


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("load.parquet", "dump.pt"),
        ("load.parquet", "x.jsonl"),
        ("next.json", "m.npz"),
        ("next.json", "m.yaml"),
        ("map.parquet", "m.jsonl"),
    ],
)
def test_convert_and_back(folder, capsys, tmp_path, name, again):
    said(capsys, "convert", folder / name, "--out", tmp_path / again, "--experts", 16)
    text = said(capsys, "convert", tmp_path / again, "--out", tmp_path / f"back.{name.split('.')[1]}", "--experts", 16)
    assert text.splitlines()[-1] == f"wrote {tmp_path / f'back.{name.split(chr(46))[1]}'}"
    if name.startswith("load"):
        assert (read_load(tmp_path / "back.parquet").counts == read_load(folder / name).counts).all()
    else:
        back = read_map(tmp_path / f"back.{name.split('.')[1]}", n_experts=16)
        assert (back.slot_to_expert == read_map(folder / name, n_experts=16).slot_to_expert).all()


def test_report_needs_no_more_than_a_load(folder, capsys, tmp_path):
    pytest.importorskip("plotly", reason="plotly is not installed")
    text = said(
        capsys, "report", folder / "later.jsonl", "--previous", folder / "map.parquet", "--out", tmp_path / "r.html", "--title", "Mine"
    )
    assert "open it in any browser" in text and "<h1>Mine</h1>" in (tmp_path / "r.html").read_text()


def test_record_asks_the_engine_for_every_step(monkeypatch, capsys, tmp_path, folder):
    asked = {}

    class Recording(FakeLLM):
        def generate(self, prompts, params, **more):
            (tmp_path / "made.parquet").write_bytes((folder / "load.parquet").read_bytes())
            return super().generate(prompts, params, **more)

    def opened(model, settings):
        asked.update(settings, model=model)
        return fake_open(Recording())(model, settings)

    monkeypatch.setattr(record_command, "open_llm", opened)
    text = said(capsys, "record", "--out", tmp_path / "made.parquet", "--prompt", "a", "b", "--repeat", 2, "--max-tokens", 4)
    assert asked["model"] == "tiny" and asked["expert_distribution_recorder_mode"] == "stat"
    assert asked["expert_distribution_dump"] == str(tmp_path / "made.parquet") and "30 steps, 3 MoE layers" in text


def test_record_runs_the_embedded_model(capsys, tmp_path):
    words = [
        "record",
        "--out",
        tmp_path / "tiny.parquet",
        "--prompt",
        "Emma was",
        "--max-tokens",
        3,
        "--temperature",
        0,
        "--dtype",
        "float32",
    ]
    assert "1 requests in" in said(capsys, *words)
    trace = read_load(tmp_path / "tiny.parquet")
    assert trace.n_steps >= 3 and trace.layer_ids == (1, 2, 3, 4) and trace.top_k == 4
    assert (trace.counts.sum(2) == trace.tokens[:, None] * 4).all() and trace.tokens[-1] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan"], "the following arguments are required: LOAD"),
        (["plan", "/nowhere/l.parquet"], "/nowhere/l.parquet: No such file or directory"),
        (["plan", "LOAD"], "the input does not say how many ranks there are; give --ranks N"),
        (["plan", "LOAD", "--ranks", "4", "--slots", "12"], "16 experts do not fit into 12 slots; give --redundant 4 or more"),
        (
            ["plan", "LOAD", "--ranks", "4", "--redundant", "8", "--failed", "0", "1"],
            "16 experts do not fit into 12 slots (12 of 24 are on failed",
        ),
        (["plan", "LOAD", "--ranks", "40"], "16 slots, 40 ranks, 1 nodes: needs 1 <= nodes <= ranks <= slots"),
        (["plan", "LOAD", "--ranks", "4", "--slots", "16", "--redundant", "1"], "--slots and --redundant say the same thing"),
        (
            ["plan", "LOAD", "--ranks", "4", "--redundant", "4", "--previous", "MAP"],
            "MAP has 24 slots a layer and the machine 20",
        ),
        (["plan", "LOAD", "--ranks", "4", "--out", "x.txt"], "--out x.txt: the name must end in one of .json"),
        (["plan", "LOAD", "--ranks", "4", "--out", "x.json", "--to", "best"], "--to best: a map is written as one of"),
        (["plan", "LOAD", "--ranks", "4", "--explain", "9:0"], "--explain 9:0: layers are 3 to 5, experts 0 to 15"),
        (["plan", "LOAD", "--ranks", "4", "--explain", "x"], "--explain needs LAYER:EXPERT, for example 3:0, found 'x'"),
        (["plan", "LOAD", "--ranks", "4", "--copy-gbs", "0"], "--copy-gbs must be above 0, found 0.0"),
        (["plan", "LOAD", "--ranks", "4", "--layer-us", "-1"], "--layer-us must be above 0, found -1.0; give a finite number"),
        (["plan", "LOAD", "--ranks", "4", "--token-us", "inf"], "--token-us must be above 0, found inf; give a finite number"),
        (["plan", "LOAD", "--ranks", "4", "--expert-bytes", "0"], "cost: expert_bytes and copy_bytes_per_second must be above 0, found 0"),
        (
            ["plan", "LOAD", "--ranks", "4", "--budget", "0"],
            "--budget and --horizon weigh moves from what is placed now: give --previous MAP",
        ),
        (["plan", "LOAD", "--ranks", "4", "--explain", "3:\u00b2"], "--explain needs LAYER:EXPERT"),
        (
            ["plan", "LOAD", "--ranks", "6", "--slots", "24", "--previous", "MAP"],
            "MAP was made for ranks of 6, 6, 6, 6 slots and the machine",
        ),
        (["compare", "LOAD", "MAP", "--ranks", "2"], "MAP was made for ranks of 6, 6, 6, 6 slots and the machine has 12, 12: other"),
        (["simulate", "LOAD", "--ranks", "4", "--groups", "0"], "simulate: n_groups must be 1 (no groups) or more, found 0"),
        (["convert", "LOAD", "--layers", "3", "3", "--out", "x.pt"], "LOAD: layers [3, 3] were asked for, some twice"),
        (["synth", "--out", "x.npz", "--steps", "2"], "--out x.npz: EPLB's tensors hold one load without steps"),
        (["record", "--out", "x.npz", "--prompt", "a"], "--out x.npz: EPLB's tensors hold one load without steps"),
        (["plan", "MAP", "--ranks", "4"], "MAP: is a map (parquet-map), a load was asked for"),
        (["compare", "LOAD", "LOAD"], "LOAD: is a load (parquet-load), a map was asked for"),
        (["simulate", "LOAD", "--ranks", "4", "--policies", "best"], "unknown policy 'best'; known are: none, eplb"),
        (["simulate", "LOAD", "--ranks", "4", "--interval", "30"], "simulate: the trace has 30 steps and the first plan is made after 30"),
        (["advise", "LOAD"], "the input does not say how many ranks there are; give --ranks N"),
        (["convert", "LOAD", "--out", "/nowhere/x.pt"], "--out /nowhere/x.pt cannot be written: No such file or directory"),
        (["synth", "--out", "x.parquet", "--experts", "4", "--top-k", "8"], "synth: needs layers, experts, steps and tokens"),
        (["record", "--out", "x.txt", "--prompt", "a"], "--out x.txt: the name must end in one of"),
        (["record", "--out", "x.parquet", "--repeat", "0"], "--repeat must be 1 or more, found 0"),
    ],
)
def test_errors_are_one_line(folder, capsys, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    places = {"LOAD": str(folder / "load.parquet"), "MAP": str(folder / "map.parquet")}
    found = error_of(capsys, *(places.get(word, word) for word in words))
    assert found.startswith(
        message.replace("MAP", places["MAP"]).replace("LOAD", places["LOAD"]) if message[:3] in ("MAP", "LOA") else message
    )
    assert not any(tmp_path.iterdir())


def test_a_load_of_another_model_is_refused(folder, capsys, tmp_path):
    said(capsys, "synth", *SMALL[:2], "--experts", 24, "--steps", 5, "--out", tmp_path / "other.parquet")
    message = error_of(capsys, "compare", tmp_path / "other.parquet", folder / "map.parquet", "--ranks", 4)
    assert message == f"{folder / 'map.parquet'}: expert map: has 16 experts, and 24 were expected"


def test_dumps_of_single_ranks_are_noticed_and_summed(capsys, tmp_path):
    whole = np.random.default_rng(0).integers(100, 900, (6, 3, 16))
    names = []
    for rank in range(4):
        part = np.zeros_like(whole)
        part[:, :, 4 * rank : 4 * rank + 4] = whole[:, :, 4 * rank : 4 * rank + 4]
        names.append(tmp_path / f"expert_distribution_recorder_1700000000.5_{rank}.pt")
        torch.save({"rank": rank, "logical_count": torch.from_numpy(part)}, names[-1])
    assert cli.main(["eplb", "analyze", str(names[1])]) == 0
    assert "note: " in capsys.readouterr().err
    said(capsys, "convert", *names, "--out", tmp_path / "sum.parquet")
    said(capsys, "convert", tmp_path, "--out", tmp_path / "folder.parquet")
    for name in ("sum.parquet", "folder.parquet"):
        assert (read_load(tmp_path / name).counts == whole).all()
    assert cli.main(["eplb", "analyze", str(tmp_path / "sum.parquet")]) == 0
    assert "one rank" not in capsys.readouterr().err


def test_dense_layers_and_what_is_suspicious(capsys, tmp_path):
    counts = np.random.default_rng(0).integers(1, 50, (4, 5, 16))
    counts[:, :2] = 0
    np.savez(tmp_path / "dump.npz", weight=counts.sum(0))
    text = said(capsys, "analyze", tmp_path / "dump.npz")
    assert "3 MoE layers (2-4) of 16 experts" in text
    np.savez(tmp_path / "zero.npz", weight=np.zeros((3, 16), dtype=np.int64))
    assert "nothing was routed: all counts are zero" in error_of(capsys, "analyze", tmp_path / "zero.npz")


def test_a_map_of_other_layers_is_refused(folder, tmp_path, capsys):
    load, path = folder / "load.parquet", folder / "map.parquet"  # of the layers 3 to 5
    for ids, fits in (([0, 1, 2], True), ([7, 8, 9], False)):
        other = tmp_path / f"{ids[0]}.jsonl"
        write_map(replace(read_map(path), layer_ids=tuple(ids)), other)
        if fits:  # it does not know the model's numbers
            assert "max/mean" in said(capsys, "compare", load, path, other)
        else:
            assert "has the layers 7, 8, 9 and the load 3, 4, 5, which do not match" in error_of(capsys, "compare", load, path, other)


def test_a_plan_after_a_failure_shows_what_was_before(folder, capsys):
    load, path = folder / "load.parquet", folder / "map.parquet"
    words = ["plan", load, "--previous", path, "--json"]
    whole = json.loads(said(capsys, *words))["before"]
    failed = json.loads(said(capsys, *words, "--failed", "1"))
    assert failed["before"] == whole and failed["after"]["moved_experts"] > 0
    assert f"{path} before the failure" in said(capsys, *words[:-1], "--failed", "1")
