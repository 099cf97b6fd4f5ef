"""Web pages of other origins: what a browser sends for them does nothing."""

import json

import httpx
import pytest

from rorqual.engine.server.origin import is_own
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

PATHS = [
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort", "/flush_cache", "/start_profile", "/stop_profile",
    "/ping",
]  # fmt: skip
STRANGERS = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},  # a sandboxed frame, a file
    {"Origin": ""},
    {"Origin": "http://127.0.0.1:1"},  # another server of this machine
    {"Origin": "http://127.0.0.1.evil.example"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


@pytest.mark.parametrize("path", PATHS)
def test_pages_of_others_are_refused(served, path):
    with served.http() as client:
        for stranger in STRANGERS:
            answer = client.post(path, content=b"{}", headers={"Content-Type": "text/plain", **stranger})
            assert answer.status_code == 403, (stranger, answer.text)
            error = answer.json()["error"]
            assert error["code"] == "origin_not_allowed" and "--allowed-origins" in error["message"]
            assert "access-control-allow-origin" not in answer.headers
    assert not served.engine.submits and not served.engine.controls and not served.engine.aborts


def test_who_is_no_page_of_others(served):
    port = served.port
    with served.http() as client:
        for headers in (
            {},
            {"Origin": f"http://127.0.0.1:{port}"},
            {"Origin": f"https://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"},
            {"Sec-Fetch-Site": "none"},
            {"Host": "llm.example", "Origin": "https://llm.example"},  # behind a proxy that keeps the name
        ):
            assert client.post("/flush_cache", headers=headers).status_code == 200
            assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers).status_code == 200
    assert len(served.engine.controls) == 5 and len(served.engine.submits) == 5


def test_questions_of_pages_are_answered_and_hidden_by_the_browser(served):
    with served.http() as client:
        answer = client.get("/health", headers=STRANGERS[0])
        assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


def test_origins_that_are_allowed():
    with serving(FakeEngine(), allowed_origins=("https://a.example",)) as served, served.http() as client:
        good = {"Origin": "https://a.example", "Sec-Fetch-Site": "cross-site"}
        answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=good)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://a.example"
        for origin in ("https://b.example", "http://a.example", "https://a.example:444", "https://a.example.b.example"):
            assert client.post("/flush_cache", headers={"Origin": origin}).status_code == 403
        assert client.post("/flush_cache", headers=[("Origin", "https://a.example"), ("Origin", "https://b.example")]).status_code == 403
    with serving(FakeEngine(), allowed_origins=("*",)) as served, served.http() as client:
        assert client.post("/flush_cache", headers=STRANGERS[0]).status_code == 200


@pytest.mark.parametrize(
    ("origin", "host", "own"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("http://LocalHost:8000", "localhost:8000", True),
        ("http://localhost", "localhost:80", True),
        ("https://x.example", "x.example", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://localhost:8000", "localhost:8001", False),
        ("http://localhost:8000", "", False),
        ("http://localhost:99999", "localhost:99999", False),
        ("http://[", "[", False),
        ("file://", "", False),
        ("null", "null", False),
        ("chrome-extension://x", "x", False),
    ],
)
def test_the_servers_own_origin(origin, host, own):
    assert is_own(origin, host) is own


@pytest.mark.parametrize("path", ["/health", "/ping", "/metrics", "/version", "/v1/models", "/"])
def test_load_balancers_ask_with_head(served, path):
    with served.http() as client:
        asked, full = client.head(path), client.get(path)
        assert asked.status_code == 200 and asked.content == b"" and full.content
        assert asked.headers["content-type"] == full.headers["content-type"] and int(asked.headers["content-length"]) > 0
        assert client.head("/v1/completions").status_code == 405 and client.head("/nothing").status_code == 404
    document = httpx.get(served.url + "/openapi.json").json()
    assert "head" not in json.dumps([list(methods) for methods in document["paths"].values()])
