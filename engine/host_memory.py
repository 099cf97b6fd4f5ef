"""Keeping freed host memory: a CPU step makes and drops the same large temporaries again and again."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc
_LARGEST = 1 << 30  # bytes; blocks up to this size are taken from the heap and stay with the process when freed
_STEP = 64 << 20  # bytes by which the heap grows


def keep_freed_memory() -> bool:
    """Tell glibc not to hand freed blocks back to the kernel: fresh zeroed pages cost a CPU step about a quarter of its time.

    The process keeps its peak of temporaries. Returns False where the C library is another one.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    done = [mallopt(option, value) for option, value in ((_M_MMAP_THRESHOLD, _LARGEST), (_M_TRIM_THRESHOLD, _LARGEST), (_M_TOP_PAD, _STEP))]
    return all(done)
