"""Symmetric memory of the GPUs of one host: torch's CUDA backend maps every rank's workspace into the others.

Only addresses are asked of torch: its signal pads, barriers and multicast are not used, and NCCL is not either. Handles travel
over the process group's store and a Unix socket, so any process group will do.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from ...parallel.group import Group
from .peers import Peers

ONE_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's switch for several ranks on one GPU
_MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SymmHeap:
    """``Heap`` over the ranks of ``group``, each on its own GPU of one host (or, with ``ONE_GPU`` set, on the same)."""

    name = "symm"

    def __init__(self, group: Group, device: torch.device) -> None:
        """Collective: every rank says where it is. ValueError on all ranks if their memory cannot be mapped."""
        self._group = group
        self._device = device
        self._spaces: list[tuple[Peers, Any]] = []
        check_places(group, device)

    @property
    def allocated_bytes(self) -> int:
        """See ``Heap``. What the driver takes is this, rounded up to pages of 2 MiB."""
        return sum(peers.own.numel() for peers, _ in self._spaces)

    def allocate(self, n_bytes: int) -> Peers:
        """See ``Heap``. ValueError on every rank if one has no room."""
        own, problem = self._empty(n_bytes)
        good = self._group.gather_ints([int(own is not None)])[:, 0].tolist()
        if own is None or not all(good):
            bad = [rank for rank, ok in zip(self._group.ranks, good, strict=True) if not ok]
            what = f"no workspace of {n_bytes} bytes on ranks {bad}"
            raise ValueError(f"all-to-all backend 'symm': {what}; {problem or 'their own errors say why'}; lower max_tokens")
        own.zero_()
        torch.cuda.synchronize(self._device)
        peers, handle = self._meet(own)
        self._group.gather_ints([n_bytes])  # everybody has zeroed its own
        self._spaces.append((peers, handle))
        return peers

    def _empty(self, n_bytes: int) -> tuple[torch.Tensor | None, str]:
        """A block of its own from the driver, not a part of a pool, so that closing gives it back."""
        if self._group.size == 1:
            return torch.empty(n_bytes, dtype=torch.uint8, device=self._device), ""
        from torch._C._distributed_c10d import _SymmetricMemory

        os.environ.setdefault(_MULTICAST_OFF, "1")  # not used here, and not every host can set it up
        try:
            _use_cuda_backend(self._device)
            return _SymmetricMemory.empty_strided_p2p((n_bytes,), (1,), torch.uint8, self._device), ""
        except (RuntimeError, ValueError) as error:
            return None, str(error).splitlines()[0]

    def _meet(self, own: torch.Tensor) -> tuple[Peers, Any]:
        """Map everybody's block."""
        me, size, n = self._group.index, self._group.size, own.numel()
        if size == 1:
            return Peers(rank=0, views=(own,), pointers=torch.tensor([own.data_ptr()], dtype=torch.int64, device=self._device)), None
        from torch.distributed._symmetric_memory import rendezvous

        process_group = self._group.process_group
        assert process_group is not None
        try:
            handle = rendezvous(own, process_group)
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise ValueError(
                f"all-to-all backend 'symm': torch could not map the other ranks' memory ({first}); use torch or nvshmem"
            ) from error
        addresses = list(handle.buffer_ptrs)
        if addresses[me] != own.data_ptr():
            raise ValueError("all-to-all backend 'symm': this torch maps blocks in a way that is not known here; use torch or nvshmem")
        views = tuple(own if r == me else handle.get_buffer(r, (n,), torch.uint8) for r in range(size))
        return Peers(rank=me, views=views, pointers=torch.tensor(addresses, dtype=torch.int64, device=self._device)), handle

    def close(self) -> None:
        """See ``Heap``."""
        if self._spaces:
            torch.cuda.synchronize(self._device)
        self._spaces.clear()


def why_not(device: torch.device) -> str | None:
    """What keeps this process from it, looking at itself only; None if nothing does."""
    if device.type != "cuda":
        return "it needs CUDA devices; CPU ranks of one host have shm"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not torch.distributed.is_available() or not hasattr(torch._C._distributed_c10d, "_SymmetricMemory"):
        return "this torch is built without symmetric memory (2.9 or later has it)"
    return None


def check_places(group: Group, device: torch.device) -> None:
    """Collective: ValueError on every rank unless all can map each other's memory."""
    reason = why_not(device)
    uuid = "" if reason else str(torch.cuda.get_device_properties(device).uuid)
    ordinal = -1 if reason or device.index is None else device.index
    allowed = int(os.environ.get(ONE_GPU, "0") == "1")
    rows = group.gather_ints([int(reason is None), _mark(_host()), _mark(uuid), ordinal, allowed]).tolist()
    if reason is not None:
        raise ValueError(f"all-to-all backend 'symm' cannot be used here: {reason}")
    problem = place_problem(rows, group.ranks)
    if problem is None:
        unreachable = [rank for rank, row in zip(group.ranks, rows, strict=True) if not _reaches(device, row[3])]
        found = [int(n) for n in group.gather_ints([len(unreachable)])[:, 0]]
        if not any(found):
            return
        bad = [rank for rank, n in zip(group.ranks, found, strict=True) if n]
        problem = f"GPUs without peer access to each other, seen by ranks {bad} (here: {unreachable}); use torch"
    raise ValueError(f"all-to-all backend 'symm' cannot be used here: {problem}")


def place_problem(rows: list[list[int]], ranks: tuple[int, ...]) -> str | None:
    """What is wrong with the ranks' places: rows of [usable, host, GPU, ordinal, allowed to share], one a rank; None if nothing."""
    unusable = [rank for rank, row in zip(ranks, rows, strict=True) if not row[0]]
    if unusable:
        return f"ranks {unusable} have no CUDA device; their own errors say why"
    hosts = {row[1] for row in rows}
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts, and memory is mapped within one; use nvshmem or torch_node"
    if len(rows) == 1:
        return None
    gpus: dict[int, list[int]] = {}
    for rank, row in zip(ranks, rows, strict=True):
        gpus.setdefault(row[2], []).append(rank)
    shared = [group for group in gpus.values() if len(group) > 1]
    if shared:
        if all(row[4] for row in rows):
            return None
        return f"ranks {shared[0]} are on the same GPU; for tests, set {ONE_GPU}=1 on every rank"
    if len({row[3] for row in rows}) < len(rows):
        what = f"the ranks' GPUs differ, but their numbers are {[row[3] for row in rows]}"
        return f"{what}: CUDA_VISIBLE_DEVICES shows each rank other devices; show all of them to every rank, LOCAL_RANK picks one"
    return None


def _use_cuda_backend(device: torch.device) -> None:
    from torch.distributed import _symmetric_memory as symm_mem

    if symm_mem.get_backend(device) != "CUDA":
        symm_mem.set_backend("CUDA")


def _reaches(device: torch.device, other: int) -> bool:
    return device.index == other or bool(torch.cuda.can_device_access_peer(device, torch.device("cuda", other)))


def _host() -> str:
    return _BOOT_ID.read_text() if _BOOT_ID.exists() else os.uname().nodename


def _mark(text: str) -> int:
    """A number for comparing ``text`` between ranks."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
