"""One command for the ranks of a node: ``rorqual serve MODEL --nproc 8`` does what ``torchrun --nproc-per-node 8 ...`` does."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from .nodes.settings import NodeSettings, check_nodes, ranks_here, under_torchrun
from .session import show_log

__all__ = ["needs_ranks", "start_ranks"]
log = logging.getLogger("rorqual")


def needs_ranks(nodes: NodeSettings, world: int) -> bool:
    """Whether this process has to start ranks: it is none itself, and the layout has several or a number was asked for."""
    return not under_torchrun() and (world > 1 or nodes.nproc is not None or nodes.nnodes > 1)


def start_ranks(nodes: NodeSettings, world: int, words: Sequence[str]) -> int:
    """Meet the other nodes, then start and watch this node's ranks of a job of ``world``; the exit code of the command.

    Args:
        nodes: how many nodes, which one this is, where they meet.
        world: ranks of the layout, pp x dp x tp.
        words: the command line after ``rorqual``, which every rank gets as it is.

    Raises:
        ValueError: numbers do not fit, the meeting's address or port is wrong or taken, a node is missing or was started otherwise.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else every connection warns that it cannot name its peer
    check_nodes(nodes)
    nproc = ranks_here(nodes, world)
    show_log()
    from .nodes.agent import run_agent
    from .nodes.meeting import meet, open_store

    store = open_store(nodes)
    if nodes.nnodes > 1:
        hosts = meet(store, nodes, nproc)
        log.info("%d nodes met: %s", nodes.nnodes, ", ".join(hosts))
    return run_agent(nodes, nproc, store.port, words)
