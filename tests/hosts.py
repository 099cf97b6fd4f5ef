"""Several hosts on one machine: network namespaces with addresses and host names of their own, on one bridge.

    with Hosts(3) as hosts:
        process = hosts[1].start(["python", "-m", "rorqual.launch", ...])
        hosts[2].cut()

Needs root and iproute2; ``why_not()`` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

NAMES = ("alpha", "beta", "gamma", "delta")
_count = 0


def why_not() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"rqprobe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "network namespaces are not allowed here"
    made = subprocess.run(["ip", "-n", probe, "link", "add", "name", "br0", "type", "bridge"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return f"no bridges here: {made.stderr.strip()}" if made.returncode else None


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


class Running:
    """A process on a host; its output is read as it comes."""

    def __init__(self, host: Host, words: Sequence[str], env: Mapping[str, str] | None) -> None:
        script = f'echo {host.name} > /proc/sys/kernel/hostname && exec "$@"'
        command = ["ip", "netns", "exec", host.space, "unshare", "--uts", "sh", "-c", script, "sh", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
            if env is None or name not in env:
                environment.pop(name, None)
        self.host = host
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
        )
        self._lines: list[str] = []
        self.ended_at = 0.0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    @property
    def text(self) -> str:
        """All it has said so far."""
        return "".join(self._lines)

    def wait(self, timeout: float) -> int:
        """Its exit code. AssertionError with its output if it does not end in time."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.host.name} did not end within {timeout} s:\n{self.text[-6000:]}") from None
        self._reader.join(10)
        return code

    def wait_for(self, said: str, timeout: float) -> None:
        """Until it has said so. AssertionError with its output if it ends or is late."""
        until(lambda: said in self.text or self.process.poll() is not None, timeout, lambda: self.text[-6000:])
        assert said in self.text, f"{self.host.name} ended ({self.process.poll()}) without saying {said!r}:\n{self.text[-6000:]}"


def until(condition: Callable[[], bool], timeout: float, tell: Callable[[], str] = str) -> None:
    """Wait for a condition. AssertionError at the deadline."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s: {tell()}"
        time.sleep(0.1)


class Host:
    """One of ``Hosts``."""

    def __init__(self, name: str, space: str, address: str) -> None:
        self.name = name  # its host name
        self.space = space  # its network namespace
        self.address = address
        self.running: list[Running] = []

    def start(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> Running:
        """Start a command there."""
        self.running.append(Running(self, words, env))
        return self.running[-1]

    def rorqual(self, *words: str, env: Mapping[str, str] | None = None) -> Running:
        """Start ``rorqual WORDS`` there."""
        return self.start([sys.executable, "-m", "rorqual.launch", *words], env)

    def run(self, *words: str, timeout: float = 20.0) -> str:
        """What a command prints there."""
        return subprocess.run(
            ["ip", "netns", "exec", self.space, *words], check=True, capture_output=True, text=True, timeout=timeout
        ).stdout

    def cut(self) -> None:
        """Take its network away, without a word to anybody."""
        ip("-n", self.space, "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Give it back."""
        ip("-n", self.space, "link", "set", "eth0", "up")

    def kill(self) -> None:
        """End everything that runs there."""
        found = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True, timeout=20).stdout
        for pid in map(int, found.split()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for running in self.running:
            running.process.wait(20)


class Hosts:
    """A few hosts on one switch, 10.77.x.1, 2, ...; gone at the end with all that ran there."""

    def __init__(self, size: int) -> None:
        global _count
        _count += 1
        tag, net = f"rq{os.getpid()}x{_count}", os.getpid() % 250 + 1
        self.switch = f"{tag}sw"
        self.hosts = [Host(NAMES[i], f"{tag}{NAMES[i]}", f"10.77.{net}.{i + 1}") for i in range(size)]

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.hosts)

    def __enter__(self) -> Hosts:
        try:
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            ip("-n", self.switch, "link", "set", "br0", "up")
            for i, host in enumerate(self.hosts):
                ip("netns", "add", host.space)
                ip("-n", self.switch, "link", "add", f"p{i}", "type", "veth", "peer", "name", "eth0", "netns", host.space)
                ip("-n", self.switch, "link", "set", f"p{i}", "master", "br0", "up")
                ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
                ip("-n", host.space, "link", "set", "eth0", "up")
                ip("-n", host.space, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for host in self.hosts:
            host.kill()
        for space in (*(host.space for host in self.hosts), self.switch):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=20)


def at_start(folder: Path, code: str) -> dict[str, str]:
    """Environment of a host whose Python processes run ``code`` before anything else."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code, encoding="utf-8")
    return {"PYTHONPATH": str(folder)}
