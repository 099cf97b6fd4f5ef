"""The latency benchmark around a fake engine: vLLM's keys, iterations, refusals, and the breakdown of a step."""

import json

import pytest
import torch

from rorqual.engine.trace import StepProfile
from rorqual.launch import cli
from rorqual.launch.bench import latency, throughput
from rorqual.launch.bench.results import read_results
from tests.launch.fakes import FakeLLM, fake_open

PROFILE = StepProfile(
    steps=16,
    graph_steps=16,
    step_us=1000.0,
    parts_us={"attention": 600.0, "indexer": 0.0},
    host_gap=0.01,
    idle=0.05,
    kernels_us={"k": 600.0},
)


@pytest.fixture
def llm(monkeypatch):
    fake = FakeLLM()
    for module in (latency, throughput):
        monkeypatch.setattr(module, "open_llm", fake_open(fake))
    return fake


def run_to_json(tmp_path, *words: str) -> dict:
    file = tmp_path / "o.json"
    sizes = ["--input-len", "5", "--output-len", "4", "--batch-size", "3", "--num-iters-warmup", "2", "--num-iters", "4"]
    assert cli.main(["bench", "latency", "m", *sizes, "--output-json", str(file), *words]) == 0
    return json.loads(file.read_text())


def test_keys_are_vllms(llm, tmp_path, capsys):
    got = run_to_json(tmp_path, "--disable-detokenize")
    assert llm.opened == ("m", {"disable_log_stats": True, "skip_tokenizer_init": True})
    assert len(llm.calls) == 6 and llm.resets == 6
    prompts, params = llm.calls[0]
    assert len(prompts) == 3 and all(len(p["prompt_token_ids"]) == 5 for p in prompts)
    assert params.max_tokens == 4 and params.ignore_eos and params.greedy
    assert set(got) == {"avg_latency", "latencies", "percentiles"} and len(got["latencies"]) == 4
    assert got["avg_latency"] == pytest.approx(sum(got["latencies"]) / 4)
    assert list(got["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert "avg latency" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--batch-size", "--n"])
def test_refusals(flag, capsys):
    assert cli.main(["bench", "latency", "m", flag, "0"]) == 2
    assert f"{flag} must be at least 1, found 0" in capsys.readouterr().err


def test_the_breakdown_is_printed_and_written(llm, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(latency, "profile_decode", lambda llm, prompts: PROFILE)
    step = run_to_json(tmp_path)["decode_step"]
    assert step["parts_us"]["attention"] == 600.0 and step["host_gap"] == 0.01 and step["graph_steps"] == 16
    shown = capsys.readouterr().out
    assert "attention" in shown and "60.0 %" in shown and "host gap 1.0 %" in shown and "indexer" not in shown
    assert "decode_step" not in run_to_json(tmp_path, "--no-step-breakdown")


def test_throughput_has_it_too(llm, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(throughput, "profile_decode", lambda llm, prompts: PROFILE)
    file = tmp_path / "o.json"
    assert cli.main(["bench", "throughput", "m", "--num-prompts", "3", "--output-len", "4", "--output-json", str(file)]) == 0
    got = json.loads(file.read_text())
    assert got["decode_step"]["step_us"] == 1000.0 and "decode_step_table" not in got
    assert "decode step 1000 us" in capsys.readouterr().out


def test_a_result_file_has_the_step_and_its_parts(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "profile_decode", lambda llm, prompts: PROFILE)
    run_to_json(tmp_path, "--results-dir", str(tmp_path / "r"))
    (path,) = (tmp_path / "r").glob("latency-*.json")
    rows = {row.name: row for row in read_results(path).rows}
    assert rows["decode step"].value == 1000.0 and rows["decode step, attention"].value == 600.0 and "latency of a batch" in rows
    assert rows["host gap of a decode step"].met and rows["decode step"].params["batch_size"] == 3


def test_no_iterations_leave_the_breakdown_alone(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "profile_decode", lambda llm, prompts: PROFILE)
    llm.engine.grid.device = torch.device("cuda")
    got = run_to_json(tmp_path, "--num-iters", "0", "--num-iters-warmup", "0")
    assert set(got) == {"decode_step"} and llm.calls == []


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_a_folder_that_cannot_be_written_is_named_before_the_run(llm, tmp_path, command, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["bench", command, "m", "--results-dir", str(tmp_path / "file")]) == 2
    assert "--results-dir" in capsys.readouterr().err and llm.calls == []


def test_no_iterations_and_no_breakdown_is_nothing(llm, capsys):
    assert cli.main(["bench", "latency", "m", "--num-iters", "0"]) == 2
    assert "nothing to measure" in capsys.readouterr().err and llm.calls == []
