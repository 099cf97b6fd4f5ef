"""The end of a process that was started with others of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time


def end(process: subprocess.Popen[bytes], *, drain_s: float, death_s: float) -> None:
    """Ask a process that began its own session to drain, then end whatever of its group is left after so many seconds."""
    for kind, seconds in ((signal.SIGTERM, drain_s), (signal.SIGKILL, death_s)):
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            pass
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        if not _alive(process.pid, 5.0 if kind == signal.SIGTERM else 1.0):
            return


def _alive(group: int, patience_s: float) -> bool:
    """Whether processes of a group are left after a while."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
