"""Nodes meet before ranks start. Two "nodes" on this host here; on hosts of their own in test_hosts.py."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import PrefixStore

from rorqual.launch.bench.sweep.server import free_port
from rorqual.launch.nodes.meeting import meet, open_store
from rorqual.launch.nodes.settings import NodeSettings
from tests.hosts import until


def together(*nodes: NodeSettings, nproc: tuple[int, ...] = (1, 1, 1)) -> list[Any]:
    """What each node's meeting gives: the hosts, or the error."""

    def one(number: int) -> Any:
        try:
            store = open_store(nodes[number])
            stores.append(store)
            return meet(store, nodes[number], nproc[number])
        except ValueError as error:
            return str(error)

    stores: list[Any] = []
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(one, range(len(nodes))))


def node(rank: int, port: int, nnodes: int = 2, timeout: float = 30.0) -> NodeSettings:
    return NodeSettings(nnodes=nnodes, node_rank=rank, master_addr="127.0.0.1", master_port=port, node_timeout=timeout)


def test_nodes_that_agree_meet() -> None:
    port = free_port()
    name = socket.gethostname()
    assert together(node(0, port), node(1, port)) == [[name, name]] * 2


def test_other_numbers_of_ranks_are_named() -> None:
    port = free_port()
    for text in together(node(0, port), node(1, port), nproc=(4, 8)):
        assert "--nproc is 4 on node 0" in text and "8 on node 1" in text


def test_a_node_that_does_not_come_is_named() -> None:
    port = free_port()
    texts = together(node(0, port, 3, 3.0), node(2, port, 3, 3.0))
    assert all("node(s) 1 of 3 did not come to 127.0.0.1:" in text and "--node-rank 1" in text for text in texts), texts


def test_nobody_listens() -> None:
    with pytest.raises(ValueError, match="does not answer at 127.0.0.1:.* nothing listens at that port"):
        open_store(node(1, free_port(), timeout=1.0))
    with pytest.raises(ValueError, match="'no-such.invalid' is no address and no name"):
        open_store(NodeSettings(nnodes=2, node_rank=1, master_addr="no-such.invalid", node_timeout=1.0))


def test_node_0_must_have_the_address() -> None:
    with pytest.raises(ValueError, match="node 0's store.* cannot listen on 192.0.2.9:29500: this host has no such address"):
        open_store(NodeSettings(nnodes=2, node_rank=0, master_addr="192.0.2.9"))


def test_a_name_that_means_loopback_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /etc/hosts maps a host's own name to 127.0.1.1."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 0))])
    with pytest.raises(ValueError, match="--master-addr node0 is 127.0.1.1 on this host, which no other reaches"):
        open_store(NodeSettings(nnodes=2, node_rank=0, master_addr="node0"))


def test_something_else_at_the_port() -> None:
    """A server that speaks first, or says nothing that a store would say."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ValueError, match="something answers at .* but it is not node 0 of a job"):
            open_store(node(1, server.getsockname()[1], timeout=4.0))


def test_a_number_given_twice_is_refused() -> None:
    port = free_port()
    store = open_store(node(0, port, 3))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, open_store(node(1, port, 3, 3.0)), node(1, port, 3, 3.0), 1)
        until(lambda: PrefixStore("rorqual/nodes", store).check(["holder/1"]), 20.0)
        with pytest.raises(ValueError, match=f"node 1 is there already .*process {os.getpid()}"):
            meet(open_store(node(1, port, 3)), node(1, port, 3), 1)
        with pytest.raises(ValueError, match="did not come"):
            first.result(30)
