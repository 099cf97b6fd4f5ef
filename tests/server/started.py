"""``rorqual serve`` as a process of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from tests.server.serving import wait_ready


@contextlib.contextmanager
def started(words: list[str], seconds: float = 180.0) -> Iterator[tuple[str, subprocess.Popen[str], list[str]]]:
    """``rorqual serve`` with ``words``: (url, process, its log), drained at the end; AssertionError unless it ends with 0."""
    full = [sys.executable, "-m", "rorqual.launch", "serve", *words, "--port", "0", "--disable-access-log"]
    server = subprocess.Popen(full, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines: list[str] = []
    found = threading.Event()

    def read() -> None:
        assert server.stderr is not None
        for line in server.stderr:
            lines.append(line)
            if "listening at " in line:
                found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert found.wait(seconds), "".join(lines)
        url = re.search(r"listening at (\S+);", "".join(lines))
        assert url is not None
        wait_ready(url[1], seconds)
        yield url[1], server, lines
        server.send_signal(signal.SIGTERM)
        assert server.wait(90) == 0, "".join(lines[-60:])
    finally:
        server.kill()
        server.wait()
        reader.join(10)
        if server.stderr is not None:
            server.stderr.close()
