"""Large bodies: others are answered meanwhile."""

import asyncio
import contextlib
import http.client
import json
import re
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from rorqual.engine.server.body import decode, decode_ids
from rorqual.engine.server.errors import ApiError
from rorqual.engine.server.large import LARGE
from tests.server.fake_engine import FakeEngine
from tests.server.serving import wait_ready
from tests.server.test_processes import processes

SIZE = 16 << 20


def filled(start, item, end, more=b",", all_that_fits=False):
    """A body of as many ``item`` as a server takes between ``start`` and ``end``, or as fit into 16 MB."""
    times = (SIZE - len(start) - len(end)) // (len(item) + len(more))
    if not all_that_fits:
        plain = re.sub(rb'".*?(?<!\\)"', b'""', item)
        counts = (plain.count(b",") + len(more), 8), (plain.count(b"[") + plain.count(b"{"), 128), (plain.count(b'"') / 2, 128)
        times = min(times, *(int(0.999 * (SIZE // size) / count) for count, size in counts if count))
    return start + more.join([item] * times) + end


def chat(message, **more):
    return filled(b'{"messages":[', message, b'],"max_tokens":1}', **more)


def prompt(item, **more):
    return filled(b'{"prompt":[', item, b'],"max_tokens":1}', **more)


def tools(item, **more):
    return filled(b'{"messages":[{"role":"user","content":"x"}],"tools":[', item, b"]}", **more)


WORDS = b"Whales, as is known, breathe air; a calf drinks for {a year} or \\u00fcber two.\\n"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = b'{"messages":[{"role":"user","content":"x"}],'
BODIES = {
    "one text": (400, COMPLETIONS, b'{"max_tokens":1,"prompt":"' + WORDS * (SIZE // 90) + b'"}'),
    "one list of ids": (400, COMPLETIONS, prompt(b"1001")),
    "the last ids": (200, COMPLETIONS, filled(b'{"truncate_prompt_tokens":5,"prompt":[', b"1001", b'],"max_tokens":1}')),
    "lists of ids": (200, COMPLETIONS, prompt(b"[" + b",".join([b"1001"] * 2047) + b"]")),
    "short lists": (400, COMPLETIONS, prompt(b"[1]")),
    "short texts": (400, COMPLETIONS, prompt(b'"a"')),
    "texts": (200, COMPLETIONS, b'{"max_tokens":1,"prompt":[' + b",".join([b'"' + b"a b " * 4000 + b'"'] * 128) + b"]}"),
    "biases": (400, COMPLETIONS, b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(SIZE // 129)) + b"}}"),
    "one message": (400, CHAT, b'{"messages":[{"role":"user","content":"' + WORDS * (SIZE // 90) + b'"}]}'),
    "messages": (400, CHAT, chat(b'{"role":"user","content":"a"}')),
    "longer messages": (400, CHAT, chat(b'{"role":"user","content":"' + WORDS * 5 + b'"}')),
    "empty messages": (400, CHAT, chat(b"{}")),
    "unknown": (200, CHAT, filled(HI + b'"zz":[', b"{}", b"]}")),
    "tools": (400, CHAT, tools(b'{"type":"function","function":{"name":"f","parameters":{}}}')),
    "empty tools": (400, CHAT, tools(b'{"a":[]}')),
    "deep": (400, CHAT, b"[" * (SIZE // 129)),
    "a schema": (400, COMPLETIONS, filled(b'{"prompt":"x","guided_json":{"enum":[', b"1", b"]}}")),
    "a schema of objects": (400, CHAT, filled(HI + b'"response_format":{"type":"structural_tag","format":[', b"{}", b"]}}")),
    "choices": (400, COMPLETIONS, filled(b'{"prompt":"x","guided_choice":[', b'"a whale and a calf"', b"]}")),
    "to be tokens": (200, "/tokenize", b'{"return_token_strs":true,"prompt":"' + WORDS * (SIZE // 600) + b'"}'),
    "to be text": (200, "/detokenize", filled(b'{"tokens":[', b"1001", b"]}")),
}  # fmt: skip
TOO_FULL = {
    "values": prompt(b"1", all_that_fits=True),
    "lists and objects": chat(b"{}", all_that_fits=True).replace(b",", b"", 3_000_000),
    "texts": prompt(b'"aaaaaaaaaa"', all_that_fits=True),
}


@pytest.fixture(scope="module")
def server():
    """A server, and the id of its HTTP process."""
    with FakeEngine() as engine, processes(engine) as (found, url):
        engine.wait(lambda: engine.clients, "it says hello", 60)
        wait_ready(url)
        yield url, found.pids[0]


def cpu_seconds(pid):
    """Time that a process has run: where others take the processors, that says more than the clock does."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            total += int(path.read_text().split()[0])
    return total / 1e9


@contextlib.contextmanager
def connection(url):
    found = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    try:
        yield found
    finally:
        found.close()


def post(url, path, body, found):
    with connection(url) as large:
        large.request("POST", path, body, {"Content-Type": "application/json"})
        answer = large.getresponse()
        found.append((answer.status, answer.read()))


def meanwhile(url, pid, path, body):
    """(status, answer, longest that /health took meanwhile) of a large request; by the clock or by the server's time, whichever is less."""
    found, longest = [], 0.0
    thread = threading.Thread(target=post, args=(url, path, body, found))
    with connection(url) as small:
        thread.start()
        while thread.is_alive():
            start, ran = time.monotonic(), cpu_seconds(pid)
            small.request("GET", "/health")
            assert small.getresponse().read() == b'{"status":"ok"}'
            longest = max(longest, min(time.monotonic() - start, cpu_seconds(pid) - ran))
            time.sleep(0.002)
    thread.join()
    return *found[0], longest


@pytest.mark.parametrize("kind", BODIES)
def test_health_is_answered_while_a_large_body_is_read(server, kind):
    times, end = [], time.monotonic() + 30
    while time.monotonic() < end and min(times, default=1.0) >= 0.1:  # the machine may be busy with other things
        status, answer, longest = meanwhile(*server, *BODIES[kind][1:])
        times.append(longest)
    assert status == BODIES[kind][0], answer[:300]
    assert min(times) < 0.1, times


@pytest.mark.parametrize("kind", TOO_FULL)
def test_a_body_that_would_take_long_to_decode_is_refused(server, kind):
    status, answer, _ = meanwhile(*server, "/v1/completions", TOO_FULL[kind])
    error = json.loads(answer)["error"]
    assert status == 413 and re.search(rf"holds \d+ {kind}; this server takes \d+", error["message"]), error


class Wanted(msgspec.Struct, kw_only=True):
    prompt: str | list[str | int | list[int]]
    n: int = 1


IDS = list(range(1000, 1000 + 400_000))
LISTS = [[place, *range(2000, 2000 + place % 7 * 100)] for place in range(3000)]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", ":")])
@pytest.mark.parametrize(
    "value", [IDS, LISTS, [IDS], [IDS, [1], [], IDS], [[], *LISTS], [[]] * 400_000, "x" * 2_000_000, ["],[1,2]", *["a,b"] * 300_000]]
)
def test_ids_in_pieces_are_those_at_one_go(value, separators):
    data = json.dumps({"n": 3, "prompt": value}, separators=separators).encode()
    if len(data) <= LARGE:
        data += b" " * LARGE
    found = asyncio.run(decode_ids(Wanted, "prompt", data))
    assert found.prompt == value and found.n == 3 and isinstance(found, Wanted)


@pytest.mark.parametrize(
    "array",
    [[*IDS, "a"], [*IDS, [1], 2], [[1], *IDS], [*IDS, 1.5], [[IDS]], [*LISTS * 3, [[1]]], [*LISTS * 3, 7], [*IDS, None], [IDS, None]],
)
def test_what_is_wrong_with_large_ids_is_told_as_with_small_ones(array):
    data = json.dumps({"prompt": array}).encode()
    assert len(data) > LARGE
    told = []
    for attempt in (lambda: asyncio.run(decode_ids(Wanted, "prompt", data)), lambda: decode(Wanted, data)):
        try:
            told.append(attempt().prompt)
        except ApiError as error:
            told.append((error.message, error.param))
    assert told[0] == told[1]


@pytest.mark.parametrize("data", [b'{"prompt":[1,2', b'{"n":2}', b'{"prompt":[1,,2]}', b'{"prompt":[1 2]}', b'{"prompt":[1,]}', b"[]"])
def test_broken_large_bodies(data):
    with pytest.raises(ApiError) as error:
        asyncio.run(decode_ids(Wanted, "prompt", data + b" " * LARGE))
    assert error.value.status == 400
