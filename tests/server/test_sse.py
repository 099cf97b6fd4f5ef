"""Streams whose client stops reading, at any of their messages."""

import asyncio
from types import SimpleNamespace

import pytest

from rorqual.engine.server.errors import ApiError
from rorqual.engine.server.sse import EventStream


class Generation:
    """As much of one as a stream needs."""

    def __init__(self):
        self.name, self.open = "x", 0
        self.state = SimpleNamespace(config=SimpleNamespace(send_timeout=0.1))

    def __enter__(self):
        self.open += 1

    def __exit__(self, *_):
        self.open -= 1

    def gone(self):
        raise AssertionError("the client is there")


async def events(fails):
    yield b"data: 1\n\n"
    if fails:
        raise ApiError(503, "the engine is gone")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("stuck", range(4))
def test_a_client_that_stops_reading_is_dropped(stuck, fails):
    generation, sent, dropped = Generation(), [], []

    async def send(message):
        if len(sent) == stuck:
            await asyncio.Event().wait()
        sent.append(message)

    async def receive():
        await asyncio.Event().wait()

    scope = {"extensions": {"rorqual": {"drop": lambda: dropped.append(True)}}}
    stream = EventStream(generation, events(fails))
    asyncio.run(asyncio.wait_for(stream(scope, receive, send), 10))
    messages = 4 if fails else 3  # head, event, error, end
    assert generation.open == 0 and len(sent) == min(stuck, messages) and dropped == [True] * (stuck < messages)
