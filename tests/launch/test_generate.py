"""``generate`` around a fake engine: what is printed and written."""

import json

import pytest

from rorqual.launch import cli, generate
from tests.launch.fakes import FakeLLM, fake_open


@pytest.fixture
def llm(monkeypatch):
    fake = FakeLLM()
    monkeypatch.setattr(generate, "open_llm", fake_open(fake))
    return fake


def test_engine_settings_and_model_reach_the_engine(llm, capsys):
    assert cli.main(["generate", "m", "--prompt", "a", "--tp-size", "2", "--json"]) == 0
    assert llm.opened == ("m", {"disable_log_stats": True, "tensor_parallel_size": 2})
    assert cli.main(["generate", "--model-path", "m", "--prompt", "a", "--max-tokens", "1"]) == 0
    assert llm.opened == ("m", {"disable_log_stats": False})


def test_json_lines_have_the_promised_keys_and_nothing_else_is_printed(llm, capsys):
    assert cli.main(["generate", "m", "--prompt", "abc", "d", "--max-tokens", "2", "--n", "2", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["request"], r["index"], r["prompt"]) for r in rows] == [(0, 0, "abc"), (0, 1, "abc"), (1, 0, "d"), (1, 1, "d")]
    assert rows[0]["text"] == "w0 w1 " and rows[0]["token_ids"] == [0, 1] and rows[0]["finish_reason"] == "length"
    assert rows[0]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": 0}
    assert set(rows[0]["timings"]) == {"ttft_s", "tpot_s", "latency_s"}
    assert 0 <= rows[0]["timings"]["ttft_s"] <= rows[0]["timings"]["latency_s"]


def test_streamed_text_prompts_and_summary(llm, capsys):
    assert cli.main(["generate", "m", "--prompt", "abc", "d", "--max-tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert "<0> abc" in out and "<1> d" in out
    assert "[0] w0 w1 w2" in out and "[1] w0 w1 w2" in out
    assert "2 requests, 4 prompt tokens, 6 output tokens in" in out and "TTFT mean" in out
    assert "expert load  max/mean" in out
    row = next(line for line in out.splitlines() if line.strip().startswith("0 ") and "0-1" in line).split()
    assert row == ["0", "0", "0", "0", "0-1", "4", "12", "4", "3.00", "0.50"]


def test_without_streaming_the_same_text_comes_at_the_end(llm, capsys):
    assert cli.main(["generate", "m", "--prompt", "abc", "--max-tokens", "2", "--no-stream"]) == 0
    assert "w0 w1 " in capsys.readouterr().out


def test_completions_of_a_prompt_are_told_apart(llm, capsys):
    assert cli.main(["generate", "m", "--prompt", "abc", "--max-tokens", "1", "--n", "2"]) == 0
    out = capsys.readouterr().out
    assert "[0.0] w0" in out and "[0.1] w0" in out


def test_output_file(llm, capsys, tmp_path):
    file = tmp_path / "o.jsonl"
    assert cli.main(["generate", "m", "--prompt", "abc", "--chat", "--max-tokens", "1", "--output", str(file)]) == 0
    (row,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert row["prompt"] == "user: abc" and row["text"] == "w0 "
    assert f"wrote {file}" in capsys.readouterr().out


def test_other_ranks_print_nothing(llm, capsys, monkeypatch):
    llm.is_rank0 = False
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(llm, "generate_stream", lambda prompts, params: iter(()))
    monkeypatch.setattr(llm, "stats", lambda: {})
    assert cli.main(["generate", "m", "--prompt", "abc"]) == 0
    assert capsys.readouterr() == ("", "")
