"""The compiling process: it has library and vocabulary ready, and forks a child with limits for each grammar.

``python -m rorqual.engine.server.structured.sandbox SETTINGS`` with SETTINGS as JSON; frames come in at stdin and go out at stdout.
A grammar may be hostile. Its child may neither run long, nor take much memory, nor write files, and what it does to itself ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import selectors
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ...grammar.compiler import MOST_CHARACTERS, Compiler
from ...grammar.structured import Form
from ...text.tokenizer import Tokenizer
from .frames import Frames, pack

_PR_SET_PDEATHSIG = 1
_READ = 1 << 20
_NICE = 5  # requests under way go first


@dataclass(kw_only=True)
class _Child:
    """One grammar that is being compiled."""

    name: int
    pid: int
    pipe: int
    deadline: float  # time.monotonic()
    data: bytearray = field(default_factory=bytearray)


class Sandbox:
    """Takes jobs ``{"id", "form"}`` and answers ``{"id", "grammar"}``, ``{"id", "error"}`` or ``{"id", "busy"}``."""

    def __init__(self, compiler: Compiler, out: int, *, timeout: float, memory_bytes: int, workers: int) -> None:
        self._compiler = compiler
        self._out = out
        self._timeout = timeout
        self._memory = memory_bytes
        self._workers = workers
        self._queue: deque[tuple[float, dict[str, Any]]] = deque()
        self._children: dict[int, _Child] = {}  # by pipe
        self._poll = selectors.DefaultSelector()
        self._frames = Frames()

    def serve(self) -> None:
        """Until stdin ends."""
        self._poll.register(0, selectors.EVENT_READ)
        try:
            while self._turn():
                pass
        finally:
            for child in list(self._children.values()):
                self._end(child)

    def _turn(self) -> bool:
        nearest = min((c.deadline for c in self._children.values()), default=None)
        for key, _ in self._poll.select(None if nearest is None else max(0.0, nearest - time.monotonic())):
            if key.fd == 0:
                data = os.read(0, _READ)
                if not data:
                    return False
                self._queue.extend((time.monotonic(), job) for job in self._frames.push(data))
            else:
                self._read(self._children[key.fd])
        for child in [c for c in self._children.values() if time.monotonic() >= c.deadline]:
            self._end(child)
            self._answer(child.name, error=f"compiling took longer than {self._timeout:g} s (--structured-compile-timeout); simplify it")
        while self._queue and len(self._children) < self._workers:
            since, job = self._queue.popleft()
            if time.monotonic() - since > self._timeout:
                self._answer(job["id"], busy=True)
            else:
                self._fork(job)
        return True

    def _fork(self, job: dict[str, Any]) -> None:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            self._compile(job, theirs)  # does not return
        os.close(theirs)
        self._children[ours] = _Child(name=job["id"], pid=pid, pipe=ours, deadline=time.monotonic() + self._timeout)
        self._poll.register(ours, selectors.EVENT_READ)

    def _compile(self, job: dict[str, Any], out: int) -> None:
        """The child's life."""
        code = 1
        try:
            _limit(self._timeout, self._memory)
            try:
                answer = {"grammar": self._compiler.compile(Form.from_wire(job["form"]))}
            except ValueError as error:
                answer = {"error": str(error)}
            with open(out, "wb") as file:
                file.write(pack(answer))
            code = 0
        finally:
            os._exit(code)

    def _read(self, child: _Child) -> None:
        data = os.read(child.pipe, _READ)
        child.data += data
        if len(child.data) > 4 * MOST_CHARACTERS:
            self._end(child)
            return self._answer(child.name, error="the compiled grammar is too large; simplify it")
        if data:
            return
        status = self._end(child)
        try:
            found = Frames().push(bytes(child.data))
        except ValueError:
            found = []
        if len(found) == 1:
            return self._answer(child.name, **found[0])
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.waitstatus_to_exitcode(status)}"
        limits = f"{self._timeout:g} s and {self._memory >> 20} MiB"
        self._answer(child.name, error=f"the compiler gave up ({how}); a grammar has {limits} to be compiled in; simplify it")

    def _end(self, child: _Child) -> int:
        """The child is over; its status."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)  # nothing happens to one that has ended
        _, status = os.waitpid(child.pid, 0)
        self._poll.unregister(child.pipe)
        os.close(child.pipe)
        del self._children[child.pipe]
        return status

    def _answer(self, name: int, **what: Any) -> None:
        data = memoryview(pack({"id": name, **what}))
        while data:
            data = data[os.write(self._out, data) :]


def _limit(timeout: float, memory: int) -> None:
    """Limits of this process from now on."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    seconds = max(1, int(timeout + 1))
    for what, most in (("CPU", seconds), ("AS", now + memory), ("CORE", 0), ("FSIZE", 0), ("NOFILE", 64)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{what}"), (most, most))
    _die_with_parent()


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> int:
    """Make the compiler, say so, serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the HTTP process ends this one
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent()
    os.nice(_NICE)
    settings = json.loads(sys.argv[1])
    out = os.dup(1)
    with open(os.devnull, "wb") as nowhere:  # a library that prints must not break a frame
        os.dup2(nowhere.fileno(), 1)
    try:
        compiler = Compiler(Tokenizer.load(settings["folder"]), settings["vocab_size"], settings["eos_ids"])
    except ValueError as error:
        os.write(out, pack({"id": 0, "error": str(error)}))
        return 0
    gc.collect()
    gc.freeze()  # children share its memory
    os.write(out, pack({"id": 0}))
    limits = {name: settings[name] for name in ("timeout", "memory_bytes", "workers")}
    Sandbox(compiler, out, **limits).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
