"""What is taken for a store, what is refused, and when one starts empty."""

import os
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from rorqual.attention.kv.directory import DirectoryBusy, DirectoryLayout, DirectoryLimits, remove_unused, schema
from rorqual.attention.kv.directory.host import Deadline, boot_id, boot_ns, file_identity, start_ticks
from rorqual.attention.kv.directory.liveness import LivenessFile
from tests.attention.kv.directory.common import chain, layout, member, publish


@pytest.fixture
def used(tmp_path):
    """A folder whose store holds three published pages and has no members."""
    with member(tmp_path) as a:
        publish(a, chain(1, 3))
    return tmp_path


def refused(folder, match, **changes):
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "pool"}
    with pytest.raises(ValueError, match=match):
        member(folder, **changes)
    for name in ("store", "store-live"):
        if name in before:
            assert (folder / name).read_bytes() == before[name]


@pytest.mark.parametrize(
    "change",
    [{"model": "n"}, {"revision": "r2"}, {"rows": "fp8"}, {"page_size": 8}, {"n_pages": 33}, {"extent_pages": 8}],
    ids=lambda change: next(iter(change)),
)
def test_another_layout(used, change):
    name, value = next(iter(change.items()))
    refused(used, f"another layout: {name} is .*, not {value!r}", made=layout(**change))
    with member(used) as a:
        assert a.lookup(chain(1, 3)) == 3


def test_another_version(used):
    db = sqlite3.connect(used / "store")
    db.execute("PRAGMA user_version = 7")
    db.close()
    refused(used, "version 7, this is version 2")


def test_another_programs_database(tmp_path):
    db = sqlite3.connect(tmp_path / "store")
    db.execute("CREATE TABLE t (x)")
    db.commit()
    db.close()
    refused(tmp_path, "database of another program")


@pytest.mark.parametrize("text", [b"hello", b"x" * 4096, b"SQLite format 3\0"])
def test_something_else(tmp_path, text):
    (tmp_path / "store").write_bytes(text)
    refused(tmp_path, "no prefix directory")


@pytest.mark.parametrize("keep", [4096, 9000, 20000])
def test_a_torn_store(used, keep):
    data = (used / "store").read_bytes()
    assert len(data) > keep
    (used / "store").write_bytes(data[:keep])
    refused(used, "torn")


def test_a_damaged_page(used):
    data = bytearray((used / "store").read_bytes())
    for place in range(4096, len(data), 4096):
        data[place : place + 64] = os.urandom(64)
    (used / "store").write_bytes(data)
    refused(used, "torn")


def test_places_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="No such file or directory; choose a"):
        member_at(tmp_path / "none")
    (tmp_path / "store-live").write_text("notes")
    refused(tmp_path, "holds something else")


def member_at(folder):
    from rorqual.attention.kv.directory import Directory

    return Directory.open(folder / "store", layout(), None, pool_id="p")


def test_a_store_of_an_earlier_boot_starts_empty(used, monkeypatch):
    monkeypatch.setattr(schema, "boot_id", lambda: "another-boot")
    with member(used) as a:
        assert a.lookup(chain(1, 3)) == 0 and a.usage().free == 32
        a.check()
    monkeypatch.undo()
    (used / "store").write_bytes(b"torn by the crash")
    with member(used) as a:  # what is left after a crash of the machine need not even be whole
        assert a.usage().free == 32


def test_a_store_of_an_earlier_pool_starts_empty_unless_it_has_members(used):
    with member(used), pytest.raises(ValueError, match="members of it are running"):
        member(used, pool_id="pool 2")
    with member(used, pool_id="pool 2") as a:
        assert a.lookup(chain(1, 3)) == 0
        a.check()


def test_files_removed_under_members(used):
    with member(used) as a:
        a.allocate(1)
        (used / "store").unlink()
        with pytest.raises(ValueError, match="was removed while members"):
            member(used)
    (used / "store").unlink(missing_ok=True)
    with member(used) as a:
        a.allocate(1)
        os.unlink(used / "store-live")
        with pytest.raises(ValueError, match="nobody knows which members"):
            member(used)
    with member(used) as a:  # nobody was left
        a.check()


def test_an_unfinished_store_is_finished(tmp_path):
    schema._stamp(tmp_path / "store")
    with member(tmp_path) as a:
        a.check()


def test_opening_again_takes_no_lock_from_the_first(used):
    """A process that closes any descriptor of a file loses its locks on it: the store may only be looked at by SQLite."""
    with member(used):
        member(used).close()
        code = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('PRAGMA journal_mode = DELETE')"
        run = subprocess.run([sys.executable, "-c", code, str(used / "store")], capture_output=True, text=True, timeout=60)
        assert "database is locked" in run.stderr  # it needs the store for itself


def test_two_do_not_make_it_at_once(tmp_path):
    live = LivenessFile.opening(tmp_path / "store-live", Deadline(1))
    with pytest.raises(DirectoryBusy, match="has been opening"):
        member(tmp_path, limits=DirectoryLimits(opening=0.05))
    assert not remove_unused(tmp_path / "store", 0.05)
    live.end_opening()
    with member(tmp_path):
        pass


def test_what_nobody_uses_can_be_removed(used):
    with member(used):
        assert not remove_unused(used / "store")
    assert remove_unused(used / "store")
    assert [path.name for path in used.iterdir()] == ["pool"]
    assert remove_unused(used / "store")


def test_one_who_waited_for_a_removed_lock_file_takes_the_new_one(tmp_path):
    path = tmp_path / "store-live"
    first = LivenessFile.opening(path, Deadline(1))
    got = []
    thread = threading.Thread(target=lambda: got.append(LivenessFile.opening(path, Deadline(5))))
    thread.start()
    time.sleep(0.05)
    path.unlink()
    first.close()
    thread.join(5)
    assert got[0]._linked()
    got[0].close()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"page_size": 0}, "page_size 0"),
        ({"n_pages": 0}, "got 0"),
        ({"extent_pages": 0}, "1 to 4096 pages, got 0"),
        ({"model": ""}, "model is empty"),
        ({"checksum": "md5"}, "unknown page checksum"),
    ],
)
def test_layouts_that_make_no_sense(change, match):
    with pytest.raises(ValueError, match=match):
        layout(**change)


def test_limits():
    with pytest.raises(ValueError, match="lease limit is 0 s"):
        DirectoryLimits(lease=0)


def test_a_layout_makes_its_hashes():
    made = DirectoryLayout(model="m", revision="r", rows="fp8", page_size=64, n_pages=10)
    assert made.n_extents == 1 and made.hasher().root != made.hasher("tenant").root


def test_the_hosts_own_clock_and_names():
    assert boot_ns() <= boot_ns() and len(boot_id()) == 36
    assert file_identity("/proc") == file_identity("/proc/") != file_identity("/")
    assert start_ticks(os.getpid()) > 0 and start_ticks(1 << 30) == 0
