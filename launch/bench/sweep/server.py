"""A server for the time of some runs: started from a command, ended with all of its processes."""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..process_group import end

#: seconds for a server to drain after SIGTERM, and then to die after SIGKILL
DRAIN_S, DEATH_S = 60.0, 10.0


def free_port() -> int:
    """A port that nobody listens on now. The server binds it a moment later: where another takes it first, the server says so and ends."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


def command_of(template: str, port: int, flags: Sequence[str]) -> list[str]:
    """The command as words; ``{port}`` is replaced, and ``--port`` added where the template has none."""
    words = shlex.split(template)
    if not words:
        raise ValueError("--serve-cmd is empty")
    if "{port}" in template:
        return [word.replace("{port}", str(port)) for word in words] + list(flags)
    return [*words, "--port", str(port), *flags]


@contextmanager
def serving(command: Sequence[str], port: int, log: Path, timeout_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """The server's process, from when it listens until the block ends.

    Raises:
        ValueError: it ended, or did not listen within ``timeout_s``; the end of its log is told.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out:
        try:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise ValueError(f"--serve-cmd: {command[0]} cannot be started: {error.strerror}") from None
    try:
        _wait(process, port, log, timeout_s)
        yield process
    finally:
        end(process, drain_s=DRAIN_S, death_s=DEATH_S)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not _listens(port):
        if process.poll() is not None:
            raise ValueError(f"the server ended with exit code {process.returncode} before it listened; {log} ends with: {tail(log)}")
        if time.monotonic() > deadline:
            raise ValueError(f"the server did not listen at port {port} within {timeout_s:g} s; {log} ends with: {tail(log)}")
        time.sleep(0.2)


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False


def tail(log: Path, size: int = 600) -> str:
    """The last of a log on one line."""
    text = log.read_bytes()[-size:].decode("utf-8", "replace") if log.exists() else ""
    return " | ".join(line.strip() for line in text.splitlines() if line.strip()) or "nothing"
