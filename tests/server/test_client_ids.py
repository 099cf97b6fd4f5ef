"""Request ids that clients choose: an aborted request and another one under the same id."""

import asyncio

import pytest

from rorqual import __version__
from rorqual.engine.server.client import EngineClient
from rorqual.engine.server.errors import ApiError
from rorqual.engine.server.mailbox import Mailbox
from rorqual.engine.serving import wire


class Sink:
    """In the place of the socket."""

    def __init__(self):
        self.sent = []

    def send(self, data):
        self.sent.append(wire.decode_up(data))
        return True


@pytest.fixture
def client():
    found = EngineClient("ipc:///nowhere")
    found._dealer = Sink()
    found.welcome = wire.Welcome(
        protocol=wire.PROTOCOL, version=__version__, model="m", folder="", model_type="x", max_model_len=8, vocab_size=8, eos_token_ids=[],
        dp_size=1, layout="", device="cpu", page_size=1, pool_tokens=8, started=0.0,
    )  # fmt: skip
    return found


def news(client, *pieces):
    client._take(wire.encode(wire.News(pieces=[wire.Piece(request_id="a", **piece) for piece in pieces])))


SUBMIT = wire.Submit(request_id="a", prompt=b"", params={})


def test_news_of_an_aborted_request_reach_no_other(client):
    old, new = Mailbox(1, 2), Mailbox(1, 1)
    client.submit(old, 0, SUBMIT)
    news(client, {"index": 1, "text": "one"})
    client.abort(old, ["a"])
    with pytest.raises(ApiError, match="in use"):
        client.submit(new, 0, SUBMIT)
    news(client, {"index": 0, "text": "secret"}, {"index": 0, "finish_reason": "abort"})
    with pytest.raises(ApiError, match="in use"):
        client.submit(new, 0, SUBMIT)
    news(client, {"index": 1, "finish_reason": "abort"})
    client.submit(new, 0, SUBMIT)  # all that was said of the old one has come
    news(client, {"text": "mine", "finish_reason": "stop"})
    assert [piece.text for _, piece in asyncio.run(new.take())] == ["mine"]
    assert client.open == 0 and not client._leaving


@pytest.mark.parametrize("end", ["refused", "gone"])
def test_an_aborted_request_leaves_nothing_behind(client, end):
    old = Mailbox(1, 3)
    client.submit(old, 0, SUBMIT)
    client.abort(old, ["a"])
    if end == "refused":
        client._take(wire.encode(wire.Refused(request_id="a", status=429, error="full")))
        client.submit(old, 0, SUBMIT)
    else:
        client.lose("it died")
    assert not client._leaving


def test_a_grammar_that_found_the_queue_full_is_sent_again(client):
    submit = wire.Submit(request_id="a", prompt=b"", params={}, grammar="{}")
    sink, client._dealer.send = client._dealer, lambda data: False
    with pytest.raises(ApiError, match="queue is full"):
        client.submit(Mailbox(1, 1), 0, submit)
    del sink.send
    client.submit(Mailbox(1, 1), 0, submit)
    assert [type(message) for message in sink.sent] == [wire.Grammar, wire.Submit]
