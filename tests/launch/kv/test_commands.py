"""``bench kv``: the commands at toy size, and what they refuse."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch

from rorqual.launch import cli
from rorqual.launch.bench.kv.record import load, record, save
from rorqual.launch.bench.results import read_results, without_places

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")


def test_the_group_is_listed(capsys):
    assert cli.main(["bench", "kv", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"bench kv {name}" in shown for name in ("keys", "link", "policy", "rig", "sac")) and "bench tune" not in shown


def test_an_unknown_member_is_named(capsys):
    assert cli.main(["bench", "kv", "nonsense"]) == 2
    assert "unknown command 'bench kv nonsense'" in capsys.readouterr().err


def test_policy_writes_rows(tmp_path, capsys):
    words = ["bench", "kv", "policy", "--k", "32", "--steps", "133", "--no-tiny", "--results-dir", str(tmp_path)]
    assert cli.main(words) == 0
    [path] = tmp_path.glob("kv-policy-cpu-*.json")
    rows = read_results(path).rows
    assert {row.params["rows"] for row in rows if row.name == "misses, lru"} == {"1k", "2k", "4k"}
    aimed = [row for row in rows if row.target is not None]
    assert {"misses, score", "misses of the first step", "misses, rows shared out among layers"} <= {row.name for row in aimed}
    assert "published: lru 1k 30.0" in capsys.readouterr().out


def test_a_command_is_noted_without_its_places():
    words = ["bench", "kv", "sac", "--toy", "--output-json", "x.json", "--results-dir=y", "--clients", "4", "--plot", "z.png"]
    assert without_places(words) == ["bench", "kv", "sac", "--toy", "--clients", "4"] and without_places([]) == []


def test_rig_at_toy_size(tmp_path):
    out = tmp_path / "rig.json"
    assert cli.main(["bench", "kv", "rig", "--toy", "--batches", "1", "2", "--steps", "2", "--output-json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["params"]["batch"] for row in rows} == {1, 2}
    assert all(row["met"] for row in rows if row["name"].startswith("unwritten"))


def test_sac_at_toy_size(tmp_path, capsys):
    out = tmp_path / "sac.json"
    words = ["bench", "kv", "sac", "--toy", "--clients", "4", "--output", "10", "--rest-us", "0", "--output-json", str(out)]
    assert cli.main(words) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["name"] for row in rows} >= {"time to the first token", "time between tokens", "throughput"}
    assert all("all resident" in row["peers"] for row in rows if row["name"] == "throughput")
    picture = tmp_path / "sac.png"
    found = cli.main(["bench", "kv", "sac", "--from", str(out), "--plot", str(picture)])
    if find_spec("matplotlib") is None:
        assert found == 2 and "a plot needs matplotlib, which is not installed" in capsys.readouterr().err
    else:
        assert found == 0 and picture.stat().st_size > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["rig"], "bench kv rig needs a CUDA device", marks=no_gpu),
        pytest.param(["sac"], "bench kv sac needs a CUDA device", marks=no_gpu),
        (["sac", "--from", "x.json"], "--from needs --plot FILE"),
        (["sac", "--toy", "--clients", "0"], "--clients and --sharing must be at least 1"),
        (["sac", "--toy", "--contexts", "65536"], "do not hold one request of 65536 tokens"),
        (["policy", "--steps", "10"], "--steps 10 leaves too few steps"),
        (["rig", "--toy", "--hot-rows", "8"], "a hot buffer of 8 rows cannot hold the 32 rows of a step"),
    ],
)
def test_what_cannot_be_done_is_refused(words, message, capsys):
    assert cli.main(["bench", "kv", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_embedded_models_choices_are_recorded(tmp_path):
    traces = record(prompt_tokens=160, steps=3)
    assert len(traces) == 5 and all(len(trace) == 3 for trace in traces)
    for trace in traces:
        for number, selection in enumerate(trace):
            assert len(selection.scores) == 161 + number and len(selection.chosen) == 128
            lowest = selection.scores[selection.chosen].min()
            assert (selection.scores > lowest).sum() <= 128
    save(traces, tmp_path / "t.npz")
    back = load(tmp_path / "t.npz")
    assert (back[4][2].scores == traces[4][2].scores).all() and (back[0][1].chosen == traces[0][1].chosen).all()


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"no")
    with pytest.raises(ValueError, match="is no recorded trace"):
        load(tmp_path / "x.npz")
    with pytest.raises(ValueError, match="cannot be recorded: give more than 128 tokens"):
        record(prompt_tokens=100, steps=3)
