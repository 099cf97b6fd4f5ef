"""Members that are killed, stopped, or hold the store: the others go on, and serve nothing wrong.

RORQUAL_TEST_KILLS says how often members are killed at random points; the default keeps the suite short.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rorqual.attention.kv.directory import Companion, DirectoryBusy, DirectoryFull, DirectoryLimits
from tests.attention.kv.directory.common import QUIET, SHARED, chain, member, publish, right
from tests.attention.kv.directory.worker import turn

KILLS = int(os.environ.get("RORQUAL_TEST_KILLS", "6"))
WORKER = Path(__file__).with_name("worker.py")


def start(folder, mode, seed=0) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(WORKER), str(folder), mode, str(seed)], stdout=subprocess.PIPE, text=True)


@contextlib.contextmanager
def worker(folder, mode, seed=0):
    process = start(folder, mode, seed)
    try:
        assert process.stdout.readline() == "in\n"
        yield process
    finally:
        process.kill()
        process.wait(20)
        process.stdout.close()


def wait_until(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.01)


def test_members_in_other_processes_share_pages(tmp_path):
    with member(tmp_path, SHARED) as one, worker(tmp_path, "turns", 1):
        rng = random.Random(2)
        wait_until(lambda: one.usage().published > 30)
        for _ in range(40):
            turn(one, rng)
        one.check()
    assert one.counts.matched > 20 and one.counts.withdrawn == 0


@pytest.mark.timeout(1200)
def test_kills_at_random_points(tmp_path):
    """Two workers at a time; the survivor's calls stay short, it never sees a wrong byte, and nothing leaks."""
    rng, longest = random.Random(7), 0.0
    with member(tmp_path, SHARED) as one:
        running = [start(tmp_path, "turns", seed) for seed in range(2)]
        for kill in range(KILLS):
            running.append(start(tmp_path, "turns", 10 + kill))
            early = kill % 4 == 3  # while it opens the store
            victim = running.pop(-1 if early else 0)
            assert early or victim.stdout.readline() == "in\n"
            end = time.monotonic() + (rng.uniform(0, 1) if early else rng.uniform(0, 0.08))
            while time.monotonic() < end:
                before = time.monotonic()
                turn(one, rng)
                longest = max(longest, time.monotonic() - before)
            assert victim.poll() is None, f"worker {kill} ended with {victim.returncode}"
            victim.kill()
            victim.wait(20)
            before = time.monotonic()
            turn(one, rng)
            longest = max(longest, time.monotonic() - before)
            if kill % 20 == 0:
                one.check()
        for victim in running:
            victim.kill()
            victim.wait(20)
        time.sleep(QUIET.lease)
        one.renew()
        used = one.usage()
        assert used.members == 1 and used.withdrawn == 0, used
        assert used.owned == len(one._stock.pages()) and used.evictable == used.published and used.n_pages == SHARED.n_pages, used
        one.check()
        for seed in range(24):  # all that is left is right
            hashes = chain(seed, 12)
            assert right(one, hashes, one.match(hashes))
    assert one.counts.withdrawn == 0 and one.counts.busy == 0 and one.counts.reclaimed > 0
    # a turn is a few calls; none may take longer than the lease, however the others die (the rest is this machine's noise)
    print(f"{KILLS} kills, longest turn {longest * 1e3:.0f} ms, {one.counts}")
    assert longest < QUIET.lease + 1.0


def test_pages_of_a_dead_member_come_back_when_its_lease_ends_not_before(tmp_path):
    with member(tmp_path, SHARED) as one, worker(tmp_path, "own") as process:
        assert one.usage().owned == 24
        process.kill()
        process.wait(20)
        killed = time.monotonic()
        one.renew()
        if time.monotonic() - killed < QUIET.lease / 2:
            assert one.usage().owned == 24  # the device may still be writing into them
        wait_until(lambda: one.renew() or one.usage().owned == 0)
        assert one.usage().members == 1
        one.check()


def test_a_short_pool_is_served_from_what_a_dead_member_owned(tmp_path):
    with member(tmp_path, SHARED) as one:
        with worker(tmp_path, "own"):
            mine = one.allocate(136)
            with pytest.raises(DirectoryFull):
                one.allocate(1)
        time.sleep(QUIET.lease + 0.1)
        assert len(one.allocate(24)) == 24  # without a heartbeat in between
        one.release(mine)
        one.check()


def test_published_pages_outlive_their_publisher_and_are_verified(tmp_path):
    with member(tmp_path, SHARED) as one:
        with worker(tmp_path, "turns", 3):
            wait_until(lambda: one.usage().published > 30)
        time.sleep(QUIET.lease + 0.1)
        one.renew()
        matched = sum(len(one.match(chain(seed, 12))) for seed in range(24))
        assert matched > 10 and one.counts.verified == matched
        one.check()


def test_a_stopped_member_keeps_its_pages_beyond_its_lease(tmp_path):
    """It would go on writing when it is continued: only its end frees them."""
    with member(tmp_path, SHARED) as one, worker(tmp_path, "own") as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(QUIET.lease + 0.1)
        one.renew()
        assert one.usage().owned == 24 and one.usage().members == 2
        process.send_signal(signal.SIGCONT)
        one.renew()
        process.kill()
        process.wait(20)
        wait_until(lambda: one.renew() or one.usage().owned == 0)


def test_a_companion_keeps_a_dead_members_pages(tmp_path):
    """Another rank of the dead member's engine may still read and write them."""
    with member(tmp_path, SHARED) as one:
        with worker(tmp_path, "own"):
            beside = Companion(tmp_path / "store", one.member + 1)
        time.sleep(QUIET.lease + 0.1)
        one.renew()
        assert one.usage().owned == 24
        beside.close()
        beside.close()
        one.renew()
        assert one.usage().owned == 0
        with pytest.raises(ValueError, match="member 2 .* is not alive"):
            Companion(tmp_path / "store", 2)
        one.check()


def test_a_member_killed_inside_a_transaction_leaves_no_trace(tmp_path):
    limits = DirectoryLimits(lease=0.3, call=0.1, heartbeat=False)
    with member(tmp_path, SHARED, limits) as one:
        hashes = chain(1, 6)
        pages = publish(one, hashes)
        with worker(tmp_path, "lock") as process:
            before = time.monotonic()
            assert one.match(hashes) == tuple(pages)  # held already: nothing to write
            assert one.lookup(hashes) == 6
            one.release(pages)
            one.release(pages)
            with pytest.raises(DirectoryBusy, match="locked by another process"):
                one.renew()
            assert time.monotonic() - before < 1
            process.kill()
            process.wait(20)
        assert one.match(hashes) == tuple(pages)
        one.check()
