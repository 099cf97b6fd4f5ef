"""Clients that mean harm, or follow a part of HTTP that few do, on raw sockets."""

import json
import logging
import socket
import time

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving
from tests.server.test_limits import head, talk

BODY = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
CLOSE = b"Connection: close\r\n"


@pytest.fixture(scope="module")
def strict():
    with serving(FakeEngine(), header_timeout=2.0, body_timeout=5.0, keep_alive_timeout=1.0, send_timeout=1.0) as served:
        yield served
        served.engine.wait(lambda: served.engine.open == 0 and served.process.state.open == 0, "all is quiet")


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_a_client_that_would_rather_speak_http_2(strict, pause):
    """Java's client asks for it with every first request."""
    strict.engine.submits.clear()
    parts = [head(len(BODY), extra=UPGRADE), BODY[:9], BODY[9:], head(len(BODY), extra=UPGRADE) + BODY, head(len(BODY), extra=CLOSE) + BODY]
    got = talk(strict, *parts, pause=pause)
    assert got.count(b"HTTP/1.1 200") == got.count(b"HTTP/1.1 ") == 3 and len(strict.engine.submits) == 3


def test_other_protocols_are_ignored_on_requests_of_every_framing(strict):
    strict.engine.submits.clear()
    get = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    empty = head(0, path="/flush_cache", extra=UPGRADE)
    got = talk(strict, get * 3 + CHUNKED + UPGRADE + b"\r\n" + CHUNKS + b"\r\n" + empty + get + head(len(BODY), extra=CLOSE) + BODY)
    assert got.count(b"HTTP/1.1 200") == got.count(b"HTTP/1.1 ") == 7 and len(strict.engine.submits) == 2
    assert got.count(b'{"status":"ok"}') == 4


def test_what_follows_a_body_says_nothing_and_is_bounded(strict):
    trailers = b"X-T: 1\r\nContent-Type: text/plain\r\nOrigin: https://evil.example\r\nAuthorization: x\r\n\r\n"
    got = talk(strict, CHUNKED + CLOSE + b"\r\n" + CHUNKS + trailers)
    assert got.startswith(b"HTTP/1.1 200")
    for flood in ([b"X-%d: " % place + b"a" * 8000 + b"\r\n" for place in range(40)], [b"X: "] + [b"a" * 8000] * 40):
        got = talk(strict, CHUNKED + b"\r\n" + CHUNKS, *flood, pause=0.001)
        assert got.startswith(b"HTTP/1.1 431") or got == b"", got[:100]
    got = talk(strict, CHUNKED + b"\r\n1;", *[b"e" * 8000] * 40, pause=0.001)
    assert got.startswith(b"HTTP/1.1 431") or got == b"", got[:100]


@pytest.mark.parametrize("first", [b"", head(len(BODY)) + BODY], ids=["quick", "behind a slow one"])
def test_more_requests_than_one_connection_may_have_open(strict, first):
    """They are not kept until their turn comes: a flood of them would fill memory."""
    engine = strict.engine
    engine.delay = 0.5
    try:
        got = talk(strict, first + b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n" * 5000)
        # the last of what is said; a reset of the connection may have lost it
        assert got.count(b"HTTP/1.1 200") <= 200 and (got == b"" or got.count(b"HTTP/1.1 400") == 1)
        good = talk(strict, (b"GET /ping HTTP/1.1\r\nHost: x\r\n" + b"\r\n") * 100 + b"GET /ping HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n")
        assert good.count(b"HTTP/1.1 200") == 101
    finally:
        engine.delay = 0.0


@pytest.mark.parametrize("stream", [False, True])
def test_requests_behind_another_on_a_connection_that_is_lost(strict, stream):
    engine = strict.engine
    engine.submits.clear()
    engine.delay = 0.05
    body = json.dumps({"prompt": "x", "max_tokens": 2000, "stream": stream}).encode()
    sock = socket.create_connection(("127.0.0.1", strict.port), timeout=10)
    sock.sendall((head(len(body)) + body) * 3)
    engine.wait(lambda: engine.open == 1, "the first runs")
    time.sleep(0.2)  # the others have been read
    sock.close()
    engine.wait(lambda: engine.open == 0, "it is aborted")
    engine.delay = 0.0
    assert len(engine.submits) == 1


@pytest.mark.parametrize("more", [b"\0garbage\r\n\r\n", b"GET /hea"])
def test_an_answer_that_has_begun_is_not_mixed_with_an_error(strict, more):
    engine = strict.engine
    engine.delay = 0.05
    body = json.dumps({"prompt": "x", "max_tokens": 2000, "stream": True}).encode()
    got = talk(strict, head(len(body)) + body, more, pause=0.4)
    engine.delay = 0.0
    assert got.startswith(b"HTTP/1.1 200") and got.count(b"HTTP/1.1") == 1 and b"error" not in got
    engine.wait(lambda: engine.open == 0, "it is aborted")


def test_one_answer_to_a_request_with_garbage_behind_it(strict):
    got = talk(strict, head(len(BODY)) + BODY + b"\0garbage\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 400") and got.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("extra", [b"", CLOSE])
def test_an_answer_that_nobody_reads_does_not_stay(strict, extra, caplog):
    caplog.set_level(logging.WARNING, "rorqual.server")
    body = b'{"return_token_strs":true,"prompt":"' + b"ab " * 300_000 + b'"}'
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", strict.port))
        sock.sendall(head(len(body), path="/tokenize", extra=extra) + body)
        strict.engine.wait(lambda: len(strict.process.server.server_state.connections) == 1, "it is there")
        strict.engine.wait(lambda: not strict.process.server.server_state.connections, "it is dropped", 30)
    assert "has read nothing of its answer for 1 s" in caplog.text


def test_a_slow_reader_gets_all(strict):
    body = b'{"return_token_strs":true,"prompt":"' + b"ab " * 900_000 + b'"}'
    got = 0
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sock.connect(("127.0.0.1", strict.port))
        sock.settimeout(20)
        sock.sendall(head(len(body), path="/tokenize", extra=CLOSE) + body)
        length = None
        while more := sock.recv(1 << 17):
            if length is None:
                length = int(more.split(b"content-length: ")[1].split(b"\r\n")[0]) + more.index(b"\r\n\r\n") + 4
            got += len(more)
            time.sleep(0.03)
    assert got == length > 5_000_000


@pytest.mark.parametrize("number", ["-1", "0", "99999999999999999999999", "-99999999999999999999999", "1e400", "9" * 5000, "1.5"])
def test_numbers_that_no_message_carries(strict, number):
    with strict.http() as client:
        body = f'{{"num_steps":{number}}}'
        answer = client.post("/start_profile", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["message"]
