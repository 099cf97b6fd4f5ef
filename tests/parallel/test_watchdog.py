"""Failures of ranks: every rank ends within seconds, and every message names the first error."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.group import CollectiveError
from rorqual.parallel.watchdog import guard
from tests.ranks import collect_ranks, run_ranks

CPU = torch.device("cpu")


def raise_on(bad: int, how: str) -> None:
    grid = Grid.create(GridSpec(dp=2, tp=2), CPU, 120.0)
    with guard(grid):
        grid.progress.step = 17
        grid.world.all_reduce(torch.ones(3))
        if grid.rank == bad:
            time.sleep(0.3)
            raise KeyError(f"page table of rank {bad}")
        if how == "collective":
            grid.world.all_reduce(torch.ones(3))
        elif how == "sleep":
            time.sleep(60)
        elif how == "tp":  # ranks that do not wait for the bad one itself
            while True:
                grid.tp.all_reduce(torch.ones(3))
    grid.close()


@pytest.mark.parametrize(("bad", "how"), [(2, "collective"), (0, "sleep"), (1, "tp")])
def test_a_rank_that_raises_ends_all(bad: int, how: str) -> None:
    exits = collect_ranks(raise_on, 4, bad, how, timeout=40.0)
    for e in exits:
        assert e.code == 1 and e.seconds < 15, e
        if e.rank == bad:
            assert f"rank {bad}: failed first, at step 17: KeyError: 'page table of rank {bad}'" in e.stderr
            assert "Traceback" in e.stderr and e.error.strip().endswith(f"KeyError: 'page table of rank {bad}'")
        else:
            assert f"rank {e.rank}: stopping because rank {bad} failed first, at step 17: KeyError: 'page table of rank {bad}'" in e.stderr


def killed(bad: int, busy: bool) -> None:
    grid = Grid.create(GridSpec(dp=3), CPU, 120.0)
    with guard(grid):
        grid.progress.step = 5
        grid.world.all_reduce(torch.ones(3))
        if grid.rank == bad:
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        if busy and grid.rank == 1:
            time.sleep(60)
        grid.ep.all_reduce(torch.ones(3))
    grid.close()


@pytest.mark.parametrize(("bad", "busy"), [(2, False), (0, True)])
def test_a_killed_rank_is_named(bad: int, busy: bool) -> None:
    exits = collect_ranks(killed, 3, bad, busy, timeout=60.0)
    assert exits[bad].code == -signal.SIGKILL
    for e in exits:
        if e.rank != bad:
            assert e.code == 1 and e.seconds < 25, e
            assert f"missing rank {bad} (no heartbeat for " in e.stderr and "at step 5" in e.stderr, e.stderr


def late(bad: int, by_s: float, op: str) -> tuple[str, dict[int, str], str, int, float]:
    grid = Grid.create(GridSpec(dp=3), CPU, 2.0)
    grid.progress.step = 8
    grid.world.all_reduce(torch.ones(3))
    grid.progress.step = 9
    if grid.rank == bad:
        time.sleep(by_s)
        grid.close(failed=True)
        return "", {}, "", 0, 0.0
    begin = time.monotonic()
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: grid.world.all_reduce(torch.ones(3)),
        "broadcast_bytes": lambda: grid.world.broadcast_bytes(None, bad),
        "recv": lambda: grid.world.recv_async(torch.ones(1), bad).wait(),
    }
    with pytest.raises(CollectiveError) as caught:
        calls[op]()
    seconds = time.monotonic() - begin
    time.sleep(1.5)  # the other one that waits has its deadline too
    grid.close(failed=True)
    error = caught.value
    return str(error), error.missing, error.op, error.step, seconds


@pytest.mark.parametrize("op", ["all_reduce", "broadcast_bytes", "recv"])
def test_a_late_rank_is_named_at_the_deadline(op: str) -> None:
    for message, missing, found_op, step, seconds in run_ranks(late, 3, 1, 5.0, op)[::2]:
        assert list(missing) == [1] and missing[1].startswith("at step 9"), (missing, message)
        assert step == 9 and 1.5 < seconds < 7.0
        assert found_op == ("all_gather" if op == "all_reduce" else op)
        assert f"{found_op} in group world (ranks [0, 1, 2], call " in message and "step 9) failed after" in message
        assert "(deadline 2 s): missing rank 1 (" in message


def stuck() -> None:
    """A host that waits for something no backend watches, as for a device: the watchdog applies the deadline."""
    grid = Grid.create(GridSpec(dp=2), CPU, 2.0)
    with guard(grid):
        if grid.rank == 0:
            with grid.progress.waiting("ep", "device step", grid.ep.ranks):
                time.sleep(60)
        time.sleep(60)
    grid.close()


def test_overdue_waits_end_the_job() -> None:
    exits = collect_ranks(stuck, 2, timeout=40.0)
    assert [e.code for e in exits] == [1, 1] and max(e.seconds for e in exits) < 25
    assert "device step in group ep (ranks [0, 1]" in exits[0].stderr and "no end of device step within the deadline" in exits[0].stderr
    assert "stopping because rank 0 failed first" in exits[1].stderr


def absent(bad: int) -> tuple[str, list[int]]:
    if int(os.environ["RANK"]) == bad:
        return "", []
    with pytest.raises(CollectiveError) as caught:
        Grid.create(GridSpec(dp=3), CPU, 3.0)
    return str(caught.value), list(caught.value.missing)


def test_a_rank_that_never_comes_is_named() -> None:
    for message, missing in run_ranks(absent, 3, 1)[::2]:
        assert missing == [1], (message, missing)
        assert "create in group world" in message and "missing rank 1 (never heard of)" in message


def good_exit(code: object) -> None:
    grid = Grid.create(GridSpec(dp=2), CPU, 20.0)
    try:
        with guard(grid):
            raise SystemExit(code)
    except SystemExit:
        grid.close(failed=bool(code))
        raise


def test_leaving_with_success_is_no_failure() -> None:
    exits = collect_ranks(good_exit, 2, 0)
    assert not any("failed first" in e.stderr for e in exits)
    exits = collect_ranks(good_exit, 2, 3)
    assert any("failed first, at step 0: SystemExit: 3" in e.stderr for e in exits)


def test_guard_alone_lets_errors_pass() -> None:
    with pytest.raises(KeyError), guard(Grid.single(CPU)):
        raise KeyError("x")


def first_to_leave(says_so: bool) -> bool:
    """Rank 1's connections close before rank 0 has read the last bytes in them."""
    grid = Grid.create(GridSpec(dp=2), CPU, 20.0)
    assert grid.watchdog is not None
    if grid.rank == 1:
        if says_so:
            grid.watchdog.leave()
        os._exit(0)
    time.sleep(0.5)
    grid.close()
    return True


@pytest.mark.parametrize("says_so", [True, False])
def test_connections_of_a_rank_that_has_left_with_the_others_may_close(says_so: bool) -> None:
    rank = collect_ranks(first_to_leave, 2, says_so, timeout=60.0)[0]
    assert (rank.code, rank.result) == (0, True) if says_so else "missing rank 1" in rank.error, rank


AT_EXIT = """
import atexit, threading
from rorqual.parallel.progress import Progress
from rorqual.parallel.store import Rendezvous
from rorqual.parallel.watchdog import Watchdog
names = lambda: [thread.name for thread in threading.enumerate()]
atexit.register(lambda: print(names()))  # runs after those that were registered later
Watchdog(Rendezvous.from_env(5.0), "job", Progress(rank=0), deadline_s=60.0).start()
print(names())
"""


def run_alone(script: str, world_size: int) -> subprocess.CompletedProcess[str]:
    """``script`` as rank 0 of a job whose other ranks do not come."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": str(world_size)}
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)


def test_its_thread_has_ended_before_the_interpreter_does() -> None:
    """A thread that comes back from the store's code into an interpreter that is gone would abort the process."""
    ran = run_alone(AT_EXIT, 1)
    before, after = ran.stdout.splitlines()
    assert ran.returncode == 0 and "rorqual-watchdog" in before and "rorqual-watchdog" not in after, ran.stdout + ran.stderr


IN_THE_STORE = """
import json
from datetime import timedelta
from rorqual.parallel.progress import Progress
from rorqual.parallel.store import Rendezvous
from rorqual.parallel.watchdog import Watchdog
meeting = Rendezvous.from_env(5.0)
Watchdog(meeting, "job", Progress(rank=0), deadline_s=60.0).start()
meeting.connect(5.0).set("job/error", json.dumps({"rank": 1, "step": 3, "error": "KeyError: 'x'"}))
meeting.store.wait(["what nobody writes"], timedelta(seconds=45))
"""


def test_a_rank_that_waits_in_the_store_is_ended_too() -> None:
    """As one that connects: its main thread holds its connection, which the watchdog must not need."""
    begin = time.monotonic()
    ran = run_alone(IN_THE_STORE, 2)
    assert ran.returncode == 1 and time.monotonic() - begin < 30, ran.stderr
    assert "rank 0: stopping because rank 1 failed first, at step 3: KeyError: 'x'" in ran.stderr


NO_CONNECTION = """
import time
from rorqual.parallel.progress import Progress
from rorqual.parallel.store import Rendezvous
from rorqual.parallel.watchdog import Watchdog
meeting = Rendezvous.from_env(5.0)
object.__setattr__(meeting, "port", 1)  # the store of the next connection
Watchdog(meeting, "job", Progress(rank=0), deadline_s=1.0).start()
time.sleep(45)
"""


def test_a_watchdog_that_cannot_connect_ends_its_rank_and_says_why() -> None:
    ran = run_alone(NO_CONNECTION, 1)
    assert ran.returncode == 1 and "Traceback" not in ran.stderr, ran.stderr
    assert "rank 0: stopping because the store on 127.0.0.1:1, run by rank 0, is gone (cannot reach the store" in ran.stderr
