"""Clients that leave: their requests end in the engine."""

import json
import random
import socket
import time

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving


def send(served, body, path="/v1/completions"):
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", served.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_aborts_all_its_completions(served, stream, reset):
    engine = served.engine
    engine.delay = 0.05
    sock = send(served, {"prompt": ["a", "b"], "n": 2, "max_tokens": 2000, "stream": stream})
    engine.wait(lambda: engine.open == 4, "four completions run")
    if stream:
        assert sock.recv(10) == b"HTTP/1.1 2"
    if reset:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    engine.wait(lambda: engine.open == 0, "the completions are aborted")
    assert len(engine.aborts) == 1 and len(engine.aborts[0].request_ids) == 2


def test_a_client_that_closes_its_sending_side_has_left(served):
    served.engine.delay = 0.05
    sock = send(served, {"prompt": "x", "max_tokens": 2000})
    served.engine.wait(lambda: served.engine.open == 1, "it runs")
    sock.shutdown(socket.SHUT_WR)
    served.engine.wait(lambda: served.engine.open == 0, "it is aborted")
    assert sock.recv(100) == b"" and len(served.engine.aborts) == 1
    sock.close()


def test_a_client_that_leaves_in_the_middle_of_its_body_submits_nothing(served):
    sock = socket.create_connection(("127.0.0.1", served.port), timeout=10)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{")
    sock.close()
    time.sleep(0.2)
    with served.http() as client:
        assert client.get("/health").status_code == 200
    assert not served.engine.submits


def test_many_leave_at_random_moments():
    rng = random.Random(5)
    with serving(FakeEngine(delay=0.002)) as served:
        socks = [send(served, {"prompt": f"p{i}", "max_tokens": rng.randint(1, 40), "stream": bool(i % 2)}) for i in range(120)]
        order = list(range(len(socks)))
        rng.shuffle(order)
        for place in order:
            if rng.random() < 0.5:
                time.sleep(0.001)
            socks[place].close()
        served.engine.wait(lambda: served.engine.open == 0 and served.process.state.open == 0, "all is quiet")
        assert served.process.state.client.open == 0 and served.engine.error is None
        assert served.openai().completions.create(model="tiny", prompt="x", max_tokens=3).usage.completion_tokens == 3


def test_an_id_that_no_request_can_have_is_not_passed_on(served):
    """The engine would get it for each prompt that the request might have."""
    with served.http() as client:
        for names in ("x" * 161, ["cmpl-mine", "x" * 100_000]):
            answer = client.post("/abort", json={"request_id": names})
            assert answer.status_code == 400 and "160" in answer.json()["error"]["message"]
        assert not served.engine.aborts
        assert client.post("/abort", json={"request_id": "chatcmpl-" + "x" * 128}).status_code == 200
        served.engine.wait(lambda: served.engine.aborts, "an id of usual length is passed on")


def test_abort_by_id_ends_the_request_with_what_there_is(served):
    engine = served.engine
    engine.delay = 0.03
    sock = send(served, {"prompt": "x", "max_tokens": 2000, "request_id": "mine"})
    engine.wait(lambda: engine.open == 1, "it runs")
    time.sleep(0.2)
    with served.http() as client:
        assert client.post("/abort", json={"request_id": "cmpl-nobody"}).status_code == 200
        assert engine.open == 1
        assert client.post("/abort", json={"request_id": "cmpl-mine"}).status_code == 200
        answer = b""
        while b'"usage"' not in answer:
            answer += sock.recv(65536)
        sock.close()
        assert b'"finish_reason":"abort"' in answer and b"HTTP/1.1 200" in answer
        assert client.post("/abort", json={}).status_code == 400
        assert client.post("/abort", json={"abort_all": True}).status_code == 200
    engine.wait(lambda: engine.aborts[-1].everything, "the abort of all came last")
