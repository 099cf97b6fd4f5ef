"""How far away a piece of memory is: latency of dependent reads and bandwidth of copies, in about a fifth of a second."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat

from .region import Region
from .touch import threads_here

#: upper bounds of the latency classes, in latencies of ordinary memory: another socket or CXL is far, a fabric slow
CLASSES = (("near", 1.3), ("far", 4.0))
_LINE = 64
_PART = 4 << 20  # bytes of one copy
_MOST_COPIERS = 8
_HOPS = 2000  # reads between looks at the clock


@dataclass(frozen=True, kw_only=True)
class RegionClass:
    """What was measured from this process' cores. A GPU's view differs: its link is between."""

    latency_ns: float
    gb_per_s: float

    def name(self, ordinary_ns: float) -> str:
        """``near``, ``far`` or ``slow``, by the latency of ordinary memory of the same machine."""
        return next((name for name, bound in CLASSES if self.latency_ns <= bound * ordinary_ns), "slow")

    def describe(self, ordinary_ns: float) -> str:
        """For people."""
        return f"{self.name(ordinary_ns)}: {self.latency_ns:.0f} ns, {self.gb_per_s:.1f} GB/s"


def probe(region: Region, seconds: float = 0.2) -> RegionClass:
    """Measure ``region``, which should be larger than the caches; it is only read."""
    return RegionClass(latency_ns=latency_ns(region, seconds / 2), gb_per_s=gb_per_s(region, seconds / 2))


def latency_ns(region: Region, seconds: float) -> float:
    """Nanoseconds of one read whose address depends on the read before.

    What the loop costs without a cache miss is measured on one line of the same memory and taken off.
    """
    lines = memoryview((ctypes.c_int64 * (region.n_bytes // 8)).from_address(region.address)).cast("B").cast("q")[:: _LINE // 8]
    far = min(_chase(lines, len(lines), seconds / 8) for _ in range(4))
    near = min(_chase(lines, 1, seconds / 8) for _ in range(4))
    return max(0.0, far - near)


def _chase(lines: memoryview, n: int, seconds: float) -> float:
    """Nanoseconds a hop over ``n`` of ``lines``; the next line follows from a generator and, by a 0, from what was read."""
    place, hops, start = time.perf_counter_ns() % n, 0, time.perf_counter()
    while True:
        for _ in repeat(None, _HOPS):
            place = (place * 1103515245 + 12345 + (lines[place] & 0)) % n
        hops += _HOPS
        spent = time.perf_counter() - start
        if spent >= seconds:
            return spent / hops * 1e9


def gb_per_s(region: Region, seconds: float) -> float:
    """GB/s of copies out of ``region`` into caches, by up to eight threads."""
    until = time.perf_counter() + seconds

    def copy(thread: int) -> int:
        target = (ctypes.c_ubyte * _PART)()
        done, place = 0, thread * _PART
        while True:  # once at least: a thread may not get to begin before it is time to end
            length = min(_PART, region.n_bytes)
            place = (place + threads * _PART) % max(1, region.n_bytes - length + 1)
            ctypes.memmove(target, region.address + place, length)
            done += length
            if time.perf_counter() >= until:
                return done

    threads = min(_MOST_COPIERS, threads_here())
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        copied = sum(pool.map(copy, range(threads)))
    return copied / (time.perf_counter() - start) / 1e9
