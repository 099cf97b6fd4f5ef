"""Limits of size, time and number, on raw sockets where a client library would be too polite."""

import json
import socket
import threading
import time

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

LIMITS = {
    "max_request_bytes": 5000,
    "header_timeout": 1.0,
    "body_timeout": 1.0,
    "max_concurrent_requests": 2,
    "keep_alive_timeout": 1.0,
    "send_timeout": 1.0,
}


@pytest.fixture(scope="module")
def strict():
    with serving(FakeEngine(), **LIMITS) as served:
        yield served


def talk(served, *parts, pause=0.0, seconds=10.0):
    """Send ``parts`` with pauses; everything that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=seconds) as sock:
        for part in parts:
            try:
                sock.sendall(part)
            except OSError:
                break
            time.sleep(pause)
        got = b""
        try:
            while more := sock.recv(65536):
                got += more
        except ConnectionResetError:
            pass
        return got


def head(length, path="/v1/completions", extra=b""):
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n".encode() + extra + b"\r\n"


def test_a_body_that_says_it_is_too_large(strict):
    got = talk(strict, head(10**12), b"{")
    assert got.startswith(b"HTTP/1.1 413") and b"5000" in got and b"connection: close" in got


def test_a_chunked_body_that_grows_too_large(strict):
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    got = talk(strict, start, *[b"400\r\n" + b"x" * 1024 + b"\r\n"] * 8)
    assert got.startswith(b"HTTP/1.1 413")


def test_a_body_that_comes_too_slowly(strict):
    got = talk(strict, head(50), *[b"{"] * 3, pause=0.1)
    assert got.startswith(b"HTTP/1.1 408") and b"3 bytes came" in got


def test_a_head_that_comes_too_slowly(strict):
    start = time.monotonic()
    got = talk(strict, b"POST /v1/comp", *[b"l"] * 4, pause=0.2)
    assert got.startswith(b"HTTP/1.1 408") and time.monotonic() - start < 8


def test_a_connection_without_a_word_is_closed(strict):
    assert talk(strict) == b""


def test_a_kept_connection_is_closed_when_nothing_follows(strict):
    got = talk(strict, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 200")


def test_a_second_request_on_a_connection_has_its_own_time(strict):
    one = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    got = talk(strict, one, one, one, pause=0.4)
    assert got.count(b"HTTP/1.1 200") == 3


def test_a_head_that_is_too_large(strict):
    got = talk(strict, b"GET /health HTTP/1.1\r\nHost: x\r\n", *[b"X-A: " + b"a" * 8000 + b"\r\n"] * 12)
    assert got.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\r\nnonsense\r\n\r\n", b"GET /\0 HTTP/1.1\r\n\r\n"]
)
def test_bytes_that_are_no_http(strict, data):
    got = talk(strict, data)
    assert got.startswith(b"HTTP/1.1 4") or got == b""
    assert strict.engine.error is None


def test_a_path_with_bytes_beyond_ascii(strict):
    got = talk(strict, b"GET /v1/\xff\xfe?\xff HTTP/1.1\r\nHost: x\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 4")


def test_too_many_requests_at_once(strict):
    strict.engine.delay = 1.0
    statuses, lock = [], threading.Lock()

    def ask():
        body = json.dumps({"prompt": "x", "max_tokens": 3}).encode()
        got = talk(strict, head(len(body), extra=b"Connection: close\r\n"), body)
        with lock:
            statuses.append((got[9:12], b"retry-after: 1" in got))

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    strict.engine.delay = 0.0
    assert sorted(statuses) == [(b"200", False)] * 2 + [(b"429", True)] * 3


def test_a_client_that_reads_nothing_is_dropped(strict):
    strict.engine.script = lambda submit, index: list(range(100, 2100))
    strict.engine.chunk = 50
    body = json.dumps({"prompt": "x", "max_tokens": 3000, "stream": True, "logprobs": 60}).encode()
    with socket.create_connection(("127.0.0.1", strict.port), timeout=10) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(head(len(body)) + body)
        strict.engine.wait(lambda: strict.process.state.open == 1, "the request begins")
        strict.engine.wait(lambda: strict.process.state.open == 0, "the stalled stream is dropped", 20)
    strict.engine.script, strict.engine.chunk = None, 1


def test_request_timeout():
    with serving(FakeEngine(delay=0.2), request_timeout=0.5) as served:
        with served.http() as client:
            answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 50})
            assert answer.status_code == 504 and "--request-timeout" in answer.text
            streamed = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 50, "stream": True})
        assert '"code":"timeout"' in streamed.text and streamed.text.endswith("data: [DONE]\n\n")
        served.engine.wait(lambda: served.engine.open == 0 and len(served.engine.aborts) == 2, "both are aborted")
