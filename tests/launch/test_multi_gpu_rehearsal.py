"""All kinds of parts of the run on several GPUs, over CPU ranks: the same program, processes, limits and files, small shapes."""

from __future__ import annotations

import pytest
import torch

from rorqual.launch.bench.multi_gpu.command import run
from rorqual.launch.bench.results import Results, read_results
from rorqual.launch.cli import parse

PARTS = ("tokens of one rank", "tokens of every layout, pp 1", "dispatch and combine of torch_static", "one host pool",
         "experts over all GPUs, balanced", "full size, offload host")  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a rehearsal for machines without GPUs")
def test_a_part_of_every_kind_runs_over_cpu_ranks(tmp_path, capsys):
    groups = "parity,exchange,slice,pool,full"
    files = ["--log", str(tmp_path / "log"), "--output-json", str(tmp_path / "out.json")]
    _, args = parse("bench multi-gpu", ["--device", "cpu", "--ranks", "2", "--only", groups, "--match", ";".join(PARTS), *files])
    code = run(args)
    found: Results = read_results(tmp_path / "out.json")
    ended = {r.name.removeprefix("part: "): r.params["ended"] for r in found.rows if r.name.startswith("part: ")}
    assert ended == dict.fromkeys(PARTS, "done") and code == 0, (tmp_path / "log").read_text(errors="replace")[-4000:]
    rows: dict[str, list] = {}
    for row in found.rows:
        rows.setdefault(row.name, []).append(row)
    assert {r.params["layout"] for r in rows["requests with other tokens than on one GPU"]} == {"pp1 dp1 tp2", "pp1 dp2 tp1"}
    assert {r.value for r in rows["requests with other tokens than on one GPU"]} == {0}
    assert {r.params["tokens"] for r in rows["dispatch and combine"]} == {1, 32}
    assert rows["fetch by all GPUs over one alone"][0].params["ranks"] == 2 and "throughput, skewed work" in rows
    decodes = {(r.params["context"], r.params["requests_a_rank"]): r for r in rows["decode"]}
    assert set(decodes) == {(128, 2), (256, 1)} and all(r.value > 0 for r in decodes.values())
    assert all(r.params["prompt_cached"] == 1 - 64 / context for (context, _), r in decodes.items()), "all but the last page"
    assert rows["start of the engine"][0].params["of_it_s"].keys() >= {"weights", "host pool and cache"}
    printed = capsys.readouterr().out
    assert "full size, offload host: done" in printed and f"wrote {tmp_path / 'out.json'}" in printed
