"""The throughput benchmark: workload, figures, the peer's search, and a run around a fake engine."""

import json

import pytest
import torch

from rorqual.launch import cli
from rorqual.launch.bench import hf_peer, throughput
from rorqual.launch.bench.datasets.make import file_requests
from rorqual.launch.bench.datasets.random_ids import random_requests
from rorqual.launch.bench.datasets.request import Request
from rorqual.launch.bench.hf_peer import Mode, Peer, axes, run_peer, search
from rorqual.launch.bench.results import read_results
from tests.checkpoints import TINY
from tests.launch.fakes import FakeLLM, fake_open


def random(**changes):
    base = {"count": 20, "input_len": 10, "output_len": 6, "range_ratio": 0.0, "vocab_size": 50, "seed": 1}
    return random_requests(**{**base, **changes})


def test_random_requests():
    fixed = random()
    assert len(fixed) == 20 and all(len(r.token_ids) == 10 and r.output_len == 6 for r in fixed)
    assert all(0 <= t < 50 for r in fixed for t in r.token_ids)
    assert random() == fixed and random(seed=2) != fixed
    ragged = random(range_ratio=0.5, count=200)
    assert {len(r.token_ids) for r in ragged} == set(range(5, 16)) and {r.output_len for r in ragged} == set(range(3, 10))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "--num-prompts must be at least 1, found 0"),
        ({"input_len": 0}, "--input-len must be at least 1, found 0"),
        ({"output_len": -1}, "--output-len must be at least 1, found -1"),
        ({"range_ratio": 1.0}, "--random-range-ratio must be from 0 to below 1, found 1.0"),
    ],
)
def test_bad_workloads(changes, message):
    with pytest.raises(ValueError, match=message):
        random(**changes)


def test_file_requests_takes_the_first_prompts(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("a\nbb\nccc\n")
    found = file_requests(str(file), count=2, output_len=4, encode=lambda item: [1] * len(item.text))
    assert found == [Request(token_ids=[1], text="a", output_len=4), Request(token_ids=[1, 1], text="bb", output_len=4)]
    with pytest.raises(ValueError, match="--output-len"):
        file_requests(str(file), count=2, output_len=0, encode=lambda item: [1])


# ---- the run


@pytest.fixture
def llm(monkeypatch):
    fake = FakeLLM()
    monkeypatch.setattr(throughput, "open_llm", fake_open(fake))
    return fake


def run_to_json(tmp_path, *words: str) -> dict:
    file = tmp_path / "o.json"
    sizes = ["--num-prompts", "3", "--input-len", "5", "--output-len", "4"]
    assert cli.main(["bench", "throughput", "m", *sizes, "--output-json", str(file), *words]) == 0
    return json.loads(file.read_text())


def test_keys_are_vllms_and_counts_are_exact(llm, tmp_path, capsys):
    got = run_to_json(tmp_path, "--warmup-requests", "2", "--tp-size", "2")
    assert llm.opened == ("m", {"disable_log_stats": True, "tensor_parallel_size": 2})
    assert (got["num_requests"], got["total_num_tokens"], got["num_prompt_tokens"], got["num_output_tokens"]) == (3, 27, 15, 12)
    for key, count in (("requests_per_second", 3), ("tokens_per_second", 27), ("output_tokens_per_second", 12)):
        assert got[key] == pytest.approx(count / got["elapsed_time"])
    warm, timed = llm.calls
    assert len(warm[0]) == 2 and len(timed[0]) == 3
    assert all(p.ignore_eos and p.max_tokens == 4 and p.greedy for p in timed[1])
    assert "output tokens/s" in capsys.readouterr().out


def test_a_file_as_dataset(llm, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"messages": [{"role": "user", "content": "x"}]}\n{"prompt_token_ids": [1, 2]}\n')
    assert run_to_json(tmp_path, "--dataset-path", str(prompts))["num_prompt_tokens"] == 3 + 1 + 2


def test_a_file_dataset_needs_a_file(llm, capsys):
    assert cli.main(["bench", "throughput", "m", "--dataset", "file"]) == 2
    assert "--dataset file needs --dataset-path FILE" in capsys.readouterr().err


def test_short_completions_are_a_bug_not_a_result(llm, monkeypatch):
    whole = llm.generate

    def short(prompts, params, **kw):
        outputs = whole(prompts, params, **kw)
        outputs[-1].outputs[0].token_ids.pop()
        return outputs

    monkeypatch.setattr(llm, "generate", short)
    with pytest.raises(RuntimeError, match="1 requests did not generate the tokens asked for"):
        cli.main(["bench", "throughput", "m", "--num-prompts", "3", "--output-len", "4", "--warmup-requests", "0"])


@pytest.mark.parametrize(("ratio", "met"), [("0.000001", True), ("1000000000", False)])
def test_comparison_and_result_file(llm, tmp_path, monkeypatch, ratio, met):
    mode = Mode(attention="sdpa", experts="eager", cache="dynamic", threads=1, batch=3)
    peer = {"seconds": 2.0, "mode": vars(mode), "modes_tried": 5, "version": "9"}
    monkeypatch.setattr(throughput, "run_peer", lambda *a, **k: peer)
    folder = tmp_path / "results"
    got = run_to_json(tmp_path, "--compare", "hf", "--results-dir", str(folder), "--target-ratio", ratio)
    assert got["peer"]["output_tokens_per_second"] == 6.0
    assert got["ratio"] == pytest.approx(got["output_tokens_per_second"] / 6.0)
    (file,) = folder.iterdir()
    (row,) = read_results(file).rows
    assert row.value == got["output_tokens_per_second"] and list(row.peers.values()) == [6.0] and row.met is met


def test_the_peer_alone(llm, tmp_path, monkeypatch):
    mode = Mode(attention="sdpa", experts="eager", cache="dynamic", threads=1, batch=3)
    monkeypatch.setattr(throughput, "run_peer", lambda *a, **k: {"seconds": 2.0, "mode": vars(mode), "modes_tried": 5, "version": "9"})
    got = run_to_json(tmp_path, "--backend", "hf")
    assert got["output_tokens_per_second"] == 6.0 and got["backend"] == "hf" and llm.calls == []


# ---- the peer


def test_search_climbs_to_the_best_mode_and_skips_what_does_not_work():
    choices = axes(40, "cpu", 4)
    assert choices["threads"] == [4, 1] and choices["batch"] == [40, 32, 16, 8]
    assert axes(5, "cpu", 1)["batch"] == [5] and axes(5, "cuda", 4)["threads"] == [0]
    seen = []

    def rate(mode):
        seen.append(mode)
        if mode.experts == "grouped_mm":
            return 0.0
        return 1.0 + (mode.attention == "eager") + (mode.cache == "static") + (mode.threads == 1) + (mode.batch == 16)

    tried = search(choices, rate)
    assert tried[0] == (Mode(attention="eager", experts="batched_mm", cache="static", threads=1, batch=16), 5.0)
    assert len(seen) == len(set(seen)) < 25


def test_no_working_mode_is_a_users_error(monkeypatch):
    monkeypatch.setattr(hf_peer.Peer, "_generate", lambda *a: (_ for _ in ()).throw(RuntimeError("no")))
    said = []
    with pytest.raises(ValueError, match="works in no mode"):
        run_peer(TINY, random(count=2), dtype="float32", device="cpu", threads=1, finalists=1, say=said.append)
    assert said and all("does not work here (no)" in s for s in said)


def test_the_peer_really_generates():
    said: list[str] = []
    threads = torch.get_num_threads()
    requests = [Request(token_ids=[0, 886, 266], output_len=3), Request(token_ids=[0, 5], output_len=2)]
    peer = Peer(TINY, requests, dtype="float32", device="cpu", say=said.append)
    mode = Mode(attention="sdpa", experts="grouped_mm", cache="dynamic", threads=1, batch=2)
    assert peer.trial(mode) > 0 and peer.full(mode) > 0
    torch.set_num_threads(threads)
    assert [r.output_len for r in peer.requests] == [2, 3]
    assert len(said) == 1 and "output tokens/s in a trial" in said[0]
