"""The run on several GPUs: which layouts and parts it has, and that a part that fails or takes too long costs only itself."""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import Path

import pytest

from rorqual.launch.bench.multi_gpu.command import _scaling, run
from rorqual.launch.bench.multi_gpu.layouts import layouts, title
from rorqual.launch.bench.multi_gpu.parts import Outcome, Part, command, read_rows, run_part, write_rows
from rorqual.launch.bench.multi_gpu.program import GROUPS, program
from rorqual.launch.bench.multi_gpu.slice import in_order, make_prompts
from rorqual.launch.bench.results import Row
from rorqual.launch.cli import parse


def test_layouts_are_all_products_that_the_model_allows():
    found = layouts(8, heads=8, layers=5, experts=16)
    assert all(math.prod(layout.values()) == 8 for layout in found)
    assert [title(x) for x in found] == [
        "pp1 dp1 tp8", "pp1 dp2 tp4", "pp1 dp4 tp2", "pp1 dp8 tp1", "pp2 dp1 tp4", "pp2 dp2 tp2", "pp2 dp4 tp1", "pp4 dp1 tp2",
        "pp4 dp2 tp1",
    ]  # fmt: skip
    assert [title(x) for x in layouts(2, heads=3, layers=1, experts=16)] == ["pp1 dp2 tp1"]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_program_writes_rows_and_fits_its_time(ranks, device):
    parts = program(ranks, device=device, only=GROUPS, right=Path("right.json"))
    assert len({p.name for p in parts}) == len(parts) and {p.ranks for p in parts} == {1, ranks}
    for part in parts:
        words = command(part, Path("/somewhere/rows.json"))
        assert "{out}" not in " ".join(words) and part.limit_s <= 120
        assert ("--nproc-per-node" in words) == (part.ranks > 1)
    full = program(ranks, device=device, only=("full",), right=Path("x"))
    assert [p.module.rpartition(".")[2] for p in full] == ["full"] * 4 and len({p.name for p in full}) == 4
    assert [p.module.rpartition(".")[2] for p in program(ranks, device=device, only=("pool",), right=Path("x"))] == ["pool"]


def part(code: str, limit_s: float = 20.0) -> Part:
    return Part(name="made up", module="timeit", words=("-n", "1", "-r", "1", code), ranks=1, limit_s=limit_s)


def row(value: float) -> Row:
    return Row(name="x", params={}, value=value, unit="s", better="lower")


def test_a_part_that_fails_keeps_the_rows_it_wrote(tmp_path):
    out = tmp_path / "rows.json"
    write_rows(str(out), [row(1.5)])
    with open(tmp_path / "log", "wb") as log:
        outcome = run_part(part("raise RuntimeError"), out, log, env={}, limit_s=20.0)
    assert outcome.code == 1 and "exit code 1" in outcome.note and [r.value for r in outcome.rows] == [1.5]


def test_a_part_is_ended_at_its_limit_with_all_its_processes(tmp_path):
    mark = tmp_path / "alive"
    code = f"import subprocess, time; subprocess.Popen(['sh', '-c', 'sleep 3; touch {mark}']); time.sleep(60)"
    with open(tmp_path / "log", "wb") as log:
        outcome = run_part(part(code), tmp_path / "none.json", log, env={}, limit_s=1.5)
    assert outcome.code is None and outcome.note == "ended at its limit" and not outcome.rows
    time.sleep(2.5)
    assert not mark.exists()


def test_nothing_begins_without_time_and_cut_off_rows_are_none(tmp_path):
    outcome = run_part(part("pass"), tmp_path / "x", io.BytesIO(), env={}, limit_s=-1.0)
    assert outcome.code is None and "no time was left" in outcome.note
    (tmp_path / "cut.json").write_text('[{"name": "x", ')
    assert read_rows(tmp_path / "cut.json") == [] == read_rows(tmp_path / "missing.json")
    (tmp_path / "file.json").write_text(json.dumps({"bench": "comm", "rows": [row(2.0).to_dict()]}))
    assert [r.value for r in read_rows(tmp_path / "file.json")] == [2.0]


def test_scaling_is_over_as_many_gpus_alone():
    def outcome(name: str, value: float) -> Outcome:
        made = Part(name=name, module="rorqual.launch.bench.multi_gpu.slice", words=(), ranks=2, limit_s=1.0)
        return Outcome(part=made, code=0, seconds=1.0, rows=(row(value),))

    found = _scaling([outcome("one GPU with its share of the experts", 100.0), outcome("experts over all GPUs", 180.0)], 2)
    assert [r.value for r in found] == [0.9] and _scaling([outcome("experts over all GPUs", 180.0)], 2) == []


def test_skewed_prompts_share_no_prefix_and_use_few_ids():
    even, skewed = (make_prompts(20, 50, 1000, skewed=s, seed=1) for s in (False, True))
    assert len({i for p in even for i in p}) > 200 and len({i for p in skewed for i in p[1:]}) <= 4
    assert {len(p) for p in even + skewed} == {50}


def test_imbalance_in_order():
    assert in_order({"expert_load": [[3, 1, 0, 0], [1, 1, 1, 1]]}, 2) == 1.5 and in_order({}, 2) == 0.0


@pytest.mark.parametrize(("words", "says"), [(["--only", "speed"], "names of"), (["--device", "cpu", "--ranks", "1"], "two GPUs or more")])
def test_mistakes_are_told(words, says):
    _, args = parse("bench multi-gpu", words)
    with pytest.raises(ValueError, match=says):
        run(args)
