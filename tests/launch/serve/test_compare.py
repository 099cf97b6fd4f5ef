"""Comparisons: pairs, ratios, noise, and pages that a browser draws."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from rorqual.launch import cli
from rorqual.launch.bench.serve.compare import pair_runs, ratio_of
from rorqual.launch.bench.serve.files import read_runs

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def run(scale=1.0, seed=0, most=8, n=40, **more):
    draw = np.random.default_rng(seed)
    ttfts = (0.1 * scale * draw.uniform(0.8, 1.2, n)).tolist()
    latencies = [t + 0.9 * scale for t in ttfts]
    return {
        "label": "x", "model_id": "m", "dataset": "random", "request_rate": "inf", "max_concurrency": most, "num_prompts": n,
        "completed": n, "failed": 0, "duration": 4.0 * scale, "total_input_tokens": 400, "total_output_tokens": 10 * n,
        "request_throughput": n / 4 / scale, "output_throughput": 10 * n / 4 / scale, "total_token_throughput": 200 / scale,
        "median_ttft_ms": 100.0 * scale, "mean_ttft_ms": 100.0 * scale, "median_tpot_ms": 100.0 * scale, "date": "20261130-1",
        "input_lens": [10] * n, "output_lens": [10] * n, "ttfts": ttfts, "latencies": latencies, "itls": [[0.1 * scale] * 9] * n,
        "start_times": [i * 0.05 for i in range(n)], "errors": [""] * n, **more,
    }  # fmt: skip


def write(path, *runs):
    path.write_text("".join(json.dumps(r) + "\n" for r in runs))
    return str(path)


def test_ratios_and_verdicts(tmp_path, capsys):
    a, b = write(tmp_path / "a.json", run()), write(tmp_path / "b.json", run(scale=1.3, seed=1))
    out = tmp_path / "o.json"
    assert cli.main(["bench", "compare", a, b, "--output-json", str(out)]) == 0
    ratios = {r["name"]: r for r in json.loads(out.read_text())["ratios"]}
    assert ratios["output_throughput"]["ratio"] == pytest.approx(1 / 1.3) and ratios["output_throughput"]["verdict"] == "-"
    each = ratios["e2el of each request"]
    assert each["pairs"] == 40 and each["low"] < 1.3 < each["high"] * 1.02 and each["verdict"] == "worse"
    assert cli.main(["bench", "compare", a, b, "--max-regression", "0.1"]) == 1
    assert "worse by more than 10%: output_throughput" in capsys.readouterr().out
    assert cli.main(["bench", "compare", b, a, "--max-regression", "0.1"]) == 0


def test_noise_is_called_noise():
    draw = np.random.default_rng(3)
    pairs = [(1.0, float(x)) for x in draw.lognormal(0.0, 0.2, 200)]
    same = ratio_of("x", "lower", pairs)
    assert same.verdict == "same within noise" and not same.worse_than(0.05)
    worse = ratio_of("x", "lower", [(a, 1.5 * b) for a, b in pairs])
    assert worse.verdict == "worse" and worse.worse_than(0.2) and not worse.worse_than(0.6)
    assert ratio_of("x", "higher", [(1.0, 2.0)]).verdict == "-" and ratio_of("x", "lower", [(0.0, 1.0)]) is None


def test_loads_are_paired_and_other_work_is_told(tmp_path, capsys):
    a = write(tmp_path / "a.jsonl", run(most=2), run(most=4), run(most=16))
    b = write(tmp_path / "b.jsonl", run(most=4, total_output_tokens=390, failed=1), run(most=2))
    pairs = pair_runs(read_runs([a]), read_runs([b]))
    assert [(x["max_concurrency"], y["max_concurrency"]) for x, y in pairs] == [(2, 2), (4, 4)]
    assert cli.main(["bench", "compare", a, b]) == 0
    out = capsys.readouterr().out
    assert "total_output_tokens is 400 in A and 390 in B" in out and "1 requests failed in B" in out
    assert cli.main(["bench", "compare", a, write(tmp_path / "c.json", run(most=64))]) == 2
    assert "nothing to compare: A ran (concurrency 2; concurrency 4" in capsys.readouterr().err


def test_result_files_are_compared_row_by_row(tmp_path, capsys):
    def results(name, value):
        row = {
            "name": "x",
            "params": {"n": 1},
            "value": value,
            "unit": "s",
            "better": "lower",
            "roof": None,
            "peers": {},
            "target": None,
            "met": None,
        }
        head = {"bench": "b", "command": "c", "date": "2026-01-01", "device": "cpu", "versions": {}}
        (tmp_path / name).write_text(json.dumps({**head, "rows": [row]}))
        return str(tmp_path / name)

    assert cli.main(["bench", "compare", results("a.json", 2.0), results("b.json", 3.0), "--max-regression", "0.4"]) == 1
    assert "1.500" in capsys.readouterr().out


def test_files_that_are_none_are_named(tmp_path, capsys):
    (tmp_path / "a.json").write_text('{"x": 1}')
    (tmp_path / "b.json").write_text("nonsense")
    for name, message in (("a.json", "is no result of `rorqual bench serve`"), ("b.json", "is not JSON, nor JSON lines")):
        assert cli.main(["bench", "report", "--html", str(tmp_path / "o.html"), str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["bench", "report", "--html", str(tmp_path / "o.html")]) == 2
    assert read_runs([write(tmp_path / "c.json", run())])[0]["file"].endswith("c.json")


def test_a_browser_draws_the_page_without_a_network(tmp_path):
    pytest.importorskip("plotly", reason="plotly is not installed (pip install 'rorqual[eplb]')")
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser on PATH ({', '.join(BROWSERS)}); apt-get install chromium")
    runs = [
        run(most=m, scale=s, layout=layout, label="<b>")
        for m, s, layout in ((2, 1.0, "tp8"), (8, 1.5, "tp8"), (2, 1.2, "dp8"), (8, 1.3, "dp8"))
    ]
    file, page = write(tmp_path / "r.jsonl", *runs, {**run(most=9), "errors": ["gone"] * 40, "completed": 0}), tmp_path / "p.html"
    assert cli.main(["bench", "report", "--html", str(page), "--title", "A & B", file]) == 0
    text = page.read_text()
    assert "A &amp; B" in text and "<b>" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1240,2000"]
    words += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000", "--dump-dom", page.as_uri()]
    got = subprocess.run([browser, *words], capture_output=True, text=True, timeout=240)
    head = re.search(r"<html[^>]*>", got.stdout)[0]
    assert 'data-drawn="9"' in head and 'data-failed=""' in head, head
