"""Malformed HTTP requests and bodies against a server: ``python -m tests.server.fuzz --requests 20000 [--url http://...]``.

Without ``--url`` it serves a fake engine itself. Every answer must be 2xx or 4xx (or the connection closed, where the bytes were no
HTTP); at the end the server must be well, have nothing open, and answer a right request rightly.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 3}),
    ("/v1/completions", {"prompt": [10, 11, 12], "max_tokens": 3, "n": 2, "stream": True, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "stop": ["x"], "temperature": 0.5, "top_p": 0.9, "seed": 3}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 3}),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "text"}}),
    ("/tokenize", {"prompt": "hello"}),
    ("/detokenize", {"tokens": [9, 10]}),
    ("/abort", {"request_id": "cmpl-1"}),
]
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**40, 0.5, -0.0, 1e308, 1e-308, "", "x", "\ud800", "\0", "\ufeff",
    "é" * 50, "A" * 5000, [], {}, [[]], [None], [1, "a"], {"a": 1}, [[[[[]]]]], {"type": "json_schema"}, {"type": "json_object"},
    [0] * 3000, "NaN", [-5],
]  # fmt: skip
RAW = [
    b"", b"{", b"}", b"[", b"nul", b"NaN", b'{"prompt": NaN}', b'{"prompt":"\xff"}', b'{"prompt":"\\ud800"}', b"[" * 20_000,
    b'{"a":' * 9000, b"\0" * 64, b"\xef\xbb\xbf{}", b'{"prompt":"a","prompt":1}', b"1e999", b'"' + b"\\u0000" * 500 + b'"',
]  # fmt: skip
METHODS = ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "POST", "BREW", "post"]
PATHS = [
    "/", "//", "/v1", "/v1/models/../../etc/passwd", "/v1/completions?x=%00", "/%ff%fe", "/" + "a" * 3000, "/metrics", "/health", "*",
    "/v1/models/%2e%2e",
]  # fmt: skip
NAMES = ["n", "logprobs", "best_of", "stop", "seed", "top_k", "logit_bias", "tools", "suffix", "stream_options", "user", "zzz"]
TYPES = ["text/plain", "", "application/json;" * 50, "\xff", "application/+json"]
HEADERS = ["X-Request-Id", "X-data-parallel-rank", "Authorization", "Cookie"]


def mutate(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """``value`` with something in it that is odd."""
    if isinstance(value, dict) and value and depth < 4 and rng.random() < 0.8:
        found = dict(value)
        key = rng.choice(list(found))
        kind = rng.random()
        if kind < 0.2:
            del found[key]
        elif kind < 0.35:
            name = rng.choice(NAMES)
            found[name] = rng.choice(ODD)
        else:
            found[key] = mutate(rng, found[key], depth + 1)
        return found
    if isinstance(value, list) and value and depth < 4 and rng.random() < 0.6:
        place = rng.randrange(len(value))
        return [*value[:place], mutate(rng, value[place], depth + 1), *value[place + 1 :]]
    return rng.choice(ODD)


def body_of(rng: random.Random, right: dict[str, Any]) -> bytes:
    """The bytes of a body: odd values, or broken JSON."""
    if rng.random() < 0.15:
        return rng.choice(RAW)
    value: Any = right
    for _ in range(rng.randint(0, 3)):
        value = mutate(rng, value)
    data = json.dumps(value).encode("utf-8", "surrogatepass")
    if rng.random() < 0.3 and data:
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(data))
            data = data[:place] + bytes([rng.randrange(256)]) + data[place + rng.randint(0, 2) :]
    return data


def request_of(rng: random.Random) -> bytes:
    """One request as bytes."""
    if rng.random() < 0.05:
        return bytes(rng.randrange(256) for _ in range(rng.randint(1, 400))) + b"\r\n\r\n"
    path, right = rng.choice(RIGHT)
    method = "POST" if rng.random() < 0.9 else rng.choice(METHODS)
    path = path if rng.random() < 0.9 else rng.choice(PATHS)
    body = body_of(rng, right)
    headers = {"Host": "x", "Connection": "close", "Content-Type": "application/json", "Content-Length": str(len(body))}
    kind = rng.random()
    if kind < 0.03:
        lengths = ["-1", "1e3", "99999999999999999999", "", "0x10", str(len(body) + 7), str(max(0, len(body) - 3))]
        headers["Content-Length"] = rng.choice(lengths)
    elif kind < 0.06:
        headers["Content-Type"] = rng.choice(TYPES)
    elif kind < 0.09:
        headers[rng.choice(HEADERS)] = rng.choice(["", "\xe9", "a" * 2000, "-1", "0", "x y"])
    elif kind < 0.12:
        del headers["Content-Length"]
        headers["Transfer-Encoding"] = "chunked"
        body = rng.choice([b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), b"zz\r\n" + body, b"ffffffffffffffffff\r\n", b"-5\r\nhello\r\n"])
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    data = f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1", "replace") + body
    return data[: rng.randrange(len(data))] if rng.random() < 0.04 else data


async def send(host: str, port: int, data: bytes, leave: bool) -> int | None:
    """The status of the answer; None when there was none."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
            if leave:
                return None
        got = b""
        with contextlib.suppress(ConnectionError):
            got = await asyncio.wait_for(reader.read(), 60)
        if not got:
            return None
        assert got.startswith(b"HTTP/1.1 "), f"no HTTP came back: {got[:100]!r} to {data[:300]!r}"
        return int(got[9:12])
    finally:
        writer.close()


async def run(host: str, port: int, requests: int, seed: int, streams: int = 32) -> Counter[int | None]:
    """Send them; the statuses.

    Raises:
        AssertionError: an answer was 5xx; has the request.
    """
    statuses: Counter[int | None] = Counter()
    numbers = iter(range(requests))

    async def worker() -> None:
        for number in numbers:
            rng = random.Random(seed * 1_000_003 + number)
            data = request_of(rng)
            try:
                status = await send(host, port, data, rng.random() < 0.05)
            except TimeoutError:
                raise AssertionError(f"request {number} of seed {seed} was not answered within 60 s: {data[:500]!r}") from None
            assert status is None or 200 <= status < 500, f"request {number} of seed {seed} got {status}: {data[:500]!r}"
            statuses[status] += 1

    await asyncio.gather(*(worker() for _ in range(streams)))
    return statuses


def main(argv: list[str]) -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", help="a server that runs already")
    args = parser.parse_args(argv)
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        if args.url is None:
            served = stack.enter_context(serving(FakeEngine(), body_timeout=2.0, header_timeout=2.0))
            url = served.url
        else:
            served, url = None, args.url
        parts = urlsplit(url)
        statuses = asyncio.run(run(parts.hostname or "127.0.0.1", parts.port or 80, args.requests, args.seed))
        check_well(url)
        if served is not None:
            served.engine.wait(lambda: served.engine.open == 0 and served.process.state.open == 0, "all is quiet", 30)
            assert served.engine.error is None and served.process.state.client.open == 0
    print(f"{args.requests} requests in {time.monotonic() - start:.1f} s: {dict(sorted(statuses.items(), key=str))}")
    return 0


def check_well(url: str) -> None:
    """A right request is answered rightly."""
    import httpx

    assert httpx.get(url + "/health", timeout=30).status_code == 200
    answer = httpx.post(url + "/v1/completions", json={"prompt": [10, 11], "max_tokens": 5, "return_token_ids": True}, timeout=60)
    assert answer.status_code == 200 and len(answer.json()["choices"][0]["token_ids"]) == 5, answer.text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
