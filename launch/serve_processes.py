"""The HTTP processes of a server, as rank 0 starts, watches and ends them."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ..engine.server.config import ServerConfig
from ..engine.server.start import Start, encode_start

log = logging.getLogger("rorqual")

#: exit code of an HTTP process that cannot serve at all, for a reason that starting it again does not mend
HOPELESS = 3
#: restarts of one process within so many seconds after which something is wrong for good
_MOST_RESTARTS, _WINDOW_S = 5, 60.0
#: for an HTTP process to begin; it then writes its counts (``engine.server.http_counts``), and rank 0 waits for its signs of life
BEGIN_S = 120.0
_END_S = 10.0  # for an HTTP process to end by itself


@dataclass(kw_only=True)
class _Slot:
    """One HTTP process and its successors."""

    name: str
    process: subprocess.Popen[bytes]
    started: list[float]  # time.monotonic() of each start, the latest ones
    begun: bool = False  # it serves


class HttpProcesses:
    """``api_server_count`` processes on one listening socket. ``look_after`` restarts those that died."""

    def __init__(self, config: ServerConfig, *, address: str, descriptor: int, counts_folder: str | None) -> None:
        """``address`` of the engine's socket, ``descriptor`` of the listening socket. Nothing is started yet."""
        self._config, self._address, self._descriptor, self._counts_folder = config, address, descriptor, counts_folder
        self._slots: list[_Slot] = []
        self.restarts = 0

    def start(self) -> None:
        """Start all of them; they answer "loading" until the engine is there."""
        for place in range(self._config.api_server_count):
            name = f"http-{place}"
            self._slots.append(_Slot(name=name, process=self._spawn(name), started=[time.monotonic()]))

    def _spawn(self, name: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "rorqual.engine.server"],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            pass_fds=(self._descriptor,),
            start_new_session=True,  # a terminal's Ctrl-C and torchrun's signals are for rank 0, which drains first
        )
        start = Start(config=self._config, address=self._address, name=name, descriptor=self._descriptor, counts_folder=self._counts_folder)
        assert process.stdin is not None
        try:
            process.stdin.write(encode_start(start))
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once; ``look_after`` tells
        return process

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [slot.process.pid for slot in self._slots]

    def look_after(self) -> None:
        """Restart processes that have died. Call it about once a second.

        Raises:
            RuntimeError: one cannot serve, or dies again and again.
        """
        for slot in self._slots:
            code = slot.process.poll()
            if code is None:
                self._look_at_start(slot)
                continue
            if code == HOPELESS:
                raise RuntimeError(f"{slot.name} cannot serve; its message is above")
            now = time.monotonic()
            slot.started = [t for t in slot.started if now - t < _WINDOW_S] + [now]
            if len(slot.started) > _MOST_RESTARTS:
                raise RuntimeError(f"{slot.name} has ended {_MOST_RESTARTS} times within {_WINDOW_S:g} s, last with code {code}")
            log.warning("%s (process %d) has ended with code %d; it is started again", slot.name, slot.process.pid, code)
            self.restarts += 1
            _close_pipe(slot.process)
            slot.process, slot.begun = self._spawn(slot.name), False

    def _look_at_start(self, slot: _Slot) -> None:
        """Kill a process that hangs before it serves."""
        if slot.begun or self._counts_folder is None:
            return
        slot.begun = any(Path(self._counts_folder).glob(f"http-{slot.process.pid}-*.json"))
        if not slot.begun and time.monotonic() - slot.started[-1] > BEGIN_S:
            self.replace(slot.name, f"has not begun to serve within {BEGIN_S:g} s")

    def replace(self, name: str, why: str) -> None:
        """Kill a process that is hung; the next ``look_after`` starts it again. Nothing for a name that is not one of them."""
        for slot in self._slots:
            if slot.name == name and slot.process.poll() is None:
                log.warning("%s (process %d) is hung: it %s; it is killed", name, slot.process.pid, why)
                slot.process.kill()

    def stop(self) -> None:
        """End all: they see the end of their standard input. One that does not end is killed."""
        for slot in self._slots:
            _close_pipe(slot.process)
        end = time.monotonic() + _END_S
        for slot in self._slots:
            try:
                slot.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("%s (process %d) has not ended within %g s; it is killed", slot.name, slot.process.pid, _END_S)
                slot.process.kill()
                slot.process.wait()
        self._slots.clear()


def _close_pipe(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass
