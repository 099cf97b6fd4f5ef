"""The page of a server: its numbers, what it may fetch, and that a browser draws it."""

import asyncio
import base64
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest

from rorqual.engine.server.dashboard import History, add_routes, dashboard, page
from rorqual.engine.server.dashboard.data import heat
from rorqual.engine.server.dashboard.page import headers
from rorqual.engine.serving.expert_balance import pack
from tests.server.dashboard.made_numbers import LAYERS, snapshots, welcome

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install 'rorqual[serve]')")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def many():
    return list(snapshots(120, start=time.time() - 120))


def state_of(many):
    client = SimpleNamespace(welcome=welcome(), snapshot=None, lost=None, ending=None, on_snapshot=None)
    return SimpleNamespace(client=client, names=lambda: ("<b>served</b> & so on",))


def app_with(many):
    from fastapi import FastAPI

    app, state = FastAPI(), state_of(many)
    add_routes(app, state)
    for snapshot in many:
        state.client.snapshot = snapshot
        state.client.on_snapshot(snapshot)
    return app


def test_points_are_what_happened_between_two_snapshots(many):
    history = History()
    for snapshot in [*many, many[-1], many[3]]:  # one that was seen, and an older one, change nothing
        history.feed(snapshot)
    assert len(history.points) == len(many) - 1 and len(history.since(many[-5].at)) == 4
    before, now = many[36], many[41]  # a point sums up five seconds
    point = next(p for p in history.points if p["at"] == now.at)
    assert history.points[0]["at"] == many[1].at
    pairs = zip(now.replicas, before.replicas, strict=True)
    grown = [a["requests"]["generation_tokens"] - b["requests"]["generation_tokens"] for a, b in pairs]
    assert point["output_tps"] == pytest.approx(sum(grown) / 5, rel=1e-3) and sum(grown) > 0
    assert point["prompt_tps"] == pytest.approx(4 * 3 * 2000, rel=1e-3) and point["ended_ps"] == pytest.approx(12, rel=1e-3)
    assert point["prefix_hits"] == pytest.approx(1500 / 4000) and point["tier_hits"] == pytest.approx(52 / 54.6)
    assert 0.02 < point["ttft_p50"] < point["ttft_p99"] < 5 and 0.03 < point["tpot_p50"] < 0.045 and 0.03 < point["step_s"] < 0.045
    assert point["running"] == sum(r["leader"]["running"] for r in now.replicas)
    assert 0 < point["balance"] < 1 and 0 < point["even_tokens"] < 1 and 0 < point["padding"] < 0.1


def test_an_engine_that_began_anew_makes_no_negative_rates(many):
    history = History()
    again = list(snapshots(3, start=many[50].at + 1))
    for snapshot in [*many[:51], *again]:
        history.feed(snapshot)
    assert all(p[name] >= 0 for p in history.points for name in ("output_tps", "prompt_tps", "dispatch_bps", "tier_bps"))
    history.feed(next(snapshots(1, dp=2, start=again[-1].at + 1)))  # another number of replicas: nothing to compare with
    assert len(history.points) == 52


def test_before_the_engine_is_ready_and_before_its_first_numbers():
    found = dashboard(None, None, History(), state="loading")
    assert found["about"]["state"] == "loading" and found["replicas"] == [] and found["heat"] is None
    json.dumps(found)


def test_heat_is_relative_to_the_mean_of_a_layer():
    import numpy as np

    counts = np.full((3, 512), 10)
    counts[1] = 0
    counts[2, 7] = 10_000
    found = heat(pack(counts, (3, 4, 9)))
    cells = np.frombuffer(base64.b64decode(found["cells"]), np.uint8).reshape(3, 256)
    assert found["columns"] == 256 and found["layers"] == [3, 4, 9] and (cells[0] == 64).all() and not cells[1].any()
    assert cells[2, 3] == 255 and found["peaks"][0] == 1 and found["peaks"][1] is None and found["peaks"][2] > 300
    assert heat(None) is None and heat(pack(np.zeros((2, 8), np.int64), (0, 1))) is None


def test_the_page_fetches_nothing_and_runs_nothing_but_its_own_script():
    text = page().decode()
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text) and "/* s" not in text
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["data:,", "metrics"]
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "document.write" not in text
    rules = headers()["Content-Security-Policy"]
    assert "default-src 'none'" in rules and "script-src 'sha256-" in rules and "frame-ancestors 'none'" in rules


def test_routes_answer(many):
    from fastapi.testclient import TestClient

    client = TestClient(app_with(many))
    answer = client.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html") and answer.content == page()
    data = client.get("/dashboard.json").json()
    assert data["about"]["model"] == "<b>served</b> & so on" and len(data["points"]) == len(many) - 1
    assert [row["engine"] for row in data["replicas"]] == [0, 1, 2, 3] and data["replicas"][1]["routing_hits"] == pytest.approx(12 / 31)
    last = data["points"][-1]["at"]
    assert client.get(f"/dashboard.json?since={last}").json()["points"] == []
    assert len(client.get("/dashboard.json?since=nonsense").json()["points"]) == len(many) - 1


@pytest.fixture
def address(many):
    """Of a real server with the page."""
    uvicorn = pytest.importorskip("uvicorn")
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app_with(many), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)
    listener.close()
    assert not thread.is_alive()


def test_a_browser_draws_it(address, tmp_path):
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser on PATH ({', '.join(BROWSERS)}); apt-get install chromium")
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1320,1500"]
    words += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--virtual-time-budget=4000", "--dump-dom", address]
    run = subprocess.run([browser, *words], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    head = re.search(r"<html[^>]*>", run.stdout)[0]
    assert 'data-failed=""' in head and int(re.search(r'data-polls="(\d+)"', head)[1]) >= 1, head
    assert 'data-drawn="12"' in head and f'data-heat="{len(LAYERS)}x256"' in head, head
    assert "&lt;b&gt;served&lt;/b&gt; &amp; so on" in run.stdout and "<b>served" not in run.stdout
    assert run.stdout.count("<path") == 19 and len(re.findall(r"title=.expert rank \d", run.stdout)) == 32
    shown = re.sub(r"<script>.*?</script>", "", run.stdout, flags=re.DOTALL)
    assert len(re.findall(r"<td>DP \d</td>", shown)) == 4 and "NaN" not in shown and "undefined" not in shown
