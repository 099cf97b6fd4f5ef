"""Symmetric memory of CPU ranks on one host: anonymous files in memory, mapped by everybody.

A file has no name. Its owner keeps it open until all have mapped it, and they open it through the owner's entry in /proc. So
nothing is left behind whenever a rank is killed, and the size of /dev/shm is no limit.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
from pathlib import Path

import torch

from ...parallel.group import Group
from .peers import Peers

_X86 = ("x86_64", "AMD64")


def why_not() -> str | None:
    """What keeps this machine from it; None if nothing does."""
    if not sys.platform.startswith("linux"):
        return f"memory of other processes is mapped through Linux's /proc; this is {sys.platform}"
    if platform.machine() not in _X86:
        return f"plain stores must be seen in order, which x86-64 promises and {platform.machine()} does not"
    return None


class ShmHeap:
    """``Heap`` over the ranks of ``group``, which must be processes of one user on one host that see each other in /proc."""

    name = "shm"

    def __init__(self, group: Group) -> None:
        reason = why_not()
        if reason is not None:
            raise ValueError(f"all-to-all backend 'shm' cannot be used here: {reason}; use torch")
        self._group = group
        self._spaces: list[Peers] = []

    @property
    def allocated_bytes(self) -> int:
        """See ``Heap``."""
        return sum(peers.own.numel() for peers in self._spaces)

    def allocate(self, n_bytes: int) -> Peers:
        """See ``Heap``. ValueError on every rank if one has no room, or if ranks cannot reach each other's memory."""
        own, problem = _create(n_bytes, self._group.size)
        maps: list[mmap.mmap] = []
        try:
            place = [os.getpid(), own, os.fstat(own).st_ino if own >= 0 else 0, int(own >= 0)]
            table = self._group.gather_ints(place).tolist()
            if all(row[3] for row in table):
                maps, problem = _map_all(table, n_bytes)
            mapped = self._group.gather_ints([int(not problem)])[:, 0].tolist()  # after it, nobody needs the descriptor
        finally:
            if own >= 0:
                os.close(own)
        if not all(mapped):
            bad = [rank for rank, good in zip(self._group.ranks, mapped, strict=True) if not good]
            raise ValueError(
                f"all-to-all backend 'shm': no shared workspace of {n_bytes} bytes, ranks {bad} failed; {problem or 'see there'}"
            )
        views = tuple(torch.frombuffer(memory, dtype=torch.uint8) for memory in maps)
        pointers = torch.tensor([view.data_ptr() for view in views], dtype=torch.int64)
        self._spaces.append(Peers(rank=self._group.index, views=views, pointers=pointers))
        return self._spaces[-1]

    def close(self) -> None:
        """See ``Heap``. Memory goes when the last tensor that looks at it does."""
        self._spaces.clear()


def free_bytes() -> int:
    """Memory that can be taken without pushing anything out: the host's, or less where a control group has a limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(free, 0)


def _create(n_bytes: int, n_ranks: int) -> tuple[int, str]:
    """(descriptor of a zeroed file of ``n_bytes``, "") or (-1, why not), if ``n_ranks`` ranks of this host make one each.

    Its memory is taken now, not at the first store. A system may grant any amount and then end processes for it, so what is
    free is looked at before.
    """
    free = free_bytes()
    if n_bytes * n_ranks > free:
        return -1, f"{n_ranks} times {n_bytes} bytes are needed and {free} are free; lower max_tokens"
    try:
        file = os.memfd_create("rorqual-ep")
    except OSError as error:
        return -1, f"memfd_create: {error.strerror}"
    try:
        os.posix_fallocate(file, 0, n_bytes)
    except OSError as error:
        os.close(file)
        return -1, f"{n_bytes} bytes of memory: {error.strerror}"
    return file, ""


def _map_all(table: list[list[int]], n_bytes: int) -> tuple[list[mmap.mmap], str]:
    """Every rank's file, mapped; or ([], why one could not be)."""
    maps = []
    for pid, number, inode, _ in table:
        path = f"/proc/{pid}/fd/{number}"
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            return [], f"cannot open {path} of another rank: {error.strerror} (ranks must share host, user and process namespace)"
        try:
            if os.fstat(file).st_ino != inode:
                return [], f"{path} is not the other rank's memory (ranks must share host and process namespace)"
            maps.append(mmap.mmap(file, n_bytes))
        finally:
            os.close(file)
    return maps, ""
