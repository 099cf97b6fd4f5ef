"""Hosts with addresses of their own: they serve together, end together when one is cut off, and wrong starts are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts import Hosts, why_not
from tests.launch.nodes import serving_hosts, wrong_starts

REASON = why_not()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(400)]


@pytest.mark.slow
def test_three_hosts_serve_and_all_end_when_one_is_cut_off() -> None:
    with Hosts(3) as hosts:
        running = serving_hosts.start(hosts)
        serving_hosts.await_ready(hosts[0], running[0], 240)
        assert serving_hosts.ask(hosts[0], "Emma was", 8) == " a little, and she was a very"
        seconds = serving_hosts.cut_and_wait(hosts, running, 2)
        assert max(seconds) < serving_hosts.DEADLINE_S + 30
        assert all(serving_hosts.names(process.text, hosts[2]) for process in running[:2])
        assert f"or this host, gamma ({hosts[2].address}), is cut off from it" in running[2].text


@pytest.mark.parametrize("name", ["address of another host", "port in use"])
def test_wrong_starts_are_named(name: str, tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        wrong_starts.run(name, hosts, tmp_path)
