"""The run on several GPUs when parts go wrong: the others run, what was measured and why something was not is on file, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rorqual.launch.bench.multi_gpu.command as command
from rorqual.launch.bench.multi_gpu.parts import Part
from rorqual.launch.bench.multi_gpu.strays import MARK, end_strays, marked
from rorqual.launch.bench.results import read_results
from rorqual.launch.cli import parse

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def made_up_part_is_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]))


def part(name: str, code: str, *, ranks: int = 1, limit_s: float = 40.0) -> Part:
    return Part(name=name, module="made_up_part", words=(code, "{out}"), ranks=ranks, limit_s=limit_s)


def run(monkeypatch, tmp_path: Path, parts: list[Part], *more: str, budget: float = 100.0) -> tuple[int, dict[str, str], list[float]]:
    """(exit code, how each part ended, other rows' values)."""
    monkeypatch.setattr(command, "program", lambda *a, **k: parts)
    words = ["--device", "cpu", "--ranks", "2", "--budget-seconds", str(budget), "--log", str(tmp_path / "log")]
    _, args = parse("bench multi-gpu", [*words, "--output-json", str(tmp_path / "out.json"), *more])
    code = command.run(args)
    rows = read_results(tmp_path / "out.json").rows
    ended = {r.name.removeprefix("part: "): r.params["ended"] for r in rows if r.name.startswith("part: ")}
    return code, ended, [r.value for r in rows if not r.name.startswith("part: ")]


def test_parts_that_fail_cost_only_themselves(monkeypatch, tmp_path):
    parts = [
        part("crash", "rows(); raise RuntimeError('torn')"),
        part("garbage", "os.write(1, os.urandom(9999)); rows('[{')"),
        part("silent", "pass"),
        Part(name="absent", module="timeit", words=(), ranks=2, limit_s=1.0, left_out="made_up is not installed"),
        part("left", "rows(); subprocess.Popen(['sleep', '77'], start_new_session=True)"),
        part("good", "rows()"),
    ]
    code, ended, values = run(monkeypatch, tmp_path, parts)
    assert code == 1 and values == [1.5, 1.5, 1.5]
    assert ended["crash"] == "failed with exit code 1: RuntimeError: torn"
    assert ended["garbage"] == "failed: it left no rows" == ended["silent"] and ended["absent"] == "left out: made_up is not installed"
    assert ended["left"] == "done, 1 processes were left and killed" and ended["good"] == "done"
    assert b"torn" in (tmp_path / "log").read_bytes()
    assert run(monkeypatch, tmp_path, [parts[3], parts[5]])[0] == 0, "what is left out on purpose is no failure"
    assert (tmp_path / "log").read_bytes().count(b"########") == 2, "an earlier log stays"


@pytest.mark.slow
def test_ranks_that_die_or_hang_are_gone_when_the_next_part_begins(monkeypatch, tmp_path):
    waits = f"signal.signal(15, signal.SIG_IGN); open('{tmp_path}/pid-' + str(os.getpid()), 'w'); time.sleep(99)"
    parts = [
        part("killed", "os.kill(os.getpid(), 9) if rank == '1' else time.sleep(99)", ranks=2),
        part("hangs", f"rank == '0' and rows(); {waits}", ranks=2, limit_s=8.0),
        part("good", "rows()"),
        part("late", "time.sleep(99)"),
        part("never", "rows()"),
    ]
    start = time.monotonic()
    code, ended, values = run(monkeypatch, tmp_path, parts, budget=60.0)
    assert time.monotonic() - start < 60.0 and code == 1 and values == [1.5, 1.5]
    assert "SIGKILL (did the host run out of memory?)" in ended["killed"] and ended["killed"].startswith("failed with exit code 1")
    assert ended["hangs"] == "ended at its limit" and ended["good"] == "done"
    assert ended["late"] == "ended at its limit" and ended["never"] == "not begun: no time was left"
    pids = [int(p.name.removeprefix("pid-")) for p in tmp_path.glob("pid-*")]
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)


def test_a_signal_ends_the_part_and_keeps_what_was_measured(tmp_path):
    script = f"""
import sys
from test_multi_gpu_faults import command, parse, part
sys.argv = ["rorqual"]
up = "rows(); open({str(tmp_path / "up")!r}, 'w').write(str(os.getpid())); time.sleep(99)"
command.program = lambda *a, **k: [part("first", "rows()"), part("second", up), part("third", "pass")]
words = ["--device", "cpu", "--log", {str(tmp_path / "log")!r}, "--output-json", {str(tmp_path / "out.json")!r}]
sys.exit(command.run(parse("bench multi-gpu", words)[1]))
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 60.0
    while not (tmp_path / "up").exists() or not (tmp_path / "up").read_text():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    early = read_results(tmp_path / "out.json").rows
    assert "not begun: the run ended before it" in [r.params.get("ended") for r in early], "the file is there while parts run"
    process.send_signal(signal.SIGTERM)
    assert process.wait(40.0) == 1
    rows = read_results(tmp_path / "out.json").rows
    ended = [r.params["ended"] for r in rows if r.name.startswith("part: ")]
    assert ended == ["done", "ended at its limit: a signal ended the run", "not begun: the run ended before it"]
    assert [r.value for r in rows if r.name == "x"] == [1.5, 1.5]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "up").read_text()), 0)


def test_results_that_cannot_be_written_any_more_go_elsewhere(monkeypatch, tmp_path, capsys):
    folder = tmp_path / "results"
    folder.mkdir()

    def break_it(*args, **more):
        raise OSError(28, "No space left on device")

    import rorqual.launch.bench.multi_gpu.record as record

    monkeypatch.setattr(record, "write_results", break_it)
    code, _, values = run(monkeypatch, tmp_path, [part("good", "rows()")], "--results-dir", str(folder))
    told = [line.removeprefix("wrote ") for line in capsys.readouterr().out.splitlines() if line.startswith("wrote ")]
    assert values == [1.5] and len(told) == 2 and json.loads(Path(told[1]).read_text())["bench"] == "multi-gpu"
    assert code == 0


def test_an_earlier_result_stays(monkeypatch, tmp_path):
    folder = tmp_path / "results"
    for _ in range(2):
        run(monkeypatch, tmp_path, [part("good", "rows()")], "--results-dir", str(folder))
    names = sorted(p.name for p in folder.iterdir())
    assert len(names) == 2 and names[0].startswith("multi-gpu-2-x-cpu-") and all(name.endswith(".json") for name in names)


def test_only_processes_of_the_part_are_ended():
    mine, other = (subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: value}) for value in ("mine", "other"))
    try:
        assert marked("mine") == [mine.pid]
        assert end_strays("mine") == 1 and mine.wait(5.0) == -signal.SIGKILL and other.poll() is None and end_strays("mine") == 0
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()
