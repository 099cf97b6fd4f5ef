"""Flags of nodes: what they come to, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from rorqual.launch.nodes.settings import NodeSettings, check_nodes, ranks_here


@pytest.mark.parametrize(
    ("given", "endpoint"),
    [
        ({}, ("127.0.0.1", 0)),
        ({"master_port": 1234}, ("127.0.0.1", 1234)),
        ({"nnodes": 2, "master_addr": "10.0.0.1"}, ("10.0.0.1", 29500)),
        ({"nnodes": 2, "master_addr": "10.0.0.1", "master_port": 7}, ("10.0.0.1", 7)),
        ({"nnodes": 2, "dist_init_addr": "node0:5000", "node_rank": 1}, ("node0", 5000)),
        ({"nnodes": 2, "dist_init_addr": "[fd00::1]:5000"}, ("fd00::1", 5000)),
    ],
)
def test_where_nodes_meet(given: dict[str, Any], endpoint: tuple[str, int]) -> None:
    nodes = NodeSettings(**given)
    check_nodes(nodes)
    assert nodes.endpoint == endpoint


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nnodes": 0}, "--nnodes must be at least 1, found 0"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "a"}, "--node-rank must be from 0 to 1"),
        ({"nnodes": 2}, "needs --master-addr"),
        ({"nnodes": 2, "dist_init_addr": "a"}, "must be HOST:PORT"),
        ({"nnodes": 2, "dist_init_addr": "a:99999"}, "must be HOST:PORT"),
        ({"nnodes": 2, "dist_init_addr": "a:1", "master_port": 2}, "give one of the two"),
        ({"nproc": 0}, "--nproc must be at least 1"),
        ({"node_timeout": 0.0}, "--node-timeout must be more than 0 seconds, found 0.0"),
        ({"node_timeout": float("nan")}, "--node-timeout must be more than 0 seconds, found nan"),
        ({"node_timeout": float("inf")}, "--node-timeout must be more than 0 seconds, found inf"),
        ({"master_port": 70000}, "--master-port must be from 1 to 65535"),
    ],
)
def test_refusals(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_nodes(NodeSettings(**given))
    assert words in str(caught.value)


def test_ranks_of_a_node() -> None:
    assert ranks_here(NodeSettings(), 8) == 8
    assert ranks_here(NodeSettings(nnodes=2, master_addr="a"), 8) == 4
    assert ranks_here(NodeSettings(nnodes=2, nproc=4, master_addr="a"), 8) == 4
    with pytest.raises(ValueError, match="does not divide over 3 nodes"):
        ranks_here(NodeSettings(nnodes=3, master_addr="a"), 8)
    with pytest.raises(ValueError, match="--nproc 4 on 1 node.* makes 4 ranks, but the layout .* has 2"):
        ranks_here(NodeSettings(nproc=4), 2)
