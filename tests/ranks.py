"""Runs a function in several rank processes, as torchrun would start them, and brings back what they returned.

``run_ranks`` is for functions that must succeed; ``collect_ranks`` brings back exit codes and stderr as well, for
tests of failures. Processes come from a fork server that has torch and the engine loaded, so that eight ranks start in about a second.
"""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

# what ranks would load anyway: the engine, and what torch itself loads at its first symmetric or symbolic operation
_LOADED = ["torch", "torch.distributed", "numpy", "sympy", "torch.fx.experimental.symbolic_shapes", "rorqual.engine.llm"]
_GRACE_S = 15.0  # after a rank failed, the others have this long to end by themselves


@dataclass(kw_only=True)
class RankExit:
    """How one rank ended."""

    rank: int  # global rank
    code: int | None = None  # exit code, negative for a signal; None if it had to be killed by the helper
    result: Any = None  # what the function returned
    error: str = ""  # traceback of the exception that left the function
    failed_at: float = float("inf")  # monotonic seconds of it
    stderr: str = ""  # all it wrote to stdout and stderr
    seconds: float = 0.0  # from the start of the job to the end of this rank


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0, env: Mapping[str, str] | None = None) -> list[Any]:
    """``fn(*args)`` in ``world`` processes with torchrun's environment -> its results in rank order.

    ``fn`` is a module-level function; it reads its rank from the environment. AssertionError, with the first
    traceback on top, if a rank fails or the job takes longer than ``timeout`` seconds.
    """
    exits = collect_ranks(fn, world, *args, timeout=timeout, env=env)
    if all(e.code == 0 and not e.error for e in exits):
        return [e.result for e in exits]
    raise AssertionError(_report(exits, timeout))


def collect_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0, env: Mapping[str, str] | None = None
) -> list[RankExit]:
    """As ``run_ranks``, but failures are results too. No process is left running."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    module = sys.modules[fn.__module__]
    target = (fn.__module__, inspect.getsourcefile(module), fn.__qualname__)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes, pipes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            variables = {**_torchrun_env(rank, world, store.port), **(env or {})}
            process = context.Process(target=_child, args=(target, args, variables, theirs, f"{folder}/{rank}"), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        exits = _gather(processes, pipes, begin, timeout)
        for e in exits:
            log = Path(folder, str(e.rank))
            e.stderr = log.read_text(errors="replace") if log.exists() else ""
    return exits


def _torchrun_env(rank: int, world: int, port: int) -> dict[str, str]:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {name: str(value) for name, value in places.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process hosts the store, as torchrun's agent does
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _gather(
    processes: Sequence[Any], pipes: Sequence[multiprocessing.connection.Connection], begin: float, timeout: float
) -> list[RankExit]:
    exits = [RankExit(rank=rank) for rank in range(len(processes))]
    end = begin + timeout
    alive, unread = set(range(len(processes))), set(range(len(processes)))
    while alive and time.monotonic() < end:
        watched: list[Any] = [pipes[r] for r in unread] + [processes[r].sentinel for r in alive]
        ready = multiprocessing.connection.wait(watched, max(0.0, end - time.monotonic()))
        for rank in sorted(unread):
            if pipes[rank] in ready:
                unread.discard(rank)
                _receive(exits[rank], pipes[rank])
        for rank in sorted(alive):
            if processes[rank].sentinel in ready:
                alive.discard(rank)
                processes[rank].join()
                exits[rank].code, exits[rank].seconds = processes[rank].exitcode, time.monotonic() - begin
                if exits[rank].code:
                    end = min(end, time.monotonic() + _GRACE_S)
    for rank in alive:
        processes[rank].kill()
        processes[rank].join()
        exits[rank].seconds = time.monotonic() - begin
    return exits


def _receive(into: RankExit, pipe: multiprocessing.connection.Connection) -> None:
    try:
        into.result, into.error, into.failed_at = pickle.loads(pipe.recv_bytes())
    except EOFError:
        pass


def _load(name: str, file: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, (name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _child(
    target: tuple[str, str, str], args: tuple[Any, ...], env: Mapping[str, str], pipe: multiprocessing.connection.Connection, log: str
) -> None:
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env)
    torch.set_num_threads(1)
    try:
        fn = _load(target[0], target[1])
        for part in target[2].split("."):
            fn = getattr(fn, part)
        answer = (fn(*args), "", float("inf"))  # type: ignore[operator]
    except BaseException:
        answer = (None, traceback.format_exc(), time.monotonic())
        print(answer[1], file=sys.stderr, flush=True)
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    if answer[1]:
        sys.exit(1)


def _report(exits: Sequence[RankExit], timeout: float) -> str:
    """What went wrong, the first error on top."""
    lines = []
    for e in sorted(exits, key=lambda e: (e.failed_at, e.code == 0)):
        state = f"did not end within {timeout:g} s" if e.code is None else f"ended with code {e.code} after {e.seconds:.1f} s"
        lines.append(f"--- rank {e.rank} {state}\n{e.error}{'' if e.code == 0 else e.stderr[-4000:].replace(e.error, '')}")
    return "\n".join(lines)
