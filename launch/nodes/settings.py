"""Which nodes a job has, as flags: ours, torchrun's and SGLang's spellings."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ...engine.option import check_least, check_seconds, option

DEFAULT_PORT = 29500  # torchrun's


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """The nodes of a job. Under torchrun all of this is said by its environment, and these are ignored."""

    nproc: int | None = option(
        None, "Ranks (processes) on this node; those of the layout divided by the nodes by default.", "--nproc-per-node", group="nodes"
    )
    nnodes: int = option(1, "Nodes of the job; run the same command on each, with its own --node-rank.", group="nodes")
    node_rank: int = option(0, "Number of this node, from 0.", group="nodes")
    master_addr: str | None = option(None, "Address of node 0 that the other nodes reach.", group="nodes")
    master_port: int | None = option(None, f"Port of node 0 at which the nodes meet; {DEFAULT_PORT} with several nodes.", group="nodes")
    dist_init_addr: str | None = option(None, "HOST:PORT, the same as --master-addr and --master-port.", group="nodes")
    node_timeout: float = option(600.0, "Seconds that nodes wait for one another at the start.", group="nodes")

    @property
    def endpoint(self) -> tuple[str, int]:
        """Address and port of the meeting; port 0 (a free one) on a single node."""
        host, port = self.master_addr, self.master_port
        if self.dist_init_addr is not None:
            host, port = split_address(self.dist_init_addr, "--dist-init-addr")
        if self.nnodes == 1:
            return host or "127.0.0.1", port or 0
        assert host is not None
        return host, DEFAULT_PORT if port is None else port


def split_address(text: str, flag: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` as its parts.

    Raises:
        ValueError: it is not of that form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{flag} must be HOST:PORT with a port from 1 to 65535, found {text!r}")
    return host.strip("[]"), int(port)


def check_nodes(nodes: NodeSettings) -> None:
    """Refuse what cannot be meant.

    Raises:
        ValueError: naming the flag, what was found and what would do.
    """
    check_least(nodes, 1, "nnodes")
    if not 0 <= nodes.node_rank < nodes.nnodes:
        raise ValueError(f"--node-rank must be from 0 to {nodes.nnodes - 1} with --nnodes {nodes.nnodes}, found {nodes.node_rank}")
    if nodes.nproc is not None and nodes.nproc < 1:
        raise ValueError(f"--nproc must be at least 1, found {nodes.nproc}")
    check_seconds(nodes, "node_timeout")
    if nodes.master_port is not None and not 0 < nodes.master_port < 65536:
        raise ValueError(f"--master-port must be from 1 to 65535, found {nodes.master_port}")
    if nodes.dist_init_addr is not None:
        split_address(nodes.dist_init_addr, "--dist-init-addr")
        if nodes.master_addr is not None or nodes.master_port is not None:
            raise ValueError("--dist-init-addr and --master-addr or --master-port were given; give one of the two")
    elif nodes.nnodes > 1 and nodes.master_addr is None:
        raise ValueError(
            f"--nnodes {nodes.nnodes} needs --master-addr ADDRESS (or --dist-init-addr ADDRESS:PORT): node 0 as the others reach it"
        )


def ranks_here(nodes: NodeSettings, world: int) -> int:
    """Ranks to start on this node for a layout of ``world`` ranks.

    Raises:
        ValueError: the numbers do not fit.
    """
    if nodes.nproc is None:
        if world % nodes.nnodes:
            raise ValueError(f"a layout of {world} ranks does not divide over {nodes.nnodes} nodes; change the degrees or --nnodes")
        return world // nodes.nnodes
    if nodes.nproc * nodes.nnodes != world:
        made = f"--nproc {nodes.nproc} on {nodes.nnodes} node(s) makes {nodes.nproc * nodes.nnodes} ranks"
        raise ValueError(f"{made}, but the layout (pp x dp x tp) has {world}; leave --nproc out, or change the degrees")
    return nodes.nproc


def under_torchrun() -> bool:
    """Whether this process is a rank already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
