"""The text of ``/metrics``: a parser reads it, every number is there, and no client makes it grow without end."""

import json
import math
import os
import subprocess
import sys
import time

import pytest

from rorqual.engine.server.http_counts import Counting, HttpCounts, method_of
from rorqual.engine.server.metric_table import REPLICA_ROWS, ROUTING_ROWS, find
from rorqual.engine.server.metrics import PREFIX, render
from tests.server.dashboard.made_numbers import snapshots, welcome

parser = pytest.importorskip("prometheus_client.parser")


@pytest.fixture(scope="module")
def last():
    return list(snapshots(20, start=time.time() - 20))[-1]


def read(data: bytes):
    """{(name, labels): value} of a text."""
    families = parser.text_string_to_metric_families(data.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def labels(**more):
    return tuple(sorted({"model_name": "made-up", **more}.items()))


def test_every_number_of_every_rank_is_there(last):
    found = read(render(welcome(), last, HttpCounts()))
    for row in REPLICA_ROWS:
        for replica in last.replicas:
            value, engine = find(replica, row.path), str(replica["dp_rank"])
            if value is None:
                assert row.path[0] != "requests" and not any(name == PREFIX + row.name for name, _ in found), row
            elif row.kind == "histogram":
                assert found[f"{PREFIX}{row.name}_count", labels(engine=engine)] == sum(value["counts"])
                assert found[f"{PREFIX}{row.name}_sum", labels(engine=engine)] == pytest.approx(value["sum"])
                assert found[f"{PREFIX}{row.name}_bucket", labels(engine=engine, le="+Inf")] == sum(value["counts"])
            else:
                name = PREFIX + row.name + ("_total" if row.kind == "counter" else "")
                for key, one in value.items() if row.label else [(None, value)]:
                    assert found[name, labels(engine=engine, **({row.label: key} if row.label else {}))] == pytest.approx(one)
    assert found[PREFIX + "expert_balancedness", labels()] == last.engine["experts"]["balancedness"]
    assert sum(name == PREFIX + "expert_rank_load" for name, _ in found) == 32
    assert found[PREFIX + "routing_picked_total", labels(engine="2")] == last.engine["routing"]["picked"][2]
    assert 0 <= found[PREFIX + "snapshot_age_seconds", ()] < 30 and found[PREFIX + "engine_up", ()] == 1
    assert all(math.isfinite(value) for value in found.values())


def test_names_of_vllm_are_kept():
    names = {row.name for row in REPLICA_ROWS}
    assert {
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits",
        "num_preemptions", "prompt_tokens", "generation_tokens", "request_success", "iteration_tokens_total", "time_to_first_token_seconds",
        "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens",
        "request_time_per_output_token_seconds",
    } <= names  # fmt: skip
    assert len(names) == len(REPLICA_ROWS) and not names & {row.name for row in ROUTING_ROWS}
    assert all(row.help.endswith(".") for row in (*REPLICA_ROWS, *ROUTING_ROWS))


def test_buckets_are_cumulative(last):
    found = read(render(welcome(), last))
    name = PREFIX + "time_to_first_token_seconds_bucket"
    rows = sorted((float(dict(keys)["le"]), value) for (n, keys), value in found.items() if n == name and dict(keys)["engine"] == "0")
    values = [value for _, value in rows]
    assert values == sorted(values) and values[-1] == 20 * 3 and rows[0][0] == 0.001 and rows[-1][0] == math.inf


def test_before_the_engine_and_before_its_numbers():
    assert read(render(None, None))[PREFIX + "engine_up", ()] == 0
    found = read(render(welcome(), None, model='a "quoted"\nname \\'))
    assert next(dict(keys)["model_name"] for name, keys in found if name == PREFIX + "engine_info") == 'a "quoted"\nname \\'


def test_leaders_that_have_told_nothing_leave_gaps_not_zeros(last):
    import msgspec

    silent = msgspec.structs.replace(last, replicas=[{**r, "leader": {}, "age": None} for r in last.replicas])
    found = read(render(welcome(), silent))
    assert not any(name in (PREFIX + "num_requests_running", PREFIX + "steps_total") for name, _ in found)
    assert found[PREFIX + "generation_tokens_total", labels(engine="0")] > 0


# ---- HTTP


def totals(counts):
    return read(render(None, None, counts))


def test_http_counts_of_several_processes_add_up_and_never_fall(tmp_path):
    mine = HttpCounts(tmp_path)
    for status in (200, 200, 429):
        mine.begin()
        mine.end("/v1/completions", "POST", status, 0.2)
    mine.begin()
    code = (
        "import sys; from rorqual.engine.server.http_counts import HttpCounts; counts = HttpCounts(sys.argv[1])\n"
        "counts.begin(); counts.begin(); counts.end('/v1/completions', 'POST', 200, 0.1); counts.publish()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)  # it ends with a request in flight
    found = totals(mine)
    key = tuple(sorted({"handler": "/v1/completions", "method": "POST", "status": "200"}.items()))
    assert found[PREFIX + "http_requests_total", key] == 3 and found[PREFIX + "http_processes", ()] == 1
    assert found[PREFIX + "http_requests_in_flight", ()] == 1  # of the process that lives
    assert found[PREFIX + "http_request_duration_seconds_count", (("handler", "/v1/completions"),)] == 4
    again = HttpCounts(tmp_path)  # another process sees the same
    assert totals(again)[PREFIX + "http_requests_total", key] == 3


def test_spoilt_files_of_others_are_left_out(tmp_path):
    (tmp_path / "http-1-x.json").write_text("{")
    (tmp_path / "http-2-x.json").write_text(json.dumps({"pid": os.getpid(), "requests": []}))
    mine = HttpCounts(tmp_path)
    mine.begin()
    mine.end("/health", "GET", 200, 0.0)
    assert totals(mine)[PREFIX + "http_requests_total", (("handler", "/health"), ("method", "GET"), ("status", "200"))] == 1


def test_a_folder_that_is_gone_does_no_harm(tmp_path):
    mine = HttpCounts(tmp_path / "never made")
    mine.begin()
    mine.end("/health", "GET", 200, 0.0)
    assert totals(mine)[PREFIX + "http_requests_in_flight", ()] == 0


def test_clients_cannot_make_metrics_grow():
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    app, counts = FastAPI(), HttpCounts()

    @app.get("/things/{name}")
    def thing(name: str) -> str:
        if name == "bad":
            raise RuntimeError("on purpose")
        return name

    app.add_middleware(Counting, counts=counts)
    client = TestClient(app, raise_server_exceptions=False)
    for number in range(70):
        assert client.get(f"/things/{number}").status_code == 200
        assert client.get(f"/nowhere/{number}").status_code == 404
        client.request(f"M{number}", "/things/1")
    assert client.get("/things/bad").status_code == 500
    found = counts.totals()
    kinds = {(route, method, status) for route, method, status, _ in found["requests"]}
    assert {("/things/{name}", "GET", 200), ("/things/{name}", "GET", 500), ("other", "GET", 404)} < kinds and len(kinds) == 4, kinds
    assert found["in_flight"] == 0 and sum(row[3] for row in found["requests"]) == 211 and len(found["seconds"]) == 2
    for number in range(200):
        counts.begin()
        counts.end(f"/made/up/{number}", "GET", 200, 0.0)
    assert len(counts.totals()["seconds"]) <= 65 and method_of({"method": "BREW"}) == "other"
