"""By default a server and its ranks take connections from this machine alone."""

import os
import socket
from pathlib import Path

import httpx
import pytest

from rorqual.engine.server.config import ServerConfig
from rorqual.engine.server.router.config import RouterConfig
from tests.listeners import beyond_loopback, listeners
from tests.server.started import started

ROOT = Path(__file__).resolve().parents[1]


def test_default_addresses():
    assert ServerConfig().host == RouterConfig(worker_urls=("http://127.0.0.1:1",)).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("family", "host", "others"),
    [
        (socket.AF_INET, "127.0.0.1", False),
        (socket.AF_INET, "", True),
        (socket.AF_INET6, "::1", False),
        (socket.AF_INET6, "::", True),
        (socket.AF_INET6, "::ffff:127.0.0.1", False),
    ],
)
def test_the_check_sees(family, host, others):
    with socket.socket(family) as sock:
        try:
            sock.bind((host, 0))
        except OSError as error:
            pytest.skip(f"no such address here: {error}")
        sock.listen()
        port = sock.getsockname()[1]
        mine = {address for address in listeners(os.getpid()) if address.endswith(f":{port}")}
    assert len(mine) == 1 and bool(beyond_loopback(mine)) is others


def test_two_ranks_and_their_http_process_listen_on_loopback_only():
    with started(["tiny", "--dtype", "float32", "--max-total-tokens", "2048", "--dp", "2"]) as (url, server, _):
        assert httpx.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60).status_code == 200
        found = listeners(server.pid)
        assert url.removeprefix("http://") in found
        assert beyond_loopback(found) == []
