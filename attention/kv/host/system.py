"""The system calls the host pool needs and Python lacks: mapping at an address, advice, binding to NUMA nodes."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

BLOCK = 2 << 20  # bytes of a huge page: everything starts at a multiple of it

MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
PROT_NONE = 0
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
MADV_DONTFORK, MADV_HUGEPAGE, MADV_POPULATE_WRITE = 10, 14, 23
MPOL_BIND, MPOL_INTERLEAVE = 2, 3
_IN_MEMORY = (0x01021994, 0x858458F6, 0x958458F6)  # file systems by their magic numbers: tmpfs, ramfs, hugetlbfs
_MBIND = {"x86_64": 237, "aarch64": 235}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long


def blocks(n_bytes: int) -> int:
    """``n_bytes`` rounded up to whole blocks, in bytes."""
    return -(-n_bytes // BLOCK) * BLOCK


def map_memory(n_bytes: int, *, protection: int, flags: int, address: int = 0, fd: int = -1, offset: int = 0) -> int:
    """Address of a new mapping (mmap); ``address`` is used when ``flags`` has MAP_FIXED.

    Raises:
        ValueError: the kernel refused, with its reason.
    """
    found = _libc.mmap(address or None, n_bytes, protection, flags, fd, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        why = os.strerror(ctypes.get_errno())
        raise ValueError(f"mapping {n_bytes / 2**30:.2f} GiB for the host pool failed: {why}; make the pool smaller")
    return int(found)


def unmap(address: int, n_bytes: int) -> None:
    """End a mapping (munmap); a range that is not mapped is no error."""
    _libc.munmap(address, n_bytes)


def advise(address: int, n_bytes: int, advice: int) -> int:
    """Call madvise: 0, or the error number."""
    return 0 if _libc.madvise(address, n_bytes, advice) == 0 else ctypes.get_errno()


def in_memory(folder: Path) -> bool:
    """Whether files in ``folder`` live in memory and nowhere else (tmpfs, ramfs, hugetlbfs), by statfs.

    Raises:
        OSError: there is no such folder.
    """
    found = ctypes.create_string_buffer(256)  # struct statfs, which begins with the file system's magic number
    if _libc.statfs(os.fsencode(folder), found):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    return int.from_bytes(found.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) & 0xFFFFFFFF in _IN_MEMORY


def bind(address: int, n_bytes: int, nodes: Sequence[int]) -> None:
    """Let memory not yet touched come from ``nodes`` only; several take turns, huge page by huge page.

    Raises:
        ValueError: the machine has no such node or no such call.
    """
    mask = (ctypes.c_ulong * 16)()
    if not nodes or min(nodes) < 0 or max(nodes) >= 1024:
        raise ValueError(f"NUMA nodes must be numbers from 0 to 1023, got {list(nodes)}")
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    number = _MBIND.get(platform.machine())
    mode = MPOL_BIND if len(set(nodes)) == 1 else MPOL_INTERLEAVE
    if number is None:
        code = errno.ENOSYS
    else:
        arguments = (ctypes.c_void_p(address), ctypes.c_ulong(n_bytes), ctypes.c_long(mode), mask, ctypes.c_ulong(1025), ctypes.c_ulong(0))
        code = 0 if _libc.syscall(ctypes.c_long(number), *arguments) == 0 else ctypes.get_errno()
    if code:
        raise ValueError(f"binding memory to NUMA nodes {list(nodes)} failed: {os.strerror(code)}; `rorqual doctor` lists the nodes")
