"""Three members of a shared pool, killed at random moments, again and again; run as a program so that it forks alone."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from rorqual.attention.kv.host.pool import HostPool
from rorqual.attention.kv.host.shm import ShmBacking

MEMBERS, DEADLINE_S = 3, 20.0


def member(number: int, job: str, folder: Path, pipe: int) -> None:
    """Join, check that the memory is new, write; say so; wait to be killed."""
    try:
        backing = ShmBacking(job=job, member=number, members=MEMBERS, folder=folder, threads=1, deadline_s=DEADLINE_S)
        rows = HostPool(2, 8, 4, 48, backing, model="m").layer(0).bytes
        assert not rows[number].any()
        rows[number].fill_(number + 1)
        until = time.monotonic() + DEADLINE_S
        while not rows[:MEMBERS].all() and time.monotonic() < until:
            time.sleep(0.002)
        os.write(pipe, b"c" if rows[:MEMBERS].all() else b"E")
        signal.pause()
    except BaseException as error:
        os.write(pipe, b"E")
        print(number, repr(error), flush=True)
    os._exit(1)


def attempt(job: str, folder: Path, patience_s: float | None, rng: random.Random) -> bytes:
    """Start all members, kill them after ``patience_s`` or (None) when all have joined; what they said."""
    reading, writing = os.pipe()
    children = []
    for number in range(MEMBERS):
        child = os.fork()
        if child == 0:
            member(number, job, folder, writing)
        children.append(child)
    said = b""
    if patience_s is None:
        while len(said) < MEMBERS and b"E" not in said:
            said += os.read(reading, 100)
        assert not list(folder.iterdir()), "all have joined: the file has no name"
    else:
        time.sleep(patience_s)
    for child in rng.sample(children, MEMBERS):
        os.kill(child, signal.SIGKILL)
        time.sleep(rng.random() * 0.002)
    for child in children:
        os.waitpid(child, 0)
    os.close(writing)
    said += os.read(reading, 100)
    os.close(reading)
    return said


def main(folder: Path, attempts: int) -> None:
    rng = random.Random(3)
    for index in range(attempts):
        whole = index % 4 == 3
        said = attempt("j" if index % 3 else f"j{index}", folder, None if whole else rng.random() * 0.03, rng)
        assert b"E" not in said and (not whole or said == b"c" * MEMBERS), said
    HostPool(1, 1, 1, 16, ShmBacking(job="last", folder=folder)).close()
    assert not list(folder.iterdir())
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
