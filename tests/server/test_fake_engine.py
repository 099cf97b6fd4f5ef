"""The fake engine itself: what it promises to the tests that use it."""

import numpy as np
import zmq

from rorqual.engine.serving import wire
from tests.server.fake_engine import FakeEngine


def test_it_answers_as_it_says():
    with FakeEngine(cached_tokens=2) as engine:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        try:
            socket.connect(engine.address)
            socket.send(wire.encode(wire.Hello(protocol=1, version="x")))
            prompt = [10, 11, 12]
            params = {"n": 2, "max_tokens": 5, "logprobs": 2}
            socket.send(wire.encode(wire.Submit(request_id="a", prompt=np.asarray(prompt, "<i4").tobytes(), params=params)))
            ids, text, ends = {0: [], 1: []}, {0: "", 1: ""}, {}
            assert socket.poll(5000)
            assert isinstance(wire.decode_down(socket.recv()), wire.Welcome)
            while len(ends) < 2:
                assert socket.poll(5000), "no news within 5 s"
                for piece in wire.decode_down(socket.recv()).pieces:
                    ids[piece.index] += piece.token_ids
                    text[piece.index] += piece.text
                    assert piece.logprobs is not None and len(piece.logprobs[0]) == 2
                    if piece.finish_reason is not None:
                        ends[piece.index] = (piece.finish_reason, piece.cached_tokens)
        finally:
            socket.close(linger=0)
            context.term()
        for index in (0, 1):
            assert ids[index] == engine.expected_ids(prompt, 5, index=index)
            assert text[index] == engine.expected_text(prompt, 5, index=index)
        assert ends == {0: ("length", 2), 1: ("length", 2)}
