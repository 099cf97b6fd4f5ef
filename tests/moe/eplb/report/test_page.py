"""The page of a report: what it holds, and that a browser draws it without a network."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from rorqual.moe.eplb.load.synth import synth
from rorqual.moe.eplb.load.synth_config import SynthConfig
from rorqual.moe.eplb.report import charts
from rorqual.moe.eplb.report.gather import gather
from rorqual.moe.eplb.report.page import render, write_report
from rorqual.moe.eplb.simulation.rules import Rules
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.eplb.trace import LoadTrace

pytest.importorskip("plotly", reason="plotly is not installed (pip install 'rorqual[eplb]')")
MACHINE = Topology.even(n_slots=40, n_ranks=8, n_nodes=2)
ALL = {"experts", "ranks", "layers", "trades", "spares", "lost", "bars", "lines"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def report():
    trace = synth(SynthConfig(n_layers=4, n_experts=32, top_k=4, n_steps=40, tokens=512, drift=0.5))
    trace = LoadTrace(**{**vars(trace), "meta": {"model": "<b>R1</b>"}})
    return gather(trace, MACHINE, rules=Rules(interval=10, window=10))


def figures(page):
    return {name: json.loads(text) for name, text in re.findall(r'<script type="application/json" data-chart="(\w+)">(.*?)</script>', page)}


def test_the_page_holds_everything_and_fetches_nothing(report):
    page = render(report, title="A & B")
    assert set(figures(page)) == ALL
    assert "<title>A &amp; B</title>" in page and "model &lt;b&gt;R1&lt;/b&gt;" in page and "<b>R1" not in page
    body = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)  # without plotly's own code
    assert not re.findall(r"""(?:src|href)\s*=|url\(|https?://""", re.sub(r"https?://plot\.ly[^\"]*", "", body))
    for word in ("incremental", "EPLB", "Jain", "tokens/s"):
        assert word in body


def test_numbers_are_those_of_the_report(report):
    assert report.after.imbalance.mean() < report.before.imbalance.mean()
    assert report.trades[0].bytes == 0 and {point.name for point in report.trades} == {"rorqual, re-plan", "rorqual, from nothing", "EPLB"}
    way = [point for point in report.trades if point.name == "rorqual, re-plan"]
    assert [point.bytes for point in way] == sorted(point.bytes for point in way) and way[-1].imbalance <= way[0].imbalance
    lost = charts.lost_bars(report)
    assert sum(lost.data[0].y) * 4 == pytest.approx(report.lost[report.before_name].by_rank.sum(), rel=1e-2)
    shown = np.array(charts.expert_map(report).data[0].customdata)
    assert shown == pytest.approx(report.trace.total / report.trace.total.mean(1, keepdims=True), abs=1e-3)


def test_a_single_window_and_an_uneven_machine_make_a_page_too():
    counts = np.random.default_rng(0).integers(1, 100, (1, 2, 12))
    trace = LoadTrace(counts=counts, layer_ids=(3, 5))
    machine = Topology(slots=(5, 4, 6), nodes=(0, 0, 1), speeds=(1.0, 1.0, 2.0))
    report = gather(trace, machine, before_name="plan")
    assert report.published is None and report.outcomes == () and report.spares == () and report.before_name == "plan, before"
    assert set(figures(render(report))) == ALL - {"spares", "bars", "lines"}


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "plotly", None)
    monkeypatch.setitem(__import__("sys").modules, "plotly.graph_objects", None)
    with pytest.raises(ValueError, match=r"plotly, which is not installed; pip install 'rorqual\[eplb\]'"):
        charts.graph_objects()


def test_a_browser_draws_every_chart_without_a_network(report, tmp_path):
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser on PATH ({', '.join(BROWSERS)}); apt-get install chromium")
    page = tmp_path / "report.html"
    write_report(report, page)
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1240,2000"]
    words += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000", "--dump-dom", page.as_uri()]
    run = subprocess.run([browser, *words], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    head = re.search(r"<html[^>]*>", run.stdout)[0]
    assert f'data-drawn="{len(ALL)}"' in head and 'data-failed=""' in head
    for name in ALL:  # every chart has its drawing in its place
        place = run.stdout.split(f'id="{name}"', 1)[1].split("data-chart=", 1)[0]
        assert "main-svg" in place and place.count("<path") > 3, name
