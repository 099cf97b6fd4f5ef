"""Sweeps over servers that are started and ended, their frontier, and what can be wrong with them."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from rorqual.launch import cli
from rorqual.launch.bench.serve.pareto import frontier, points
from rorqual.launch.bench.sweep import server as sweep_server
from rorqual.launch.bench.sweep.config import devices_of, layout_flags
from rorqual.launch.bench.sweep.server import serving, tail

SERVE = shlex.join([sys.executable, "-m", "tests.launch.serve.stand_in", "--port", "{port}"])
LOAD = ["--dataset", "random-ids", "--input-len", "4", "--output-len", "4", "--disable-tqdm", "--prompts-per-client", "2"]


def sweep(folder, *words):
    return cli.main(["bench", "sweep", *LOAD, "-o", str(folder), *words])


def test_layouts_and_loads(tmp_path, capsys):
    words = ["--serve-cmd", SERVE, "--layouts", "tp2", "dp2", "--concurrency", "1", "4"]
    assert sweep(tmp_path, *words, "--dry-run") == 0
    plan = capsys.readouterr().out
    assert plan.count("concurrency=") == 4 and "--tensor-parallel-size 2" in plan and not (tmp_path / "sweep.jsonl").exists()
    assert sweep(tmp_path, *words) == 0
    out = capsys.readouterr().out
    runs = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert [(r["layout"], r["max_concurrency"], r["completed"]) for r in runs] == [
        ("tp2", 1, 2),
        ("tp2", 4, 8),
        ("dp2", 1, 2),
        ("dp2", 4, 8),
    ]
    assert all(r["devices"] == 2 and r["failed"] == 0 and r["command"] for r in runs)
    assert "output tokens/s a device" in out and "dp2" in out and (tmp_path / "sweep.html").stat().st_size > 1e5
    assert runs[0]["median_tpot_ms"] < runs[2]["median_tpot_ms"], "tp2 has the faster tokens"
    assert sweep(tmp_path, *words) == 2 and "add to them with --resume" in capsys.readouterr().err
    (tmp_path / "sweep.jsonl").write_text("".join(json.dumps(r) + "\n" for r in runs[:3]))
    assert sweep(tmp_path, *words, "--resume") == 0
    again = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert again[:3] == runs[:3] and again[3]["sweep_load"] == runs[3]["sweep_load"] and len(again) == 4


def test_a_server_that_ends_is_told_with_its_last_words(tmp_path, capsys):
    assert sweep(tmp_path, "--serve-cmd", SERVE + " --broken") == 2
    err = capsys.readouterr().err
    assert "ended with exit code 1 before it listened" in err and "no weights at all" in err
    assert sweep(tmp_path, "--serve-cmd", "/no/such/program") == 2
    assert "/no/such/program cannot be started" in capsys.readouterr().err


def test_servers_end_with_all_their_processes_even_those_that_do_not_want_to(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_server, "DRAIN_S", 0.5)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    code = (
        "import socket, subprocess, sys, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid, flush=True); time.sleep(0.5)\n"
        "s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(60)\n"
    )
    port = sweep_server.free_port()
    log = tmp_path / "log"
    with serving([sys.executable, "-c", code, str(port)], port, log, 20.0) as process:
        inner = int(log.read_text().split()[0])
        os.kill(inner, 0)
    assert process.returncode == -signal.SIGKILL
    for _ in range(100):  # the child is reaped by whoever is its parent now
        if not _runs(inner):
            break
        time.sleep(0.05)
    assert not _runs(inner) and tail(log).endswith("up")


def _runs(pid):
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(found) and not found.startswith("Z")


def test_a_server_that_never_listens_is_given_up(tmp_path):
    with pytest.raises(ValueError, match="did not listen at port .* within 0.5 s"):
        with serving([sys.executable, "-c", "import time; time.sleep(60)"], sweep_server.free_port(), tmp_path / "log", 0.5):
            pass


def test_layout_words():
    assert layout_flags("dp4tp2") == ["--data-parallel-size", "4", "--tensor-parallel-size", "2"] and devices_of("pp2dp4tp2") == 16
    for wrong in ("tp", "8", "tp2tp4", "ep8", "tp8!"):
        with pytest.raises(ValueError, match="a layout is written such as"):
            layout_flags(wrong)


def test_the_frontier_holds_what_nobody_beats():
    def run(tpot, rate, **more):
        return {
            "median_tpot_ms": tpot,
            "output_throughput": rate,
            "completed": 1,
            "duration": 1.0,
            "layout": "x",
            "max_concurrency": 2,
            "devices": 1,
            **more,
        }

    runs = [run(10, 50), run(20, 90), run(25, 80), run(12, 60), run(10, 40), run(None, 999), run(20, 140, devices=2)]
    best = frontier(points(runs))
    assert [(p.speed, p.throughput) for p in best] == [(100, 50), (pytest.approx(83.3, abs=0.1), 60), (50, 90)]
    whole = points([run(20, 140, devices=2), run(20, 90, devices=None)])
    assert [p.throughput for p in whole] == [140, 90], "shares of devices are compared with shares only"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layouts", "tp2"], "need --serve-cmd"),
        (["--concurrency", "0"], "must be above 0"),
        (["--num-runs", "0"], "--num-runs must be at least 1"),
        (["--serve-cmd", "x", "--serve-params", "{file}"], "must be a list of objects"),
    ],
)
def test_wrong_settings_are_named(words, message, tmp_path, capsys):
    (tmp_path / "p.json").write_text("[1]")
    assert sweep(tmp_path, *[w.replace("{file}", str(tmp_path / "p.json")) for w in words]) == 2
    assert message in capsys.readouterr().err


def test_sets_of_flags(tmp_path, capsys):
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"small": {"max_num_seqs": 4, "enable_prefix_caching": False}, "big": {"max-num-seqs": 64}}))
    assert sweep(tmp_path, "--serve-cmd", "serve x", "--serve-params", str(file), "--num-runs", "2", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "small: serve x --port 0 --max-num-seqs 4 --no-enable-prefix-caching" in out and "big: " in out and out.count("run=1") == 2
