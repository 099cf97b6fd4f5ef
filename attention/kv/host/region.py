"""One range of addresses that holds a host pool, whatever is mapped into it."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable

import torch

from .system import BLOCK, MAP_FIXED, MAP_NORESERVE, PROT_NONE, READ_WRITE, blocks, map_memory, unmap


class Region:
    """``n_bytes`` (whole 2 MiB blocks) of reserved addresses, starting at a multiple of 2 MiB; ``place`` puts memory there.

    ``close`` gives the memory back at once; so does the end of the last tensor over it, and of the process. The addresses of a closed
    region stay reserved, without access, for as long as a tensor over them lives: a use after the end is a fault and never a read
    of something else.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = blocks(n_bytes)
        length = self.n_bytes + BLOCK
        start = map_memory(length, protection=PROT_NONE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        self.address = blocks(start)
        self._buffer = (ctypes.c_ubyte * self.n_bytes).from_address(self.address)
        weakref.finalize(self._buffer, _unmap, os.getpid(), start, length).atexit = False
        # Called by the end in this order: what was appended to the first, the return of the memory, what was appended to the second.
        # They must not refer to the region.
        self.before_end: list[Callable[[], None]] = []
        self.after_end: list[Callable[[], None]] = []
        self._end = weakref.finalize(self._buffer, _end, os.getpid(), self.address, self.n_bytes, self.before_end, self.after_end)

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [n_bytes] over the range, no copy."""
        self.check_open()
        return torch.frombuffer(self._buffer, dtype=torch.uint8)

    def check_open(self) -> None:
        """ValueError after ``close``."""
        if self.closed:
            raise ValueError("this host pool is closed; make a new one")

    def place(self, offset: int, n_bytes: int, *, fd: int = -1, file_offset: int = 0) -> None:
        """Map ``n_bytes`` of an open file, or zeroed private memory (``fd`` -1), at ``offset`` of the range.

        Raises:
            ValueError: the kernel refused.
        """
        assert offset >= 0 and offset + n_bytes <= self.n_bytes, f"{offset} + {n_bytes} of {self.n_bytes}"
        kind = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        flags = kind | MAP_FIXED | MAP_NORESERVE
        map_memory(n_bytes, protection=READ_WRITE, flags=flags, address=self.address + offset, fd=fd, offset=file_offset)

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""
        return not self._end.alive

    def close(self) -> None:
        """Give the memory back; a second call does nothing."""
        self._end()


def _end(process: int, address: int, n_bytes: int, before: list[Callable[[], None]], after: list[Callable[[], None]]) -> None:
    if os.getpid() != process:
        return  # a forked child has no part in it
    for step in before:
        step()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE
    map_memory(n_bytes, protection=PROT_NONE, flags=flags, address=address)
    for step in after:
        step()


def _unmap(process: int, address: int, n_bytes: int) -> None:
    if os.getpid() == process:
        unmap(address, n_bytes)
