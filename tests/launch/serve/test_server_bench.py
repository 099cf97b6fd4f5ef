"""``bench server``: the whole server in front of a model that costs nothing, once, small; and the reading of profiles."""

import json
import os
import time

import pytest

from rorqual.launch import cli
from rorqual.launch.bench.results import read_results
from rorqual.launch.bench.server.spent import cpu_seconds, hot

pytest.importorskip("fastapi", reason="the server needs pip install 'rorqual[serve]'")


def test_the_server_alone(tmp_path, capsys):
    out = tmp_path / "o.json"
    sizes = ["--num-prompts", "24", "--concurrency", "8", "--input-len", "8", "--output-len", "16", "--runs", "1"]
    assert cli.main(["bench", "server", *sizes, "--output-json", str(out), "--results-dir", str(tmp_path / "r")]) == 0
    got = json.loads(out.read_text())
    assert got["output_tokens"] == 24 * 16 and got["engine_us_per_token"] > 0 and got["http_us_per_token"] > 0
    assert got["tokens_per_core_second"] == pytest.approx(1e6 / (got["engine_us_per_token"] + got["http_us_per_token"]), rel=0.01)
    rows = {row.name: row for row in read_results(next((tmp_path / "r").iterdir())).rows}
    assert rows["server alone, through HTTP streaming"].target == 3000
    assert "a second and core of the server" in capsys.readouterr().out


def test_cpu_time_of_a_process():
    before, end = cpu_seconds([os.getpid()]), time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert 0.1 < cpu_seconds([os.getpid()]) - before < 5


def test_what_is_hot(tmp_path):
    file = tmp_path / "x.stacks"
    file.write_text("main (a.py:1);f (a.py:5);g (b.py:7) 3\nmain (a.py:1);f (a.py:6) 1\nnot a stack\n")
    assert hot(file) == [("g (b.py)", 0.75, 0.75), ("f (a.py)", 0.25, 1.0)]


def test_wrong_settings(capsys):
    assert cli.main(["bench", "server", "--runs", "0"]) == 2
    assert "--runs must be at least 1" in capsys.readouterr().err
    assert cli.main(["bench", "server", "--tokenizer", "/nowhere"]) == 2
    assert "no folder with a tokenizer.json" in capsys.readouterr().err
