"""The documentation builds as a site without a warning, and says what the planner says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rorqual.launch import cli

ROOT = Path(__file__).resolve().parents[1]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
GUIDES = ("quickstart", "operations", "serving", "routing", "metrics", "benchmarks")


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs mkdocs-material and mkdocstrings-python")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", "docs/site/mkdocs.yml", "-d", str(tmp_path / "site")]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    reference = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    assert "LLM" in reference and "generate_stream" in reference
    assert "<code>--max-num-seqs</code>" in reference and "Requests running at once on one DP rank." in reference
    assert "<code>--master-addr</code>" in (tmp_path / "site" / "api" / "serve.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [1, 7])
def test_the_table_of_layouts_is_the_planners(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in OPERATIONS.splitlines() if re.match(r"\| \d+ \| `--dp", line)]
    assert len(rows) == 8
    gpus, layout, memory, weights, tokens, all_at_once, offloaded = rows[number]
    config = json.loads((ROOT / "launch" / "shapes" / "v3.2-slice" / "config.json").read_text(encoding="utf-8"))
    config.update(num_hidden_layers=61, first_k_dense_replace=3, num_nextn_predict_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    degrees = ",".join(kind + size for kind, size in re.findall(r"--(dp|tp)-size (\d+)", layout))
    words = [
        "plan",
        str(tmp_path),
        "--gpu-memory",
        memory.replace(" ", ""),
        "--host-memory",
        "1TB",
        "--context",
        "32768",
        "--layout",
        degrees,
    ]
    assert cli.main([*words, "--ranks-per-node", "8", "--kv-cache-dtype", "fp8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    modes, parts = plan["modes"], plan["stages"][0]["weights"]
    assert plan["layout"]["dp"] * plan["layout"]["tp"] == int(gpus)
    assert f"{sum(parts.values()) / 1e9:.1f} GB" == weights
    assert [modes["off"]["pool_tokens"], modes["off"]["largest_batch_all"], modes["hybrid"]["largest_batch_all"]] == [
        int(cell.replace(",", "")) for cell in (tokens, all_at_once, offloaded)
    ]


def test_every_flag_of_the_guides_exists(capsys: pytest.CaptureFixture[str]) -> None:
    helps = []
    benches = (f"bench {name}" for name in ("serve", "sweep", "compare", "report", "server"))
    for name in ("serve", "router", "doctor", "plan", "generate", *benches):
        with pytest.raises(SystemExit):
            cli.main([*name.split(), "--help"])
        helps.append(capsys.readouterr().out)
    known = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", " ".join(helps)))
    foreign = {"--requeue", "--nproc-per-node", "--max-restarts"}  # Slurm's and torchrun's
    for page in GUIDES:
        text = re.sub(r"`python -m tests\.[^`]*`", "", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
        shown = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w.-])", text))
        assert shown - known <= foreign, f"{page}.md shows flags that do not exist"
