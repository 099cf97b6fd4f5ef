"""Pools on private memory and files: layout, sizes, views, the end; and refusals before anything is allocated."""

from __future__ import annotations

import gc
import os
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rorqual.attention.kv.host import header as headers
from rorqual.attention.kv.host import pool as pools
from rorqual.attention.kv.host import room, shm
from rorqual.attention.kv.host.choose import HostPlace, choose_backing
from rorqual.attention.kv.host.cxl import CxlBacking, interleave
from rorqual.attention.kv.host.file import FileBacking
from rorqual.attention.kv.host.layout import HEADER_BYTES, HostLayout, host_pool_bytes
from rorqual.attention.kv.host.pinned import PinnedBacking
from rorqual.attention.kv.host.pool import HostPool
from rorqual.attention.kv.host.pool_file import PREFIX
from rorqual.attention.kv.host.register import chunks
from rorqual.attention.kv.host.shm import ShmBacking
from rorqual.attention.kv.host.system import BLOCK, in_memory
from rorqual.attention.kv.host.throttle import Throttle
from rorqual.attention.kv.tier import HostRows
from tests.memory import own_bytes

SIZES = {"layers": 3, "n_pages": 10, "page_size": 4, "row_bytes": 40}


def backing(kind, folder):
    if kind == "cxl":
        return CxlBacking(regions=("stand-in",))
    if kind == "devices":
        return CxlBacking(regions=devices(folder, 3, 4))
    return {
        "pinned": PinnedBacking(threads=2),
        "shm": ShmBacking(job="one", folder=folder),
        "file": FileBacking(path=folder / "pool"),
    }[kind]


def devices(folder, count, n_blocks):
    """Files of whole blocks that stand in for DAX devices."""
    names = [str(folder / f"dax{index}.0") for index in range(count)]
    for name in names:
        with open(name, "wb") as file:
            file.truncate(n_blocks * BLOCK)
    return tuple(names)


@pytest.mark.parametrize("kind", ["pinned", "shm", "file", "cxl", "devices"])
def test_layers_are_views_of_the_pool_of_the_planned_size(kind, tmp_path):
    with HostPool(**SIZES, backing=backing(kind, tmp_path), index_page_bytes=(96, 0, 32)) as pool:
        assert pool.n_bytes == host_pool_bytes(3, 10, 4, 40, index_page_bytes=(96, 0, 32), kind=pool.kind)
        assert pool.about and pool.n_layers == 3
        for index in range(3):
            layer: HostRows = pool.layer(index)
            assert layer.bytes.shape == (40, 48) and layer.n_rows == 40 and (layer.row_bytes, layer.pitch) == (40, 48)
            assert layer.data_ptr() % BLOCK == 0 and layer.bytes.data_ptr() == layer.data_ptr() and not layer.bytes.any()
            assert pool.layer(index).index_pages.data_ptr() == pool.layer(index).index_data_ptr() or index == 1
            layer.bytes.fill_(index + 1)
            pool.layer(index).index_pages.fill_(index + 11)
        for index in range(3):
            assert (pool.layer(index).bytes == index + 1).all() and (pool.layer(index).index_pages == index + 11).all()
        assert [tuple(pool.layer(index).index_pages.shape) for index in range(3)] == [(10, 96), (10, 0), (10, 32)]
    pool.close()
    assert pool.closed
    with pytest.raises(ValueError, match="closed"):
        _ = pool.layer(0).bytes


def test_poison():
    with HostPool(**SIZES, backing=PinnedBacking(), index_page_bytes=(16, 16, 16)) as pool:
        pool.poison([1, 9])
        for index in range(3):
            by_page = pool.layer(index).bytes.view(10, -1)
            assert (by_page[[1, 9]] == 255).all() and not by_page[[0, 2, 8]].any()
            assert (pool.layer(index).index_pages[[1, 9]] == 255).all() and not pool.layer(index).index_pages[0].any()
        pool.poison()
        assert all((pool.layer(index).bytes == 255).all() and (pool.layer(index).index_pages == 255).all() for index in range(3))


def test_memory_returns_when_a_pool_is_closed_though_a_view_lives(tmp_path):
    pool = HostPool(2, 1000, 64, 656, PinnedBacking(threads=2))

    before, view = own_bytes(), pool.layer(0).bytes
    pool.close()
    assert before - own_bytes() > 60 << 20 and view.shape == (64000, 656)


def test_memory_lives_as_long_as_anything_over_it(tmp_path):
    path, closed = tmp_path / "pool", []
    pool = HostPool(**SIZES, backing=FileBacking(path=path, job="a"))
    pool._region.after_end.append(lambda: closed.append(True))
    rows = pool.layer(1).bytes
    del pool
    gc.collect()
    rows.fill_(4)
    assert not closed and rows.sum() == 40 * 48 * 4
    del rows
    gc.collect()
    assert closed == [True]
    HostPool(**SIZES, backing=FileBacking(path=path, job="b")).close()


def test_rows_behind_2_to_the_31_bytes(tmp_path):
    path = tmp_path / "dax0.0"
    with open(path, "wb") as file:
        file.truncate(6 << 30)  # a sparse file: only what is written takes room
    with HostPool(2, 4, 1 << 20, 656, CxlBacking(regions=(str(path),))) as pool:
        last = pool.layer(1)
        last.bytes[last.n_rows - 1].fill_(7)
        assert last.data_ptr() - pool.layer(0).data_ptr() == pool.layout.offsets[1] > 1 << 31
        assert last.bytes[-1, -1] == 7 and last.bytes[-2, -1] == 0


def test_registrations_hold_whole_layers():
    edges = [0, 3, 6, 9, 30, 31]
    assert chunks(edges, 6) == [(0, 6), (6, 3), (9, 21), (30, 1)]
    assert chunks(edges, 1) == [(0, 3), (3, 3), (6, 3), (9, 21), (30, 1)]
    assert chunks(edges, 100) == [(0, 31)] and chunks([5, 7]) == [(5, 2)]


def test_a_failed_registration_leaves_nothing(monkeypatch, tmp_path):
    def refuse(*_):
        raise ValueError("no")

    monkeypatch.setattr(pools, "register", refuse)
    with pytest.raises(ValueError, match="no"):
        HostPool(**SIZES, backing=ShmBacking(job="one", folder=tmp_path), device="cuda")
    assert list(tmp_path.iterdir()) == []
    HostPool(**SIZES, backing=ShmBacking(job="one", folder=tmp_path)).close()


@pytest.mark.parametrize("memory", [True, False])
def test_a_shared_pool_on_a_disk_is_warned_of_once(memory, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shm, "in_memory", lambda folder: memory)
    with caplog.at_level("WARNING", logger="rorqual"):
        both = [HostPool(**SIZES, backing=ShmBacking(job="one", folder=tmp_path, member=i, members=2)) for i in range(2)]
    for pool in both:
        pool.close()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (not memory) and all(f"{tmp_path} is not a file system in memory" in text for text in told)


def test_file_systems_in_memory_are_known_by_their_kind(tmp_path):
    assert in_memory(Path("/dev/shm")) and not in_memory(Path("/proc"))
    with pytest.raises(OSError, match="nothing"):
        in_memory(tmp_path / "nothing")


@pytest.mark.parametrize("kind", ["pinned", "shm", "file", "cxl"])
def test_a_pool_too_large_for_the_machine_is_refused_first(kind, tmp_path):
    with pytest.raises(ValueError, match=r"does not fit"):
        HostPool(61, 1 << 24, 64, 656, backing(kind, tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_memory_that_was_stated_counts_instead_of_what_is_seen(monkeypatch):
    monkeypatch.setattr(room, "available_bytes", lambda root: 1 << 20)
    with pytest.raises(ValueError, match="is available to this process"):
        HostPool(**SIZES, backing=PinnedBacking())
    HostPool(**SIZES, backing=PinnedBacking(host_memory=1 << 30)).close()
    with pytest.raises(ValueError, match="was stated"):
        HostPool(**SIZES, backing=PinnedBacking(host_memory=8 << 20, ranks_here=2))


def test_a_node_that_is_not_there():
    with pytest.raises(ValueError, match="no NUMA node 77 here"):
        HostPool(**SIZES, backing=PinnedBacking(nodes=(77,)))
    with pytest.raises(ValueError, match="NUMA nodes"):
        HostPool(**SIZES, backing=PinnedBacking(nodes=(77,), host_memory=1 << 40))


def test_node_0_as_a_stand_in_for_cxl_says_so():
    with HostPool(**SIZES, backing=CxlBacking(regions=("node0",), throttle_gb_per_s=12.5)) as pool:
        assert pool.about == "CXL memory on NUMA node 0; stand-in for CXL: node 0 has CPUs, copies throttled to 12.5 GB/s"
        assert pool.throttle and pool.throttle.gb_per_s == 12.5


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ((), "one or more different regions"),
        (("node0", "node0"), "one or more different"),
        (("node0", "/dev/dax0.0"), "name one sort"),
        (("node0", "stand-in"), "name it alone"),
        (("node99",), "no CXL region 'node99'"),
        (("/dev/no-such-dax",), "cannot be opened: No such file"),
    ],
)
def test_wrong_cxl_regions(regions, message):
    with pytest.raises(ValueError, match=message):
        HostPool(**SIZES, backing=CxlBacking(regions=regions))


def test_blocks_go_to_devices_in_turns(tmp_path):
    names = devices(tmp_path, 3, 3)
    with HostPool(1, 8, 1, BLOCK, CxlBacking(regions=names)) as pool:
        pool.layer(0).bytes[:] = torch.arange(1, 9, dtype=torch.uint8)[:, None]
    found = [(tmp_path / f"dax{index}.0").read_bytes()[:: 1 << 20] for index in range(3)]
    assert found == [bytes((1, 1, 4, 4, 7, 7)), bytes((2, 2, 5, 5, 8, 8)), bytes((3, 3, 6, 6, 0, 0))]
    assert list(interleave(10, 2, 4)) == [(0, 4, 0, 0), (4, 4, 1, 0), (8, 2, 0, 4)] and list(interleave(10, 1)) == [(0, 10, 0, 0)]


def test_devices_that_are_too_small_or_taken(tmp_path):
    names = devices(tmp_path, 2, 2)
    with pytest.raises(ValueError, match=r"would lie on .*dax0.0, which has 0.00 GiB"):
        HostPool(1, 8, 1, BLOCK, CxlBacking(regions=names))
    with HostPool(1, 4, 1, BLOCK, CxlBacking(regions=names)):
        with pytest.raises(ValueError, match="locked by another process"):
            HostPool(1, 2, 1, BLOCK, CxlBacking(regions=names[1:]))
    HostPool(1, 2, 1, BLOCK, CxlBacking(regions=names[1:])).close()


def test_a_device_is_for_one_rank(tmp_path):
    names = devices(tmp_path, 2, 2)
    with pytest.raises(ValueError, match=r"2 ranks of this same job .* backing shm, path @node2"):
        HostPool(1, 2, 1, BLOCK, CxlBacking(regions=names, ranks_here=2))


def test_pools_without_a_size_take_what_there_is(tmp_path, monkeypatch):
    """Half of the memory, less where the folder, or the devices, have less."""
    monkeypatch.setattr(room, "available_bytes", lambda root: 80 * BLOCK)
    free = [100 * BLOCK]
    monkeypatch.setattr(room, "_free_bytes", lambda folder: free[0])
    shm, file = ShmBacking(job="j", folder=tmp_path), FileBacking(path=tmp_path / "pool")
    assert shm.room(0.5) == file.room(0.5) == 40 * BLOCK
    assert PinnedBacking(ranks_here=4).room(0.5) == CxlBacking(regions=("stand-in",), ranks_here=4).room(0.5) == 10 * BLOCK
    free[0] = 20 * BLOCK
    for backing in (shm, file):
        assert backing.room(0.5) == 19 * BLOCK - HEADER_BYTES
        with HostPool(1, backing.room(0.5) // BLOCK, 1, BLOCK, backing) as pool:
            assert pool.n_bytes <= free[0]
    assert CxlBacking(regions=devices(tmp_path, 2, 3)).room(0.5) == 6 * BLOCK
    assert CxlBacking(regions=("/dev/no-such-dax",)).room(0.5) == BLOCK  # and is refused when it is opened
    assert ShmBacking(job="j", folder=tmp_path / "none").room(0.5) == 40 * BLOCK


def test_nothing_is_checked_again_once_the_first_may_have_touched_its_memory(monkeypatch):
    """Four ranks of a quarter each: what the fast ones took already must not count against the slow ones."""
    each = host_pool_bytes(*SIZES.values())
    monkeypatch.setattr(room, "available_bytes", lambda root: 5 * each)
    ranks = [PinnedBacking(ranks_here=4) for _ in range(4)]
    pools = []
    for backing in ranks:
        backing.check(HostLayout(n_layers=3, **{name: size for name, size in SIZES.items() if name != "layers"}))
    for place, backing in enumerate(ranks):
        monkeypatch.setattr(room, "available_bytes", lambda root, place=place: (5 - place) * each)
        pools.append(HostPool(**SIZES, backing=backing, checked=True))
    for pool in pools:
        pool.close()


def test_throttle():
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(round(seconds, 9))
        now[0] += seconds

    link = Throttle(2.0, lambda: now[0], sleep)
    link.wait(2_000_000_000)
    link.wait(1_000_000_000)
    now[0] += 5
    link.wait(0)
    assert slept == [1.0, 0.5]
    with pytest.raises(ValueError, match="above 0"):
        Throttle(0)


class TestFiles:
    def test_contents_are_found_again(self, tmp_path):
        path = tmp_path / "pool"
        with HostPool(**SIZES, backing=FileBacking(path=path), model="m") as pool:
            assert not pool.found
            pool.layer(2).bytes.fill_(3)
        assert path.stat().st_size == pool.n_bytes and path.stat().st_mode & 0o777 == 0o600
        with HostPool(**SIZES, backing=FileBacking(path=path), model="m") as pool:
            assert pool.found and (pool.layer(2).bytes == 3).all() and not pool.layer(1).bytes.any()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model": "other"}, r"another model \('m', this one is 'other'\)"),
            ({"n_pages": 11}, r"another layout \(n_pages is 10, not 11\)"),
            ({"row_bytes": 41}, r"another layout \(row_bytes is 40, not 41\)"),
            ({"index_page_bytes": (16, 16, 16)}, r"another layout \(index_page_bytes is \[\], not \[16, 16, 16\]\)"),
        ],
    )
    def test_a_file_of_something_else_is_refused_and_kept(self, tmp_path, changes, message):
        path = tmp_path / "pool"
        HostPool(**SIZES, backing=FileBacking(path=path), model="m").close()
        before = path.read_bytes()
        with pytest.raises(ValueError, match=message):
            HostPool(**({**SIZES, "model": "m"} | changes), backing=FileBacking(path=path))
        assert path.read_bytes() == before

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda data: b"x" * len(data), "no host pool file; name another path"),
            (lambda data: b"hello", "no host pool file; name another path"),
            (lambda data: bytes(8) + data[8:], "never finished; remove it"),
            (lambda data: data[:4], "never finished; remove it"),
            (lambda data: data[:8] + struct.pack("<I", 99) + data[12:], "version 99, this program writes version 1; remove it"),
            (lambda data: data[:60] + b"?" + data[61:], "checksum.*remove it"),
            (lambda data: data[:-4096], "its header says.*remove it"),
        ],
    )
    def test_a_damaged_file_is_refused(self, tmp_path, damage, message):
        path = tmp_path / "pool"
        HostPool(**SIZES, backing=FileBacking(path=path)).close()
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(ValueError, match=message):
            HostPool(**SIZES, backing=FileBacking(path=path))

    def test_an_empty_file_is_made_a_pool(self, tmp_path):
        (tmp_path / "pool").touch()
        HostPool(**SIZES, backing=FileBacking(path=tmp_path / "pool")).close()

    def test_one_job_at_a_time_unless_it_is_shared(self, tmp_path):
        def make(name, job):
            return HostPool(**SIZES, backing=FileBacking(path=tmp_path / name, job=job))

        with make("pool", "a") as first, make("pool", "a") as second:
            first.layer(0).bytes.fill_(5)
            assert (second.layer(0).bytes == 5).all()
            for job in ("b", ""):
                with pytest.raises(ValueError, match=r"in use by another job \(a\)"):
                    make("pool", job)
        with make("pool", "b") as found:
            assert found.found
        with make("open", ""), make("open", ""):
            pass

    def test_paths_that_cannot_be(self, tmp_path):
        for name, message in (("none/pool", "no such folder"), (".", "Is a directory"), (PREFIX + "x", "names that start")):
            with pytest.raises(ValueError, match=message):
                HostPool(**SIZES, backing=FileBacking(path=tmp_path / name))
        (tmp_path / "pool").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match="cannot be opened"):
            HostPool(**SIZES, backing=FileBacking(path=tmp_path / "pool"))

    def test_waiting_for_a_file_that_is_being_made_has_an_end(self, tmp_path):
        import fcntl

        path = tmp_path / "pool"
        with open(path, "wb") as maker:
            fcntl.flock(maker, fcntl.LOCK_EX)
            with pytest.raises(ValueError, match=r"making this host pool file for 0 s"):
                HostPool(**SIZES, backing=FileBacking(path=path, deadline_s=0.1))


RANK = """
import os, signal, sys, time
from pathlib import Path
from rorqual.attention.kv.host.pool import HostPool
from rorqual.attention.kv.host.shm import ShmBacking
folder, member, members, end = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
pool = HostPool(2, 4, 4, 48, ShmBacking(job="j", folder=folder, member=member, members=members, deadline_s=60), model="m")
rows = pool.layer(1).bytes
rows[member].fill_(member + 1)
print("joined", flush=True)
sys.stdin.readline()
print(*rows[:members, 5].tolist(), flush=True)
sys.stdin.readline()
"""


def rank(folder, member, members):
    arguments = [sys.executable, "-c", RANK, str(folder), str(member), str(members), "wait"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


class TestSharedMemory:
    def test_ranks_share_one_file_and_nothing_stays_when_all_are_killed(self, tmp_path):
        ranks = [rank(tmp_path, member, 2) for member in range(2)]
        try:
            assert [process.stdout.readline() for process in ranks] == ["joined\n"] * 2
            assert list(tmp_path.iterdir()) == []
            for process in ranks:
                process.stdin.write("\n")
                process.stdin.flush()
            assert [process.stdout.readline() for process in ranks] == ["1 2\n"] * 2
        finally:
            for process in ranks:
                process.kill()
                process.communicate(timeout=20)
        assert list(tmp_path.iterdir()) == []

    def test_what_a_killed_start_left_is_removed_by_the_next(self, tmp_path):
        lonely = rank(tmp_path, 0, 2)
        assert lonely.stdout.readline() == "joined\n"
        (left,) = tmp_path.iterdir()
        other = HostPool(**SIZES, backing=ShmBacking(job="other", folder=tmp_path))
        assert list(tmp_path.iterdir()) == [left]  # it is alive: its file stays
        lonely.kill()
        lonely.communicate(timeout=20)
        assert list(tmp_path.iterdir()) == [left]
        HostPool(**SIZES, backing=ShmBacking(job="third", folder=tmp_path)).close()
        assert list(tmp_path.iterdir()) == []
        other.close()

    def test_members_killed_at_random_never_leave_a_file_that_stays_or_misleads(self, tmp_path):
        arguments = [sys.executable, str(Path(__file__).with_name("kill_members.py")), str(tmp_path), "24"]
        ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert ended.stdout == "done\n", ended.stdout + ended.stderr

    def test_the_same_job_again_starts_from_zero(self, tmp_path):
        first = HostPool(**SIZES, backing=ShmBacking(job="j", folder=tmp_path, members=2))
        first.layer(0).bytes.fill_(1)
        first.close()
        assert len(list(tmp_path.iterdir())) == 1
        again = HostPool(**SIZES, backing=ShmBacking(job="j", folder=tmp_path, members=2))
        assert not again.layer(0).bytes.any()
        again.close()

    def test_many_threads_join_at_once(self, tmp_path):
        members, seen = 8, []

        def join(member):
            pool = HostPool(**SIZES, backing=ShmBacking(job="j", folder=tmp_path, member=member, members=members))
            pool.layer(0).bytes[member].fill_(1)
            deadline = time.monotonic() + 20
            while not pool.layer(0).bytes[:members].all() and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(bool(pool.layer(0).bytes[:members].all()))
            pool.close()

        threads = [threading.Thread(target=join, args=(member,)) for member in range(members)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert seen == [True] * members and list(tmp_path.iterdir()) == []

    def test_ranks_that_disagree(self, tmp_path):
        pool = HostPool(**SIZES, backing=ShmBacking(job="j", folder=tmp_path, members=2))
        with pytest.raises(ValueError, match="another layout"):
            HostPool(**(SIZES | {"page_size": 8}), backing=ShmBacking(job="j", folder=tmp_path, member=1, members=2))
        pool.close()
        with pytest.raises(ValueError, match="member < members"):
            HostPool(**SIZES, backing=ShmBacking(job="j", folder=tmp_path, member=2, members=2))


def test_header_marks_do_not_touch_the_rows():
    assert headers._MARKS + headers.MOST_MEMBERS <= HEADER_BYTES


def test_names_of_backings():
    place = HostPlace(job="j", member=1, members=4, gpu_node=2, host_memory=99)
    assert choose_backing("pinned", place) == PinnedBacking(nodes=(2,), host_memory=99, ranks_here=4)
    assert choose_backing("shm", place) == ShmBacking(job="j", member=1, members=4, host_memory=99)
    assert choose_backing("shm:/x", place).folder.name == "x"
    assert choose_backing("file:/x/y", place) == FileBacking(path=Path("/x/y"), job="j", host_memory=99)
    assert choose_backing("cxl:node1,node2@12.5", place) == CxlBacking(
        regions=("node1", "node2"), throttle_gb_per_s=12.5, host_memory=99, ranks_here=4
    )
    assert choose_backing("pinned", replace(place, node_members=2)).ranks_on_nodes == 2
    assert choose_backing("shm:/x@node2,node3", place).nodes == (2, 3) and choose_backing("shm:@node4", place).nodes == (4,)
    for wrong in ("", "hbm", "file:", "cxl", "pinned:x", "cxl:node1@fast", "shm:/x@far"):
        with pytest.raises(ValueError, match="unknown backing|must be a number|are written node2,node3"):
            choose_backing(wrong, place)
