"""The stand-alone router over fake servers: what goes through, what is tried again, what is told when it cannot be."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

import httpx
import pytest

from tests.server.router.servers import routed

LIMIT_S = 20


def until(true, what):
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end, f"no {what} within {LIMIT_S} s"
        time.sleep(0.01)


def ask(url, prompt="a", **more):
    return httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "model": "m", **more}, timeout=LIMIT_S)


def events(text):
    return [line[6:] for line in text.split("\n") if line.startswith("data: ")]


def test_answers_go_through_with_headers_and_streams_byte_for_byte():
    with routed(2, dp_routing="round_robin") as (url, fakes, fleet, _):
        answer = httpx.post(
            f"{url}/v1/completions", json={"prompt": "hi", "max_tokens": 3},
            headers={"authorization": "Bearer k", "x-data-parallel-rank": "1", "connection": "x-secret", "x-secret": "1"}, timeout=LIMIT_S,
        )  # fmt: skip
        assert answer.json()["choices"][0]["text"] == "xxx" and answer.headers["x-rorqual-worker"].startswith("http://127.0.0.1:")
        (seen,) = fakes[0].headers or fakes[1].headers
        assert seen["authorization"] == "Bearer k" and seen["x-data-parallel-rank"] == "1" and "x-secret" not in seen
        text = ask(url, "q", stream=True, max_tokens=5).text
        assert [json.loads(e)["choices"][0]["text"] for e in events(text)[:-1]] == [f"q-{i} " for i in range(5)]
        assert events(text)[-1] == "[DONE]"
        until(lambda: fleet.router.tokens == [0, 0], "settled accounts")
        assert httpx.get(f"{url}/v1/models?x=1", timeout=LIMIT_S).json() == {"path": "/v1/models", "query": "x=1"}
        assert sorted(len(f.bodies) for f in fakes) == [1, 1]


def test_kv_keeps_a_conversation_where_its_prefix_is():
    with routed(3) as (url, fakes, fleet, _):
        talk = [{"role": "system", "content": "s" * 4000}]
        for turn in range(4):
            talk.append({"role": "user", "content": f"question {turn} " + "w" * 300})
            body = {"messages": talk, "max_tokens": 2}
            assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=LIMIT_S).status_code == 200
        assert sorted(len(f.bodies) for f in fakes) == [0, 0, 4]
        view = fleet.router.snapshot()
        assert sum(view["hit_blocks"]) > 0.6 * sum(view["prompt_blocks"])
        rows = httpx.get(f"{url}/workers", timeout=LIMIT_S).json()["workers"]
        assert max(row["cached_blocks"] for row in rows) >= 15 and all(row["healthy"] for row in rows)
        assert httpx.post(f"{url}/flush_cache", timeout=LIMIT_S).status_code == 200
        assert all("/flush_cache" in f.paths for f in fakes) and fleet.router.index.blocks == [0, 0, 0]


@pytest.mark.parametrize("how", ["stopped", "break_head", 503, 429, 502])
def test_another_server_is_tried_before_the_first_byte(how):
    with routed(2, dp_routing="round_robin", health_interval=60.0) as (url, fakes, fleet, running):
        if how == "stopped":
            running[0].stop()
        elif how == "break_head":
            fakes[0].break_head = True
        else:
            fakes[0].status = how
        for i in range(6):
            answer = ask(url, str(i), max_tokens=2, stream=bool(i % 2))
            assert answer.status_code == 200 and answer.headers["x-rorqual-worker"] == running[1].url
        assert len(fakes[1].bodies) == 6 and fleet.retries >= 1
        if how == "stopped":
            assert fleet.well() == [1] and fleet.retries == 1
        until(lambda: fleet.router.tokens == [0, 0], "settled accounts")


def test_the_last_answer_counts_when_nobody_has_room_and_an_error_when_nobody_answers():
    with routed(2) as (url, fakes, fleet, running):
        for fake in fakes:
            fake.status = 429
        answer = ask(url)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
        for fake in fakes:
            fake.status, fake.break_head = 200, True
        answer = ask(url)
        assert answer.status_code == 502 and all(r.url in answer.json()["error"]["message"] for r in running)
        for fake in fakes:
            fake.health = 503
        until(lambda: not fleet.well(), "sick servers")
        answer = ask(url)
        assert answer.status_code == 503 and "no server is well" in answer.json()["error"]["message"] and answer.headers["retry-after"]
        assert httpx.get(f"{url}/health", timeout=LIMIT_S).status_code == 503
        fakes[1].health, fakes[1].break_head = 200, False
        until(lambda: fleet.well() == [1], "a server that is well again")
        assert ask(url).status_code == 200 and httpx.get(f"{url}/health", timeout=LIMIT_S).json() == {"healthy": 1, "workers": 2}


def test_no_second_try_after_the_first_byte_and_the_client_is_told():
    with routed(2, dp_routing="round_robin") as (url, fakes, fleet, _):
        for fake in fakes:
            fake.break_after = 2
        found = events(ask(url, "z", stream=True, max_tokens=5).text)
        assert len(found) == 3 and json.loads(found[-1])["error"]["code"] == "upstream_broken" and "[DONE]" not in found
        assert sum(len(f.bodies) for f in fakes) == 1 and fleet.retries == 0
        until(lambda: fleet.router.tokens == [0, 0], "settled accounts")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_the_request_at_the_server(stream):
    with routed(1) as (url, fakes, fleet, _):
        fakes[0].delay = 0.02
        with pytest.raises(httpx.ReadTimeout):
            with httpx.stream(
                "POST", f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 100 if not stream else 5000, "stream": stream},
                timeout=httpx.Timeout(LIMIT_S, read=0.3 if not stream else LIMIT_S),
            ) as answer:  # fmt: skip
                for place, _ in enumerate(answer.iter_lines()):
                    if place > 3:
                        raise httpx.ReadTimeout("enough")
        until(lambda: fleet.router.tokens == [0], "end of the request at the router")
        if stream:
            until(lambda: fakes[0].cut == 1 and fakes[0].open == 0, "end of the request at the server")


def test_many_streams_none_lost_none_mixed():
    async def one(client, i):
        answer = await client.post("/v1/completions", json={"prompt": f"p{i}", "max_tokens": 6, "stream": True})
        return [json.loads(e)["choices"][0]["text"] for e in events(answer.text)[:-1]]

    async def everybody(url):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as client:
            return await asyncio.gather(*(one(client, i) for i in range(120)))

    with routed(3, dp_routing="total_tokens") as (url, fakes, fleet, _):
        for fake in fakes:
            fake.delay = 0.005
        for i, found in enumerate(asyncio.run(everybody(url))):
            assert found == [f"p{i}-{k} " for k in range(6)]
        assert max(len(f.bodies) for f in fakes) <= 44
        until(lambda: fleet.router.tokens == [0, 0, 0], "settled accounts")


def test_bad_requests_stop_here_or_get_the_servers_word():
    with routed(1, max_request_bytes=2000, body_timeout=0.5) as (url, fakes, _, _):
        assert httpx.get(f"{url}/nothing", timeout=LIMIT_S).status_code == 404
        assert httpx.get(f"{url}/v1/models/../../abort", timeout=LIMIT_S).status_code in (404, 405)
        assert httpx.get(f"{url}/v1/completions", timeout=LIMIT_S).status_code == 405
        assert ask(url, "x" * 3000).status_code == 413
        head = {"content-type": "application/json"}
        slow = iter([b"{", b""])

        def drip():
            yield next(slow)
            time.sleep(1.0)

        assert httpx.post(f"{url}/v1/completions", content=drip(), headers=head, timeout=LIMIT_S).status_code == 408
        for body in (b"{", b"\xff\xfe", b"[" * 500, b'{"prompt": [[[1]], 1e99, {}], "max_tokens": "x"}', b'{"prompt":[99999999999]}'):
            fakes[0].status = 400
            assert httpx.post(f"{url}/v1/completions", content=body, headers=head, timeout=LIMIT_S).status_code == 400
        assert not any("abort" in p for p in fakes[0].paths)


def test_web_pages_of_others_reach_no_server():
    with routed(2) as (url, servers, _, _):
        page = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
        for path in ("/flush_cache", "/abort", "/v1/completions", "/tokenize"):
            answer = httpx.post(url + path, content=b"{}", headers=page)
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "origin_not_allowed"
        assert not any(server.paths for server in servers)
        own = {"Origin": url, "Sec-Fetch-Site": "same-origin"}
        assert httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=own).status_code == 200
        (seen,) = servers[0].headers or servers[1].headers
        assert "origin" not in seen  # judged here; the server is known by another name


def test_metrics_are_of_every_server():
    with routed(2, dp_routing="round_robin") as (url, _, _, running):
        for _ in range(4):
            ask(url)
        text = httpx.get(f"{url}/metrics", timeout=LIMIT_S).text
        for each in running:
            assert f'rorqual_router:picked_total{{worker="{each.url}"}} 2.0' in text
            assert f'rorqual_router:answers_total{{status="200",worker="{each.url}"}} 2.0' in text
            assert f'rorqual_router:first_byte_seconds_count{{worker="{each.url}"}} 2.0' in text
            assert f'rorqual_router:worker_healthy{{worker="{each.url}"}} 1.0' in text


def test_no_torch_in_the_routers_process():
    code = "import sys, rorqual.launch.router_command, rorqual.engine.server.router.run as r; from rorqual.engine.server.router.app import "
    code += "make_app; from rorqual.engine.server.router.config import RouterConfig; make_app(RouterConfig(worker_urls=('http://h:1',)));"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
