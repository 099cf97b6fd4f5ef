"""Processes that a part leaves behind: torchrun gives every rank a session of its own, so that the group of the part is not all of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

#: variable that a part's processes inherit; its value names the part
MARK = "RORQUAL_BENCH_PART"


def marked(value: str) -> list[int]:
    """Processes, of this user and not yet dead, whose environment has ``MARK`` set to ``value``."""
    wanted, found = f"{MARK}={value}".encode(), []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            words = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or gone meanwhile
            continue
        if wanted in words:
            found.append(int(folder.name))
    return found


def end_strays(value: str, seconds: float = 5.0) -> int:
    """Kill what is left of a part and wait until it is gone -> how many there were."""
    deadline, seen = time.monotonic() + seconds, set[int]()
    while left := marked(value):
        seen.update(left)
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return len(seen)
