"""Hundreds of streams at a time: none lost, none mixed."""

import asyncio
import json
import random

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving


async def stream(port, number, max_tokens, leave_after):
    """The token ids of one stream and its finish reason; leaves after ``leave_after`` bytes when that is not None."""
    body = json.dumps({"prompt": [8 + number], "max_tokens": max_tokens, "stream": True, "return_token_ids": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    data = await (reader.read() if leave_after is None else reader.read(leave_after))
    writer.close()
    if leave_after is not None:
        return None, None
    assert data.startswith(b"HTTP/1.1 200"), data[:300]
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    assert "data: [DONE]" in data.decode()
    return [t for e in events for t in e["choices"][0]["token_ids"]], events[-1]["choices"][0]["finish_reason"]


def test_five_hundred_streams_some_of_whose_clients_leave():
    rng = random.Random(3)
    jobs = [(n, rng.randint(1, 30), rng.randint(1, 2000) if rng.random() < 0.3 else None) for n in range(500)]

    async def all_of(port):
        return await asyncio.wait_for(asyncio.gather(*(stream(port, *job) for job in jobs)), 60)

    with serving(FakeEngine(delay=0.005)) as served:
        found = asyncio.run(all_of(served.port))
        for (number, most, leave), (ids, reason) in zip(jobs, found, strict=True):
            if leave is None:
                assert reason == "length" and ids == served.engine.expected_ids([8 + number], most)
        served.engine.wait(lambda: served.engine.open == 0 and served.process.state.open == 0, "all is quiet")
        assert served.process.state.client.open == 0
        assert len(served.engine.submits) == 500
