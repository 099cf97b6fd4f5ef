"""The check of a job's links: who pairs with whom, which pairs are slow, and links that do not work."""

from __future__ import annotations

import json
import os
import socket

import pytest

from rorqual.launch.preflight import links
from rorqual.launch.preflight.command import _check
from rorqual.launch.preflight.timing import Pair, partners, slow_pairs
from tests.ranks import collect_ranks, run_ranks


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 64])
def test_every_pair_meets_once(n: int) -> None:
    rounds = [list(partners(rank, n)) for rank in range(n)]
    assert len({len(r) for r in rounds}) == 1
    met = []
    for turn in range(len(rounds[0])):
        for rank in range(n):
            other = rounds[rank][turn]
            if other is not None:
                assert other != rank and rounds[other][turn] == rank
                met.append(frozenset((rank, other)))
    assert len(set(met)) == n * (n - 1) // 2 and len(met) == n * (n - 1)


@pytest.mark.parametrize("n", [65, 96, 1000])
def test_many_ranks_try_some(n: int) -> None:
    rounds = [list(partners(rank, n)) for rank in range(n)]
    assert {len(r) for r in rounds} == {(n - 1).bit_length()}
    for turn in range(len(rounds[0])):
        for rank in range(n):
            other = rounds[rank][turn]
            assert other is None or rounds[other][turn] == rank


def test_slow_pairs_are_those_unlike_their_kind() -> None:
    hosts = ["a", "a", "b", "b"]
    pairs = [Pair(a=a, b=b, latency_us=20.0, gbytes_s=10.0) for a in range(4) for b in range(a + 1, 4)]
    assert slow_pairs(pairs, hosts) == []
    pairs[1] = Pair(a=0, b=2, latency_us=5000.0, gbytes_s=10.0)
    pairs[2] = Pair(a=0, b=3, latency_us=20.0, gbytes_s=1.0)
    found = slow_pairs(pairs, hosts)
    assert [(pair.a, pair.b) for pair, _ in found] == [(0, 2), (0, 3)]
    assert found[0][1] == "5000 us, others 20 us" and found[1][1] == "1.00 GB/s, others 10.00 GB/s"


def checks(as_json: bool) -> int:
    os.environ.update(GROUP_RANK=os.environ["RANK"], LOCAL_RANK="0")
    return _check(30.0, 10.0, as_json=as_json)


def test_a_job_whose_links_work() -> None:
    exits = collect_ranks(checks, 2, True)
    assert [e.result for e in exits] == [0, 0], exits
    report = json.loads(exits[0].stderr[exits[0].stderr.index("{\n") :])
    assert len(report["links"]) == 2 and all(link["rtt_us"] > 0 and not link["error"] for link in report["links"])
    assert [row["op"] for row in report["collectives"]] == ["all-reduce"] * 2 + ["all-to-all"] * 2
    assert len(report["pairs"]) == 1 and report["pairs"][0]["gbytes_s"] > 0


def refused() -> str:
    """Rank 1 says an address at which nobody listens."""
    os.environ.update(GROUP_RANK=os.environ["RANK"], LOCAL_RANK="0")
    if os.environ["RANK"] == "1":
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            port = closed.getsockname()[1]
        links._Echo = lambda address: type("Nothing", (), {"port": port, "close": lambda self: None})()  # type: ignore[assignment,misc]
    try:
        _check(20.0, 10.0, as_json=False)
    except ValueError as error:
        return str(error)
    return ""


def test_a_link_that_does_not_work_is_named_on_all_ranks() -> None:
    texts = run_ranks(refused, 2)
    assert texts[0] == texts[1]
    assert "cannot reach" in texts[0] and "at 127.0.0.1 (interface lo): Connection refused" in texts[0] and "GLOO_SOCKET_IFNAME" in texts[0]


def test_links_use_the_interface_that_gloo_will_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several names the first that this host has, as the ranks' own connections do."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99,lo")
    assert links.own_address(None, None) == ("lo", "127.0.0.1")  # type: ignore[arg-type]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=eth99 names no interface with an address; this host has "):
        links.own_address(None, None)  # type: ignore[arg-type]
