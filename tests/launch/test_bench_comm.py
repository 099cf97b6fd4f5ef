"""``bench comm``: what is measured, what is counted, what is projected; on virtual ranks of the CPU."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

import rorqual.launch.bench.comm.measure as measuring
from rorqual.launch.bench.comm import conformance
from rorqual.launch.bench.comm.cases import Inputs, Traffic, cases
from rorqual.launch.bench.comm.checks import CheckFailed
from rorqual.launch.bench.comm.command import numbers
from rorqual.launch.bench.comm.crew import Crew
from rorqual.launch.bench.comm.measure import Trips, figures, measure, without_events
from rorqual.launch.bench.comm.step_model import Cluster, Link, Load, distinct, exchange, fit, project
from rorqual.launch.bench.comm.tables import rows_of
from rorqual.launch.bench.results import Row
from rorqual.launch.cli import main

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="times the twins on the CPU")
GIVEN = {"backends": ["virtual"], "tokens": [6], "hidden": [64], "top_k": [3], "payloads": ["fp8"], "slots": 12, "max_sms": 4}
LOAD = Load(
    layers=10,
    tokens=128,
    hidden=7168,
    top_k=8,
    slots=256,
    payload="fp8",
    attention_us=(200.0, 110.0),
    expert_us=(150.0, 90.0),
    exchange_sms=0,
)
INSIDE, BETWEEN = Link(latency_us=10.0, gb_per_s=300.0), Link(latency_us=20.0, gb_per_s=50.0)
NODE = Cluster(ranks=8, ranks_per_node=8, inside=INSIDE, between=BETWEEN, two_level=False)
NODES = replace(NODE, ranks=32)


def test_the_grid_of_cases():
    found = list(
        cases(**{**GIVEN, "backends": ["symm", "torch"], "tokens": [1, 128], "payloads": ["fp8", "native"]}, sms=[8, 16], sms_tokens=[128])
    )
    assert len(found) == 2 * 2 * 2 + 2
    assert [(c.backend, c.max_sms, c.payload) for c in found[-2:]] == [("symm", 8, "fp8"), ("symm", 16, "fp8")]


@on_cpu
@pytest.mark.parametrize("payload", ["fp8", "native", "bf16"])
def test_traffic_is_what_the_dispatcher_counts(payload):
    crew = Crew(size=3, mine=(0, 1, 2), device=torch.device("cpu"), grid=None)
    (case,) = cases(**{**GIVEN, "payloads": [payload]})
    timing = measure(crew, case, repeat=2)
    assert timing.traffic.per_rank[0] == 0 and timing.traffic.dispatch == sum(timing.traffic.per_rank)
    spec = case.spec(3)
    back = [Inputs.make(spec, r, 6, crew.device).ids for r in range(3)]  # rank 0 also sends results to the others
    results = [sum(1 for ids in back[r].tolist() if any(0 <= i < 4 for i in ids)) * 128 * (r != 0) for r in range(3)]
    assert timing.counted == tuple(a + b for a, b in zip(timing.traffic.per_rank, results, strict=True))
    assert timing.link_bytes == (timing.traffic.dispatch, sum(results)), "bytes that leave this rank, half by half"
    assert (timing.timed, timing.fetched) == ("clock", False)
    assert timing.trip > 0 and min(timing.halves) >= 0 and max(timing.halves) > 0 and not timing.graph


def test_what_events_add_is_taken_off():
    assert without_events([10.0, 4.0, 6.0, 8.0], 20.0) == [8.0, 2.0, 4.0, 6.0]
    assert without_events([10.0, 1.0, 6.0, 11.0], 20.0) == [8.0, 0.0, 4.0, 9.0]
    assert without_events([1.0, 2.0, 3.0, 4.0], 11.0) == [1.0, 2.0, 3.0, 4.0], "nothing is added"


def test_a_pair_of_halves_is_timed_on_one_rank():
    lines = [[4.0, 6.0, 3.0, 7.0], [6.0, 4.0, 5.0, 5.0], [5.0, 5.0, 4.0, 6.0]]
    assert figures(lines, [20.0, 20.0, 21.0]) == [5.0, 5.0, 4.0, 6.0, 10.0, 10.0, 20.0], "without what events take"
    *halves, dispatch, combine, trip = figures(lines, [16.0])
    assert halves == [4.0, 4.0, 3.0, 5.0] and (dispatch, combine, trip) == (8.0, 8.0, 16.0), "an event for each half, two for a pair"


@on_cpu
def test_trips_take_other_tokens_in_turn():
    crew = Crew(size=2, mine=(0, 1), device=torch.device("cpu"), grid=None)
    (case,) = cases(**GIVEN)
    dispatchers = crew.dispatchers("virtual", case.spec(2))
    trips, seen = Trips(crew, case, dispatchers), []
    send = dispatchers[0].dispatch_send
    dispatchers[0].dispatch_send = lambda x, ids, weights: (seen.append(ids.clone()), send(x, ids, weights))[1]
    for _ in range(5):
        trips.run()
    assert torch.equal(seen[0], seen[4]) and not any(torch.equal(seen[0], other) for other in seen[1:4])
    for dispatcher in dispatchers:
        dispatcher.close()


class MadeUpEvent:
    """Stands for a CUDA event; what it is recorded at is a number of calls."""

    clock = 0

    def record(self) -> None:
        MadeUpEvent.clock += 1
        self.at = MadeUpEvent.clock

    def elapsed_time(self, end: MadeUpEvent) -> float:
        return (end.at - self.at) / 1000


class MadeUpGraph:
    """Stands for a captured graph: a replay records the events of the capture once more."""

    def __init__(self, made: list[MadeUpEvent]) -> None:
        self.made, self.replays = made, 0

    def replay(self) -> None:
        self.replays += 1
        for event in self.made:
            event.record()


@on_cpu
@pytest.mark.parametrize("way", ["_replayed", "_eager"])
def test_what_is_timed_follows_a_trip_that_is_not(monkeypatch, way):
    events, graphs, runs = [], [], []

    def event(**more):
        events.append(MadeUpEvent())
        return events[-1]

    def capture(crew, work):
        before, ran = len(events), len(runs)
        work()
        assert len(runs) - ran == 1 + measuring._GRAPH_TRIPS and runs[ran] == 0, "the first one has no event"
        graphs.append(MadeUpGraph(events[before:]))
        return graphs[-1]

    crew = Crew(size=2, mine=(0, 1), device=torch.device("cpu"), grid=None)
    (case,) = cases(**GIVEN)
    trips = Trips(crew, case, crew.dispatchers("virtual", case.spec(2)))
    run = trips.run
    monkeypatch.setattr(trips, "run", lambda mark=None: (runs.append(5 if mark else 0), run(mark))[1])
    monkeypatch.setattr(measuring, "_event", event)
    monkeypatch.setattr(measuring, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    lines, whole = getattr(measuring, way)(crew, trips, 3)
    assert {len(line) for line in lines} == {4} and {value for line in lines for value in line} == {1.0}
    each = measuring._GRAPH_TRIPS if way == "_replayed" else measuring._EAGER_TRIPS
    assert len(lines) == 3 * each and whole == [1.0 / each] * 3, "events next to each other, over the trips between them"
    assert [g.replays for g in graphs] == ([4, 4] if way == "_replayed" else []), "the first replay does not count"
    if way == "_eager":
        assert runs[:6] == [0, 5, 5, 5, 5, 0], "every block begins with one that is not timed"


@on_cpu
def test_a_table_that_breaks_leaves_the_cases_before(tmp_path, monkeypatch):
    import rorqual.launch.bench.comm.command as command

    def breaks(crew, case, *, repeat):
        if case.tokens == 5:
            raise RuntimeError("torn")
        return measure(crew, case, repeat=repeat)

    monkeypatch.setattr(command, "measure", breaks)
    flags = ["--tokens", "2,5", "--hidden", "64", "--slots", "8", "--top-k", "2", "--payload", "native", "--repeat", "1"]
    with pytest.raises(RuntimeError, match="torn"):
        main(["bench", "comm", *flags, "--output-json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {r["params"]["tokens"] for r in rows} == {2} and all(r["params"]["timed"] == "clock" for r in rows)


def test_traffic_by_hand():
    (case,) = cases(**GIVEN)
    ids = torch.tensor([[0, 1, 4], [5, 6, -1], [8, 9, 10]])
    traffic = Traffic.of(case.spec(3), 1, ids)
    row = 80  # 64 values, one scale, to a multiple of 16
    assert traffic.per_rank == (row + 72, 0, row + 72)
    assert (traffic.combine, traffic.everything, traffic.results) == (2 * 128, 4 * row, 4 * 128)


@on_cpu
def test_rows_hold_times_bytes_and_peers():
    crew = Crew(size=2, mine=(0, 1), device=torch.device("cpu"), grid=None)
    (case,) = cases(**GIVEN)
    timing = measure(crew, case, repeat=1)
    rows = rows_of(crew, [(case, timing), (replace(case, backend="torch"), timing)])
    assert [(r.name, r.params["backend"], r.unit) for r in rows[:2]] == [("dispatch", "virtual", "us"), ("combine", "virtual", "us")]
    assert rows[0].params["link_bytes"] == timing.traffic.dispatch and rows[0].peers == {"torch": timing.dispatch}
    assert all(row.target is None for row in rows), "targets are for GPUs"


@on_cpu
def test_the_command_prints_and_writes(tmp_path, capsys):
    flags = ["--tokens", "2,5", "--hidden", "64", "--slots", "8", "--top-k", "2", "--payload", "native", "--repeat", "1"]
    assert main(["bench", "comm", *flags, "--sms", "1", "--sms-tokens", "4", "--output-json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert "2 virtual ranks on the CPU" in printed and "say nothing about GPUs" in printed and "SMs at most" in printed
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(r["name"], r["params"]["tokens"]) for r in rows] == [
        (name, n) for n in (2, 5, 4) for name in ("dispatch", "combine", "dispatch and combine")
    ]  # fmt: skip


@on_cpu
def test_what_cannot_be_is_refused(capsys):
    for flags, said in (
        (["--backend", "symm"], "needs torchrun"),
        (["--tokens", "0"], "--tokens takes whole numbers"),
        (["--payload", "bytes"], "--payload takes native"),
        (["--step-model"], "--step-model needs --attention-us"),
        (["--step-model", "--attention-us", "1,2,3", "--expert-us", "4"], "--attention-us takes"),
        (["--step-model", "--attention-us", "9", "--expert-us", "4", "--between", "7"], "--between takes"),
    ):
        assert main(["bench", "comm", *flags]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="--sms takes"):
        numbers("8,x", "--sms")


def test_distinct_destinations():
    assert distinct(1, 256, 8) == 1.0
    assert distinct(2, 8, 8) == 2.0  # all experts: all parts
    assert distinct(4, 8, 1) == pytest.approx(1.0)
    gen = torch.Generator().manual_seed(0)
    ids = torch.rand(20_000, 64, generator=gen).argsort(dim=1)[:, :6]
    hit = torch.stack([(ids // 8 == r).any(dim=1) for r in range(8)], dim=1).sum(dim=1).double().mean().item()
    assert distinct(8, 64, 6) == pytest.approx(hit, rel=0.01)


def test_bytes_of_an_exchange():
    one = exchange(NODE, LOAD, 128, 1000)
    assert one.between == 0.0 and one.inside == pytest.approx(128 * 1000 * distinct(8, 256, 8) * 7 / 8)
    assert one.us == pytest.approx(10.0 + one.inside / 300e3)
    flat, two = exchange(NODES, LOAD, 128, 1000), exchange(replace(NODES, two_level=True), LOAD, 128, 1000)
    assert flat.between == pytest.approx(128 * 1000 * distinct(32, 256, 8) * 3 / 4)
    assert (
        two.between == pytest.approx(128 * 1000 * distinct(4, 256, 8) * 3 / 4) and two.between < flat.between < flat.between + flat.inside
    )
    alone = exchange(replace(NODE, ranks=1, ranks_per_node=1), LOAD, 128, 1000)
    assert (alone.inside, alone.between, alone.us) == (0.0, 0.0, 0.0)


def test_a_step_by_hand():
    p = project(NODE, LOAD)
    assert p.plain_us == pytest.approx(350.0 + p.dispatch.us + p.combine.us) and p.plain_ms == pytest.approx(p.plain_us / 100)
    assert p.overlap_us == pytest.approx(400.0), "short exchanges hide wholly beside two halves of attention and experts"
    assert p.hidden == 1.0 and p.tokens_per_s == pytest.approx(128 / (10 * min(p.plain_us, p.overlap_us)) * 1e6)
    slow = project(replace(NODE, inside=Link(latency_us=10.0, gb_per_s=3.0)), LOAD)
    assert slow.overlap_us > 2 * (exchange(replace(NODE, inside=Link(latency_us=10.0, gb_per_s=3.0)), LOAD, 64, 14336).us), "exchanges rule"
    assert 0.0 < slow.hidden < 1.0
    shared = project(NODE, replace(LOAD, exchange_sms=33))
    assert shared.overlap_us > p.overlap_us, "what exchanges take, computations lack"
    assert shared.overlap_us <= 400.0 + 2 * (shared.dispatch.us + shared.combine.us) * 0.26
    with pytest.raises(ValueError, match="leave none of 132"):
        project(NODE, replace(LOAD, exchange_sms=132))
    with pytest.raises(ValueError, match="shared out over 24 ranks"):
        project(replace(NODE, ranks=24), LOAD)


def test_a_link_from_measurements():
    def row(n_bytes: int, us: float, name: str = "dispatch") -> Row:
        return Row(name=name, params={"link_bytes": n_bytes}, value=us, unit="us", better="lower")

    link = fit([row(10**6, 13.0), row(10**8, 343.0), row(5, 5.0, "combine")], "dispatch")
    assert math.isclose(link.gb_per_s, 300.0) and link.latency_us == pytest.approx(13.0 - 10 / 3)
    with pytest.raises(ValueError, match="two sizes"):
        fit([row(10**6, 13.0)], "dispatch")
    with pytest.raises(ValueError, match="no longer than"):
        fit([row(10**6, 13.0), row(10**7, 12.0)], "dispatch")


def test_the_projection_says_what_it_is(capsys, tmp_path):
    flags = ["--attention-us", "200,110", "--expert-us", "150,90", "--ranks", "8,32", "--output-json", str(tmp_path / "p.json")]
    assert main(["bench", "comm", "--step-model", *flags]) == 0
    assert capsys.readouterr().out.startswith("PROJECTION, not measured")
    assert all(row["name"].startswith("projected") for row in json.loads((tmp_path / "p.json").read_text())["rows"])


@on_cpu
def test_checks_tell_what_failed_and_stop(monkeypatch, capsys):
    def good(party):
        return {"seen": party.size}

    def skipped(party):
        return {"skipped": "no reason"}

    def bad(party):
        raise CheckFailed(f"rank {party.rank} is wrong")

    def never(party):
        raise AssertionError("checks end at the first failure")

    given = {"good": good, "skipped": skipped}
    monkeypatch.setattr(conformance, "applicable", lambda party, fault_mask, brief: given)
    assert main(["bench", "comm", "--check"]) == 0
    printed = capsys.readouterr().out
    assert "good" in printed and "seen 2" in printed and "skipped: no reason" in printed
    given |= {"bad": bad, "never": never}
    assert main(["bench", "comm", "--check"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: CheckFailed: rank 0 is wrong" in printed and "never" not in printed
