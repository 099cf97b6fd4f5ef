"""Whether a pool fits, asked before anything is allocated."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .layout import HEADER_BYTES
from .topology import Topology, read_topology

_SHARE = 0.95  # of what is available may become a pool
_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int:
    """Memory a process can still get: MemAvailable, or what is left of its control group's limit if that is less."""
    return min([_mem_available(root), *_group_rest(root)])


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{root / 'proc/meminfo'} has no line MemAvailable; state the memory to use")


def _group_rest(root: Path) -> list[int]:
    """Bytes left of the memory limit of this process' control group, and of those above it: empty without a limit."""
    found = []
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for number, names, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if number == "0":
            base, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in names.split(","):
            base, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            found += _rest(base.joinpath(*parts[:depth]), limit, used)
    return found


def _rest(group: Path, limit: str, used: str) -> list[int]:
    try:
        most = int((group / limit).read_text(encoding="ascii"))  # "max" is no number: no limit
        now = int((group / used).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return []
    return [max(0, most - now + int(stat.get("inactive_file", 0)))]


def default_bytes(
    share: float,
    *,
    nodes: tuple[int, ...] = (),
    stated: int | None = None,
    ranks_here: int = 1,
    ranks_on_nodes: int = 0,
    root: Path = _ROOT,
) -> int:
    """Bytes of each of ``ranks_here`` pools that take ``share`` of the memory together, and no more of their ``nodes``.

    ``ranks_on_nodes`` of the pools are bound to the same nodes, 0: all.
    """
    found = int(share * (available_bytes(root) if stated is None else stated)) // ranks_here
    if not nodes or stated is not None:
        return found
    free = [node.available_bytes for node in read_topology(root).nodes if node.index in nodes]
    if not free:
        return found  # is refused when the nodes are checked
    return min(found, int(share * min(free)) * len(free) // (ranks_on_nodes or ranks_here))


def default_file_bytes(folder: Path, path: Path | None = None) -> int:
    """Bytes of the pool in a file for which no size was asked: what its filesystem has free, less 5% for others.

    What an existing file at ``path`` takes is free to it.
    """
    if not folder.is_dir():
        return sys.maxsize  # is refused when the folder is checked
    own = path.stat().st_blocks * 512 if path is not None and path.is_file() else 0
    return max(0, int(_SHARE * (_free_bytes(folder) + own)) - HEADER_BYTES)


def check_memory(
    n_bytes: int,
    *,
    nodes: tuple[int, ...] = (),
    stated: int | None = None,
    ranks_here: int = 1,
    ranks_on_nodes: int = 0,
    root: Path = _ROOT,
) -> None:
    """Refuse a pool that the machine's memory, or that of the NUMA ``nodes`` it is bound to, cannot hold.

    ``stated`` bytes replace what the machine says is available (a virtual machine may grow its memory as it is used).
    ``ranks_here`` pools of ``n_bytes`` are about to be made at the same time, ``ranks_on_nodes`` of them (0: all) on the same nodes.

    Raises:
        ValueError: what was asked for, what there is, what to do.
    """
    wanted = n_bytes * ranks_here
    room = int(_SHARE * available_bytes(root)) if stated is None else stated
    where = "is available to this process" if stated is None else "was stated for it"
    each = f" for each of {ranks_here} ranks" if ranks_here > 1 else ""
    if wanted > room:
        raise ValueError(f"a host pool of {gib(n_bytes)}{each} does not fit: {gib(room)} {where}; make it smaller or free memory")
    if nodes and stated is None:
        _check_nodes(n_bytes * (ranks_on_nodes or ranks_here), nodes, read_topology(root))


def _check_nodes(wanted: int, nodes: tuple[int, ...], topology: Topology) -> None:
    known = {node.index: node for node in topology.nodes}
    missing = sorted(set(nodes) - set(known))
    if missing:
        raise ValueError(f"no NUMA node {missing[0]} here; the nodes are {sorted(known)}")
    share = -(-wanted // len(set(nodes)))
    for node in (known[index] for index in nodes):
        if share > _SHARE * node.available_bytes:
            raise ValueError(
                f"{gib(share)} of the host pool would come from NUMA node {node.index}, which has {gib(node.available_bytes)} available; "
                "make the pool smaller, or name more nodes (one pool for all ranks: shm, path @node0,node1)"
            )


def check_folder(folder: Path, n_bytes: int) -> None:
    """Refuse a pool file that ``folder`` cannot take.

    Raises:
        ValueError: no such folder, not writable, or its filesystem too small.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder for the host pool's file; create it or name another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{folder}: no permission to create the host pool's file there; name a folder you may write to")
    free = _free_bytes(folder)
    if n_bytes > free:
        raise ValueError(f"a host pool of {gib(n_bytes)} does not fit into {folder}, which has {gib(free)} free; make it smaller")


def _free_bytes(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def gib(n_bytes: float) -> str:
    """``n_bytes`` for people."""
    return f"{n_bytes / 2**30:.2f} GiB"
