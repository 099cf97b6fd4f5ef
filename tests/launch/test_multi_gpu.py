"""The run on several GPUs: which layouts and parts it has, and that a part that fails or takes too long costs only itself."""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import Path

import pytest
import torch

from rorqual.launch.bench.multi_gpu import parity
from rorqual.launch.bench.multi_gpu.command import _budget, run
from rorqual.launch.bench.multi_gpu.fit import fitting_layers, requests_in_time
from rorqual.launch.bench.multi_gpu.full import main
from rorqual.launch.bench.multi_gpu.layouts import layouts, title
from rorqual.launch.bench.multi_gpu.parity import fitting
from rorqual.launch.bench.multi_gpu.parts import Outcome, Part, command, read_rows, run_part, write_rows
from rorqual.launch.bench.multi_gpu.pool import fitting_gib
from rorqual.launch.bench.multi_gpu.program import GROUPS, LARGE, program, share
from rorqual.launch.bench.multi_gpu.reason import reason_of
from rorqual.launch.bench.multi_gpu.record import _scaling, with_peers
from rorqual.launch.bench.multi_gpu.shapes import BASE, experts_of
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


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_program_writes_rows_and_fits_its_time(ranks, device):
    parts = program(ranks, device=device, only=(*GROUPS, *LARGE), right=Path("right.json"))
    assert len({p.name for p in parts}) == len(parts) and {p.ranks for p in parts} == {1, ranks}
    for part in parts:
        words = command(part, Path("/somewhere/rows.json"), 99.0)
        assert "{out}" not in words and "{left}" not in words and part.limit_s <= 270 * (1 + (device == "cpu"))
        assert ("--nproc-per-node" in words) == (part.ranks > 1)
    shown = {p.name: p.left_out for p in parts if p.left_out and "installed" not in p.left_out}
    assert list(shown) == (["tokens of every layout"] if ranks == 7 else []), "7 ranks: 8 heads, 5 layers, 16 experts"
    of = {name: program(ranks, device=device, only=(name,), right=Path("x")) for name in (*GROUPS, *LARGE)}
    assert sum(map(len, of.values())) == len(parts) and [len(of[name]) for name in ("pool", "slice", "full")] == [1, 4, 2]
    stated = [p for p in of["parity"] if p.ranks > 1 and not p.left_out]
    assert sum(1 for p in stated) == len({x["pipeline_parallel_size"] for x in fitting(ranks)})


def test_parts_are_chosen_by_name_and_listed(capsys):
    _, args = parse("bench multi-gpu", ["--device", "cpu", "--ranks", "4", "--only", "parity,pool", "--match", "*pp 2;one host*", "--list"])
    assert run(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in lines] == ["tokens of one rank", "tokens of every layout, pp 2", "one host pool"]
    assert "--nproc-per-node 4" in lines[1] and "--pool-gib 0.05" in lines[2]


def test_the_embedded_model_runs_on_these_layouts():
    found = {ranks: [title(x) for x in fitting(ranks)] for ranks in range(2, 9)}
    assert found[2] == ["pp1 dp1 tp2", "pp1 dp2 tp1", "pp2 dp1 tp1"]
    assert found[4] == ["pp1 dp1 tp4", "pp1 dp2 tp2", "pp1 dp4 tp1", "pp2 dp1 tp2", "pp2 dp2 tp1", "pp4 dp1 tp1"]
    assert len(found[8]) == 9 and {t.split()[0] for t in found[8]} == {"pp1", "pp2", "pp4"}
    assert (found[3], found[5], found[6], found[7]) == (["pp3 dp1 tp1"], ["pp5 dp1 tp1"], ["pp3 dp1 tp2", "pp3 dp2 tp1"], [])


def test_other_tokens_fail_the_part_after_all_layouts_were_tried(tmp_path, monkeypatch):
    right = [[1, 2], [3, 4]]
    monkeypatch.setattr(parity, "tokens", lambda device, layout: ([[1, 2], [3, 5 if title(layout) == "pp1 dp2 tp1" else 4]], 7))
    out = str(tmp_path / "rows.json")
    assert not parity.compare("cpu", 2, 1, right, out) and parity.compare("cpu", 2, 2, right, str(tmp_path / "other.json"))
    assert [(r.params["layout"], r.value, r.met) for r in read_rows(Path(out))] == [("pp1 dp1 tp2", 0, True), ("pp1 dp2 tp1", 1, False)]
    (tmp_path / "right.json").write_text(json.dumps(right))
    monkeypatch.setattr("sys.argv", ["parity", "--ranks", "2", "--right", str(tmp_path / "right.json"), "--out", out])
    with pytest.raises(AssertionError, match="tokens differ"):
        parity.main()


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_any_number_of_ranks_shares_the_experts_in_whole_groups(ranks, small):
    experts, groups = experts_of(ranks, small=small)
    share = experts // ranks
    assert share * ranks == experts and share % groups == 0 and share // groups >= 2
    assert small or (experts == 256) == (ranks in (1, 2, 4, 8))


def test_transports_that_are_not_there_are_left_out_and_named(monkeypatch):
    import rorqual.launch.bench.multi_gpu.program as room

    for there in (None, object()):
        monkeypatch.setattr(room, "find_spec", lambda name, there=there: there)
        parts = program(2, device="cuda", only=("exchange",), right=Path("x"))
        missing = [p.name for p in parts if p.left_out]
        assert len(missing) == (0 if there else 4) and all("nvshmem" in name or "deep_ep" in name for name in missing)
        backends = [p.words[p.words.index("--backend") + 1] for p in parts]
        assert backends == ["torch", "symm", "nvshmem", "deep_ep", "torch,symm", "torch_static", "nvshmem", "deep_ep"]


def test_full_size_fits_eight_gpus_whole_and_fewer_in_part():
    settings = {"kv_cache_dtype": "fp8", "max_model_len": 131184, "max_num_seqs": 4, "max_total_tokens": 132000, "kv_offload": "host"}
    given = {"settings": settings, "host_bytes": 448 << 30, "shape": {"first_k_dense_replace": 3}}
    found = {n: fitting_layers(BASE, 61, ranks=n, gpu_bytes=140 << 30, **given) for n in (2, 8)}
    assert found[8] == 61 and 16 < found[2] < 32
    with pytest.raises(ValueError, match="not even 4 layers fit on 2 GPUs"):
        fitting_layers(BASE, 61, ranks=2, gpu_bytes=8 << 30, **given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="small, on the CPU")
@pytest.mark.parametrize(("seconds", "left_out"), [(0.0, [64, 128]), (600.0, [])])
def test_full_size_names_contexts_that_no_time_is_left_for(tmp_path, monkeypatch, seconds, left_out):
    (found,) = share(2, device="cpu", only=("full",))[:1]
    words = command(found, tmp_path / "rows.json", seconds)[3:]
    words = [{"[[128, 2], [256, 1]]": "[[64, 1], [128, 1]]"}.get(word, word) for word in words]
    monkeypatch.setattr("sys.argv", ["full", *words])
    main()
    rows = read_rows(tmp_path / "rows.json")
    assert [r.params["context"] for r in rows if r.name.startswith("not run")] == left_out
    assert [r.params["context"] for r in rows if r.name == "decode"] == [n for n in (64, 128) if n not in left_out]
    assert rows[0].params["layers"] == 2 and rows[0].params["of_it_s"]["weights"] > 0


def test_work_that_no_time_is_left_for_shrinks():
    assert requests_in_time(4, 1000, tokens_per_s=100.0, seconds=25.0) == 2
    assert requests_in_time(4, 1000, tokens_per_s=100.0, seconds=900.0) == 4
    assert requests_in_time(4, 1000, tokens_per_s=100.0, seconds=9.0) == 0 == requests_in_time(4, 1000, tokens_per_s=100.0, seconds=-9.0)


def test_the_pool_takes_what_shared_memory_has():
    assert fitting_gib(16.0, 100 << 30) == 16.0 and fitting_gib(16.0, 10 << 30) == 9.0 and fitting_gib(0.05, 1 << 30) == 0.05
    with pytest.raises(ValueError, match="64 MiB free"):
        fitting_gib(16.0, 64 << 20)


@pytest.mark.parametrize(
    ("printed", "says"),
    [
        (b"x\n[rank1]: torch.OutOfMemoryError: CUDA out of memory\nRuntimeError: later\n", "torch.OutOfMemoryError: CUDA out of memory"),
        (b" exitcode : -15 (pid: 3)\n exitcode : -9 (pid: 4)\nValueError: torn\n", "SIGKILL (did the host run out of memory?); ValueError"),
        (b"  traffic    0.1 s  FAILED: CheckFailed: no (x.py:3)\n", "CheckFailed: no"),
        (b"rorqual: error: --slots 3\nChildFailedError: x\n", "rorqual: error: --slots 3"),
        (b"torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n\xff\xfe\x00" * 9, ""),
    ],
)
def test_the_reason_is_the_first_error(printed, says):
    found = reason_of(printed)
    assert says in found if says else found == ""


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
    for garbage in (b"\xff\x00", b"3", b"[1, null]", b'{"rows": 7}', b'[{"name": "x"}]', b'[{"value": NaN}]'):
        (tmp_path / "garbage.json").write_bytes(garbage)
        assert read_rows(tmp_path / "garbage.json") == []
    (tmp_path / "half.json").write_text(json.dumps([row(1.0).to_dict(), {"name": "x"}]))
    assert [r.value for r in read_rows(tmp_path / "half.json")] == [1.0], "what is a row is kept"
    (tmp_path / "file.json").write_text(json.dumps({"bench": "comm", "rows": [row(2.0).to_dict()]}))
    assert [r.value for r in read_rows(tmp_path / "file.json")] == [2.0]


def test_scaling_is_over_as_many_gpus_alone():
    def outcome(name: str, value: float) -> Outcome:
        made = Part(name=name, module="rorqual.launch.bench.multi_gpu.slice", words=(), ranks=2, limit_s=1.0)
        return Outcome(part=made, code=0, seconds=1.0, rows=(row(value),))

    found = _scaling([outcome("one GPU with its share of the experts", 100.0), outcome("experts over all GPUs", 180.0)], 2)
    assert [r.value for r in found] == [0.9] and _scaling([outcome("experts over all GPUs", 180.0)], 2) == []


def test_exchanges_of_different_parts_are_each_others_peers():
    def made(backend: str, value: float, tokens: int = 1) -> Row:
        params = {"backend": backend, "tokens": tokens, "timed": backend}
        return Row(name="dispatch", params=params, value=value, unit="us", better="lower")

    rows = with_peers([made("symm", 1.0), made("torch_static", 2.0), made("symm", 3.0, tokens=2), row(4.0)])
    assert [r.peers for r in rows] == [{"torch_static": 2.0}, {"symm": 1.0}, {}, {}] and [r.value for r in rows] == [1.0, 2.0, 3.0, 4.0]


def test_skewed_prompts_share_no_prefix_and_use_few_ids():
    even, skewed = (make_prompts(20, 50, 1000, skewed=s, seed=1) for s in (False, True))
    assert len({i for p in even for i in p}) > 200 and len({i for p in skewed for i in p[1:]}) <= 4
    assert {len(p) for p in even + skewed} == {50}


def test_imbalance_in_order():
    assert in_order({"expert_load": [[3, 1, 0, 0], [1, 1, 1, 1]]}, 2) == 1.5 and in_order({}, 2) == 0.0


@pytest.mark.parametrize(("words", "says"), [
        (["--only", "speed"], "names of"), (["--device", "cpu", "--ranks", "1"], "two GPUs or more"),
        (["--device", "cpu", "--ranks", "0"], "two GPUs or more"), (["--device", "cpu", "--match", "none"], "fits none of the parts"),
        (["--device", "cpu", "--share-of", "1"], "2 or more, got 1"),
        (["--device", "cpu", "--share-of", "2", "--ranks", "2"], "got --ranks 2"),
        (["--device", "cpu", "--share-of", "2", "--only", "parity"], "--only with --share-of takes names of slice, full"),
        (["--device", "cpu", "--log", "/proc/none/log"], "--log /proc/none/log cannot be written"),
        (["--device", "cpu", "--results-dir", "/proc/none"], "--results-dir /proc/none cannot be written"),
    ])  # fmt: skip
def test_mistakes_are_told(words, says):
    _, args = parse("bench multi-gpu", words)
    with pytest.raises(ValueError, match=says):
        run(args)


def test_time_that_is_taken_by_default():
    assert _budget(None, GROUPS) < 8 * 60 and _budget(None, ("parity", *LARGE)) < 10 * 60
    assert _budget(33.0, LARGE) == 33.0
