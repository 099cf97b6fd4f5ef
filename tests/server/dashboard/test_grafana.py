"""The Grafana dashboard asks for metrics that exist, and the file in docs/ is it."""

import json
import re
from pathlib import Path

import pytest

import rorqual
from rorqual.engine.server.dashboard.grafana import grafana, text
from rorqual.engine.server.http_counts import HttpCounts
from rorqual.engine.server.metric_table import REPLICA_ROWS, ROUTING_ROWS
from rorqual.engine.server.metrics import render
from tests.server.dashboard.made_numbers import snapshots, welcome


def test_the_file_in_the_documentation_is_up_to_date():
    path = Path(rorqual.__file__).parent / "docs" / "grafana.json"
    if not path.parent.exists():
        pytest.skip("docs/ is not installed")
    assert path.read_text(encoding="utf-8") == text(), "run python -m rorqual.engine.server.dashboard.grafana > docs/grafana.json"


def test_every_metric_and_label_exists():
    counts = HttpCounts()
    counts.begin()
    counts.end("/v1/completions", "POST", 200, 0.1)
    shown = re.findall(r"^(rorqual:\w+)(?:\{(.*)\})? ", render(welcome(), list(snapshots(2))[-1], counts).decode(), re.MULTILINE)
    known = {name for name, _ in shown} | {f"rorqual:{r.name}{'_total' * (r.kind == 'counter')}" for r in (*REPLICA_ROWS, *ROUTING_ROWS)}
    labels = {name: set(re.findall(r'(\w+)="', text)) for name, text in shown}
    queries = [target["expr"] for panel in grafana()["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 40
    for query in queries:
        names = re.findall(r"rorqual:\w+", query)
        assert names and not set(names) - known - {"rorqual:requests_refused_total"}, query
        for name in names:
            wanted = set(re.findall(r"(\w+)=~", query)) | {one for by in re.findall(r"by \(([^)]*)\)", query) for one in by.split(", ")}
            assert name not in labels or wanted <= labels[name] | {"status"}, (query, wanted, labels[name])
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")


def test_panels_do_not_overlap_and_have_numbers_of_their_own():
    panels = grafana()["panels"]
    taken = [(x, y) for p in panels for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
             for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])]  # fmt: skip
    assert len(taken) == len(set(taken)) and all(x < 24 for x, _ in taken)
    assert len({p["id"] for p in panels}) == len(panels)
    json.dumps(grafana())
