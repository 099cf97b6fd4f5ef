"""What the router reads of a request, right or wrong, and what it takes a server to have cached."""

import pytest

from rorqual.engine.server.router.config import RouterConfig
from rorqual.engine.server.router.guess import GuessedCache
from rorqual.engine.server.router.headers import to_client, to_server
from rorqual.engine.server.router.prompt import read_request


@pytest.mark.parametrize(
    ("body", "prompt", "max_tokens"),
    [
        (b'{"prompt": "hi", "max_tokens": 3}', b"hi", 3),
        (b'{"prompt": [1, 2]}', b"\1\0\0\0\2\0\0\0", 512),
        (b'{"prompt": ["a", [1], "b"], "n": 2, "max_tokens": 5}', b"a\1\0\0\0b", 10),
        (b'{"tools": [1], "messages": [{"role": "user"}], "max_completion_tokens": 7, "max_tokens": 9}', b'[1][{"role": "user"}]', 7),
        (b'{"prompt": [99999999999]}', b"", 512),
        (b'{"prompt": [[[1]]]}', b"", 512),
        (b'{"prompt": "hi", "max_tokens": -4, "n": -1}', b"hi", 1),
        (b'{"prompt": "hi", "max_tokens": 1e400}', b"", 512),
        (b'{"prompt": {"a": 1}}', b"", 512),
        (b"{", b"", 512),
        (b"\xff", b"", 512),
        (b"[" * 100_000, b"", 512),
        (b"", b"", 512),
    ],
)  # fmt: skip
def test_prompts_are_read_and_nothing_is_refused_here(body, prompt, max_tokens):
    found = read_request(body)
    assert (found.prompt, found.max_tokens) == (prompt, max_tokens)


def test_the_next_turn_of_a_conversation_begins_like_the_last():
    first = read_request(b'{"messages": [{"role": "user", "content": "a"}]}').prompt
    later = read_request(b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}').prompt
    assert later.startswith(first[:-1])


def test_a_guessed_cache_is_bounded_and_forgets_ends_first():
    cache = GuessedCache(4)
    assert cache.use([1, 2, 3]) == []
    assert cache.use([1, 2, 7, 8]) == [3] and len(cache) == 4
    assert cache.use([5]) == [8]
    assert cache.use([*range(100, 110)]) == [7, 2, 1, 5, 109, 108, 107, 106, 105, 104]  # longer than the cache: its start stays
    assert len(cache) == 4


def test_headers_of_one_connection_stay_there():
    headers = [
        (b"Host", b"h"),
        (b"Connection", b"close, X-Mine"),
        (b"x-mine", b"1"),
        (b"TE", b"x"),
        (b"Content-Length", b"3"),
        (b"A", b"1"),
    ]
    assert to_server(headers) == [(b"a", b"1")]
    assert to_client(headers) == [(b"host", b"h"), (b"content-length", b"3"), (b"a", b"1")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "a router needs servers"),
        ({"worker_urls": ("10.0.0.1:8000",)}, "write http://HOST:PORT"),
        ({"worker_urls": ("ftp://h:1",)}, "write http://HOST:PORT"),
        ({"worker_urls": ("http://h:99999",)}, "write http://HOST:PORT"),
        ({"worker_urls": ("http://a:b@h:1",)}, "user name or password"),
        ({"worker_urls": ("http://h:1", "http://h:1/")}, "twice"),
        ({"worker_urls": ("http://h:1",), "port": 70000}, "--port"),
        ({"worker_urls": ("http://h:1",), "health_interval": 0.0}, "--health-interval"),
        ({"worker_urls": ("http://h:1",), "retries": -1}, "--retries"),
        ({"worker_urls": ("http://h:1",), "dp_routing": "best"}, "dp_routing"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        RouterConfig(**settings)
