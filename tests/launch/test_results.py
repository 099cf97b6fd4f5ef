"""Result files: format, honesty of ``met``, rendering."""

import dataclasses
import json

import pytest

from rorqual.launch import cli
from rorqual.launch.bench.results import RESULTS, Results, Row, command_line, markdown, read_results, slug, write_results


def row(**changes) -> Row:
    base = {
        "name": "rate",
        "params": {"batch": 2},
        "value": 30.0,
        "unit": "tokens/s",
        "better": "higher",
        "peers": {"other": 10.0},
        "target": 25.0,
    }
    return Row(**{**base, **changes})


def results(*rows: Row) -> Results:
    return Results(
        bench="Through put", command="rorqual bench", date="2030-01-02", device="NVIDIA H200", versions={"torch": "2"}, rows=rows
    )


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({}, True),
        ({"value": 25.0}, True),
        ({"value": 24.9}, False),
        ({"better": "lower"}, False),
        ({"better": "lower", "value": 25.0}, True),
        ({"target": None}, None),
    ],
)
def test_met_follows_from_value_and_target(changes, met):
    assert row(**changes).met is met
    assert row(**changes).to_dict()["met"] is met


@pytest.mark.parametrize("changes", [{"value": float("nan")}, {"peers": {"x": float("inf")}}, {"roof": float("nan")}, {"better": "more"}])
def test_figures_are_finite_numbers(changes):
    with pytest.raises(ValueError, match="result 'rate': "):
        row(**changes)


def test_the_command_is_told_without_where_its_figures_go(monkeypatch):
    words = ["bench", "serve", "--port", "1", "--result-dir", "a b", "--log=x", "--only", "M=1,q a", "--output-len", "8", "--plot", "p.png"]
    monkeypatch.setattr("sys.argv", ["/bin/rorqual", *words])
    assert command_line() == "rorqual bench serve --port 1 --only 'M=1,q a' --output-len 8"


def test_files_are_named_after_bench_device_and_day_and_never_overwritten(tmp_path):
    first = write_results(results(row()), tmp_path / "new")
    second = write_results(results(row(value=1.0)), tmp_path / "new")
    assert [p.name for p in (first, second)] == ["through-put-nvidia-h200-2030-01-02.json", "through-put-nvidia-h200-2030-01-02-2.json"]
    assert read_results(first) == results(row()) and read_results(second).rows[0].value == 1.0


def test_a_path_that_is_no_utf8_costs_no_figures(tmp_path, monkeypatch):
    """Python keeps the bytes of such an argument as half characters, which a file of UTF-8 does not take."""
    monkeypatch.setattr("sys.argv", ["/bin/rorqual", "bench", "latency", b"/caf\xe9".decode("utf-8", "surrogateescape"), "caf\u00e9"])
    told = dataclasses.replace(results(row()), command=command_line())
    path = write_results(told, tmp_path)
    assert read_results(path) == told and "caf\u00e9" in path.read_text(encoding="utf-8")


def test_the_format_is_the_documented_one(tmp_path):
    value = json.loads(write_results(results(row()), tmp_path).read_text())
    assert list(value) == ["bench", "command", "date", "device", "versions", "rows"]
    assert set(value["rows"][0]) == {"name", "params", "value", "unit", "better", "roof", "peers", "target", "met"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("device"), "it lacks 'device'"),
        (lambda v: v["rows"][0].pop("met"), "it lacks 'met'"),
        (lambda v: v["rows"][0].update(met=False), "row 'rate' says met=False, but value 30.0 and target 25.0 say True"),
        (lambda v: v["rows"][0].update(extra=1), "unexpected keyword argument 'extra'"),
    ],
)
def test_files_that_contradict_themselves_are_refused(tmp_path, change, message):
    path = write_results(results(row()), tmp_path)
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(ValueError) as caught:
        read_results(path)
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_markdown():
    text = markdown(results(row(roof=0.5), dataclasses.replace(row(), better="lower", value=12345.0, peers={})))
    assert text.splitlines()[0] == "### Through put, NVIDIA H200, 2030-01-02"
    assert "| rate | batch 2 | 30 tokens/s | other 10 | 50% | >= 25 | yes |" in text
    assert "| rate | batch 2 | 12,345 tokens/s | - | - | <= 25 | no |" in text


def test_report_command(tmp_path, capsys):
    path = write_results(results(row()), tmp_path)
    assert cli.main(["bench", "report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.rstrip("\n") == markdown(read_results(path))
    assert cli.main(["bench", "report", str(tmp_path / "none")]) == 2


def test_the_projects_own_results_are_valid():
    for path in RESULTS.glob("*.json"):
        read = read_results(path)
        assert path.name.startswith(f"{slug(read.bench)}-{slug(read.device)}-{read.date}")
