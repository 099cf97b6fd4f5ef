"""Real engines that serve, on one rank or several, for as long as a test talks to them."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from tests.ranks import RankExit, collect_ranks

ARGS = {
    "skip_tokenizer_init": True, "load_format": "dummy", "dtype": "float32", "disable_log_stats": True, "max_num_seqs": 8,
    "max_model_len": 256, "page_size": 16, "max_total_tokens": 2048, "max_num_batched_tokens": 64,
}  # fmt: skip


def rank_serves(model: str, engine_args: dict[str, Any], settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """The job of one rank: serve, check the pools, tell the counters."""
    from rorqual import LLM

    return _rank(lambda: LLM(model, **engine_args).engine, settings, folder)


def rank_serves_costless(engine_args: dict[str, Any], settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """The same with a model that costs nothing."""
    from rorqual.engine.serving.costless import CostlessEngine

    return _rank(lambda: CostlessEngine(**engine_args), settings, folder)


def _rank(make: Callable[[], Any], settings: dict[str, Any], folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    from rorqual.engine.serving.link import Link
    from rorqual.engine.serving.serve import serve
    from rorqual.engine.serving.settings import ServeSettings

    rank = int(os.environ.get("RANK", "0"))
    with open(os.path.join(folder, f"pid{rank}"), "w") as file:
        file.write(str(os.getpid()))
    with Link(folder) if rank == 0 else nullcontext() as link:  # closed in any case: a failing engine says goodbye too
        engine = make()
        found = {"code": serve(engine, link, ServeSettings(**settings), every_second=lambda: _break(folder), replace=_note(folder))}
        found["stats"] = engine.rank_stats()
        if engine.leader is not None:
            engine.leader.scheduler.check()
            found["pages_in_use"], found["records"] = engine.leader.scheduler.pages_in_use, len(engine.leader.emitter.records)
        engine.close()
    return found


def _note(folder: str) -> Callable[[str, str], None]:
    """Write down which HTTP processes were to be replaced."""

    def replace(name: str, why: str) -> None:
        with open(os.path.join(folder, "replaced"), "a") as file:
            file.write(f"{name} {why}\n")

    return replace


def _break(folder: str) -> None:
    if os.path.exists(os.path.join(folder, "broken")):
        raise RuntimeError("broken on purpose")


class Serving:
    """An engine that serves in other processes."""

    def __init__(self, folder: str, world: int) -> None:
        self.folder = folder
        self.address = f"ipc://{folder}/engine.sock"
        self.world = world
        self.exits: list[RankExit] = []

    def pid(self, rank: int) -> int:
        with open(os.path.join(self.folder, f"pid{rank}")) as file:
            return int(file.read())

    def _takes_signals(self, rank: int) -> bool:
        """Whether a rank handles or ignores SIGTERM by now."""
        try:
            with open(f"/proc/{self.pid(rank)}/status") as file:
                fields = dict(line.split(":", 1) for line in file if ":" in line)
        except FileNotFoundError:
            return False
        return bool((int(fields["SigCgt"], 16) | int(fields["SigIgn"], 16)) >> (signal.SIGTERM - 1) & 1)

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks, or to all, as torchrun does, once they are where signals are taken."""
        chosen = ranks or range(self.world)
        end = time.monotonic() + 60.0
        while not all(self._takes_signals(rank) for rank in chosen):  # some may still be starting when rank 0 serves
            assert time.monotonic() < end, f"of ranks {list(chosen)} some took no SIGTERM within 60 s"
            time.sleep(0.02)
        for rank in chosen:
            os.kill(self.pid(rank), number)

    @property
    def replaced(self) -> list[str]:
        """Names of the HTTP processes that were to be replaced, and why."""
        with suppress(FileNotFoundError), open(os.path.join(self.folder, "replaced")) as file:
            return file.read().splitlines()
        return []

    def break_soon(self) -> None:
        """Let the costless engine's rank 0 fail."""
        with open(os.path.join(self.folder, "broken"), "w"):
            pass

    def kill(self) -> None:
        """End the ranks that are there."""
        for rank in range(self.world):
            with suppress(OSError, ValueError):
                os.kill(self.pid(rank), signal.SIGKILL)


@contextmanager
def costless(world: int = 1, *, settings: dict[str, Any] | None = None, timeout: float = 150.0, **args: Any) -> Iterator[Serving]:
    """An engine whose model costs nothing, as ``serving``."""
    args = {"max_num_seqs": 8, "page_size": 16, "n_pages": 256, "max_model_len": 512, "debug": True, **args}
    with _running(world, rank_serves_costless, (args, settings or {}), timeout, debug=True) as found:
        yield found


@contextmanager
def serving(
    world: int = 1, model: str = "tiny", *, settings: dict[str, Any] | None = None, timeout: float = 150.0, debug: bool = True, **args: Any
) -> Iterator[Serving]:
    """An engine of ``world`` ranks; at the end its ``exits`` are there. The test ends it with a signal; ``timeout`` does so in any case."""
    job = (model, {**ARGS, **args}, settings or {})
    with _running(world, rank_serves, job, timeout, debug=debug) as found:
        yield found


@contextmanager
def _running(world: int, job: Any, job_args: tuple[Any, ...], timeout: float, *, debug: bool) -> Iterator[Serving]:
    folder = tempfile.mkdtemp(prefix="srv-")
    found = Serving(folder, world)
    env = {"RORQUAL_DEBUG": "1" if debug else "0"}

    def work() -> None:
        found.exits = collect_ranks(job, world, *job_args, folder, timeout=timeout, env=env)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield found
    except BaseException:
        found.kill()
        thread.join(30)
        print("\n".join(f"--- rank {e.rank} ended with {e.code}\n{e.error or e.stderr[-3000:]}" for e in found.exits))
        raise
    finally:
        thread.join(timeout + 20)
        shutil.rmtree(folder, ignore_errors=True)
    assert not thread.is_alive(), "the ranks did not end"


def good_ends(found: Serving) -> list[dict[str, Any]]:
    """What the ranks returned; all must have ended well, with nothing left in their pools."""
    for e in found.exits:
        assert e.code == 0 and not e.error, f"rank {e.rank} ended with {e.code}\n{e.error or e.stderr[-3000:]}"
        assert e.result.get("pages_in_use", 0) == 0 and e.result.get("records", 0) == 0, e.result
    return [e.result for e in found.exits]
