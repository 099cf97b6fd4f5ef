"""JSON and YAML nested more deeply than Python can read: one clean line that names the file and the fix."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rorqual.engine.config import EngineConfig
from rorqual.engine.eplb_settings import eplb_settings
from rorqual.engine.hf_config.model_parser import parse_model_config, read_json
from rorqual.engine.text.chat.messages import check_messages
from rorqual.engine.text.tokenizer import read_json_object
from rorqual.engine.weights.header import read_header
from rorqual.launch import cli
from rorqual.launch.bench.datasets.sharegpt import sharegpt_requests
from rorqual.launch.bench.datasets.trace import trace_requests
from rorqual.launch.bench.serve.config import ServeBenchConfig
from rorqual.launch.bench.sweep.cells import done, server_cases
from rorqual.launch.bench.sweep.config import SweepConfig
from rorqual.moe.eplb.formats import read_load, read_map
from rorqual.parallel.json_text import parse_json

DEPTH = 100_000
DEEP = "[" * DEPTH + "]" * DEPTH
SAID = "more lists and objects inside one another than can be read; flatten them"


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    path = tmp_path / "deep.json"
    path.write_text(DEEP)
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "tiny", "--prompt", "x", "--config"],
        ["generate", "tiny", "--prompts-file"],
        ["bench", "report"],
        ["bench", "compare", "{}"],
        ["bench", "serve", "--config"],
        ["eplb", "analyze"],
    ],
)
def test_commands_name_the_file_and_the_fix(words, deep, capsys):
    assert cli.main([*(word.format(deep) for word in words), str(deep)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rorqual: error: {deep}") and error.count("\n") == 1
    assert SAID in error


@pytest.mark.parametrize("text", ["a: " + "[" * 900 + "]" * 900, "- " * 900 + "a"])
def test_yaml_settings_name_the_file_and_the_fix(text, tmp_path, capsys):
    pytest.importorskip("yaml")
    path = tmp_path / "deep.yaml"
    path.write_text(text)
    assert cli.main(["generate", "tiny", "--prompt", "x", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rorqual: error: {path} is not YAML (more lists and objects") and error.count("\n") == 1


def test_the_position_is_that_of_the_innermost_list():
    with pytest.raises(json.JSONDecodeError) as caught:
        parse_json('{"text": "[[[[\\"[",\n "b": ' + DEEP + "}")
    assert (caught.value.lineno, caught.value.colno) == (2, 6 + DEPTH)
    with pytest.raises(json.JSONDecodeError, match=SAID):
        parse_json(DEEP.encode())
    assert parse_json('{"a": [1]}') == parse_json(b'{"a": [1]}') == {"a": [1]}


def test_a_string_that_never_ends_is_read_once():
    """Clients send such texts: a search that begins anew at each of its quotes takes minutes, in which nobody else is served."""
    begin = time.monotonic()
    with pytest.raises(json.JSONDecodeError, match=SAID) as caught:
        parse_json("[" * DEPTH + '"' + '\\"[' * 100_000 + "\\")
    assert caught.value.pos == DEPTH - 1 and time.monotonic() - begin < 20.0


def test_yaml_of_loads_names_the_file_without_the_loader_in_c(tmp_path, monkeypatch):
    yaml = pytest.importorskip("yaml")
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    path = tmp_path / "deep.yaml"
    path.write_text("- " * 900 + "a")
    with pytest.raises(ValueError, match=rf"deep.yaml: neither JSON nor YAML \({SAID}"):
        read_load(path)


@pytest.mark.parametrize(
    "read",
    [
        read_json,
        read_json_object,
        read_load,
        read_map,
        done,
        lambda path: server_cases(SweepConfig(serve_cmd="x", serve_params=str(path))),
        lambda path: sharegpt_requests(str(path), count=1, output_len=None, seed=0, encode=lambda text: [1]),
        lambda path: trace_requests(str(path), count=None, block=1, seconds_per_unit=1.0, vocab_size=9, seed=0),
    ],
)
def test_readers_name_the_file(read, deep):
    with pytest.raises(ValueError, match="deep.json"):
        read(deep)


def test_a_checkpoint_names_its_config(deep):
    path = deep.rename(deep.with_name("config.json"))
    with pytest.raises(ValueError, match=rf"config.json is not valid JSON: {SAID}"):
        parse_model_config(path.parent)


def test_a_safetensors_header(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode())
    with pytest.raises(ValueError, match=rf"model.safetensors.*header is not valid JSON \({SAID}"):
        read_header(path)


def test_a_folder_of_trtllm(tmp_path):
    (tmp_path / "rank0.safetensors").write_bytes(b"")
    (tmp_path / "meta_info.json").write_text(DEEP)
    with pytest.raises(ValueError, match=rf"meta_info.json: not valid JSON: {SAID}"):
        read_load(tmp_path)


def test_flags_with_json():
    with pytest.raises(ValueError, match=rf"eplb_config is not JSON \({SAID}"):
        eplb_settings(EngineConfig(eplb_config=DEEP))
    with pytest.raises(ValueError, match=rf"--extra-body is not JSON: {SAID}"):
        _ = ServeBenchConfig(extra_body=DEEP).body


def test_arguments_of_tool_calls():
    call = {"function": {"name": "f", "arguments": DEEP}}
    with pytest.raises(ValueError, match=rf"arguments of tool call 'f' are not valid JSON: {SAID}"):
        check_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
