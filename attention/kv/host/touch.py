"""First touch of a pool by many threads: the kernel hands out and clears its pages then."""

from __future__ import annotations

import ctypes
import errno
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .region import Region
from .system import MADV_POPULATE_WRITE, advise

_PART = 64 << 20  # bytes a thread takes at a time
_SMALL_PAGE = 4096
_MOST_THREADS = 32
_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.EPERM)  # a kernel without the advice (before 5.14)


def threads_here(threads: int = 0) -> int:
    """``threads``, or one for every core this process may use, 32 at most."""
    return threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def touch(region: Region, threads: int = 0) -> None:
    """Make every page of ``region`` present; new memory is zero, what is there stays.

    Raises:
        ValueError: memory ran out; the pages present so far still belong to the region.
    """
    starts = range(0, region.n_bytes, _PART)
    with ThreadPoolExecutor(threads_here(threads)) as pool:
        failed = [code for code in pool.map(lambda start: _touch(region, start), starts) if code]
    if failed:
        raise ValueError(
            f"memory ran out while {region.n_bytes / 2**30:.1f} GiB of the host pool were first touched ({os.strerror(failed[0])}); "
            "make the pool smaller or free memory"
        )


def _touch(region: Region, start: int) -> int:
    length = min(_PART, region.n_bytes - start)
    code = advise(region.address + start, length, MADV_POPULATE_WRITE)
    if code not in _UNKNOWN:
        return code
    part = np.ctypeslib.as_array((ctypes.c_ubyte * length).from_address(region.address + start))[::_SMALL_PAGE]
    np.add(part, 0, out=part)  # writes what it read: a page that held something keeps it
    return 0


def fill(region: Region, offset: int, n_bytes: int, value: int, threads: int = 0) -> None:
    """Set ``n_bytes`` from ``offset`` of ``region`` to the byte ``value``, by many threads."""
    end = offset + n_bytes
    with ThreadPoolExecutor(threads_here(threads)) as pool:
        parts = [(start, min(_PART, end - start)) for start in range(offset, end, _PART)]
        list(pool.map(lambda part: ctypes.memset(region.address + part[0], value, part[1]), parts))
