"""What the host's kernel knows that no clock setting changes: time since boot, which boot this is, when a process began."""

from __future__ import annotations

import os
import time
from pathlib import Path


def boot_ns() -> int:
    """Nanoseconds since boot, suspended time included; the same for all processes, never set back."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """A name that the kernel makes anew at every boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_ticks(pid: int) -> int:
    """Clock ticks between boot and the start of process ``pid``: with the pid, a name that is not used twice. 0: no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])  # the command may hold spaces and brackets: count from its end


def file_identity(file: str | Path | int) -> str:
    """Which file a path or descriptor is: differs after it was removed and made anew. OSError if there is none.

    A ``pool_id`` for a pool in a file; where a file system gives an inode's number away again at once, checksums tell the rest.
    """
    info = os.stat(file)
    return f"{info.st_dev}:{info.st_ino}"


class Deadline:
    """A point in time that a call may not outlast."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end
