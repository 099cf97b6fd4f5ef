"""Two members in one process: what one publishes, the other takes; what is wrong is never served."""

import os
import threading
import time

import numpy as np
import pytest

from rorqual.attention.kv.directory import DirectoryBusy, DirectoryError, DirectoryFull, DirectoryLimits, MemberLost
from rorqual.attention.kv.directory.hashing import split_hashes
from rorqual.attention.kv.directory.host import Deadline
from tests.attention.kv.directory.common import chain, content_of, layout, member, publish, right


@pytest.fixture
def pair(tmp_path):
    with member(tmp_path) as a, member(tmp_path) as b:
        yield a, b


def check(*members):
    for one in members:
        one.check()


def test_a_prefix_computed_by_one_is_a_hit_for_the_other(pair):
    a, b = pair
    hashes = chain(1, 6)
    pages = publish(a, hashes[:4])
    assert b.lookup(hashes) == 4
    assert b.match(hashes) == tuple(pages) and right(b, hashes, pages)
    assert b.counts.verified == 4 and b.counts.asked == 6 and b.counts.matched == 4
    b.release(pages)
    assert b.match(hashes) == tuple(pages) and b.counts.verified == 4  # their bytes cannot have changed
    assert a.match(hashes) == tuple(pages)  # the publisher may find its own
    check(a, b)


def test_only_the_leading_part_of_a_chain_is_found(pair):
    a, b = pair
    hashes = chain(1, 5)
    publish(a, hashes[:2])
    publish(a, hashes[3:], first=3)
    assert b.lookup(hashes) == len(b.match(hashes)) == 2
    assert b.match(hashes[1:3]) and not b.match(hashes[2:]) and b.match([]) == ()
    assert b.match(chain(2, 5)) == ()


def test_a_hash_that_is_there_keeps_its_page(pair):
    a, b = pair
    hashes = chain(1, 3)
    first = publish(a, hashes[:2])
    mine = b.allocate(3)
    sums = b.checksums(hashes, mine)
    assert b.publish(hashes, mine, sums) == (False, False, True)
    assert a.match(hashes[:2]) == tuple(first)
    b.release(mine)  # two were still to write, one was held
    b.renew()
    check(a, b)
    assert a.usage().published == 3


def test_a_wrong_byte_withdraws_the_page_for_everybody(pair):
    a, b = pair
    hashes = chain(1, 4)
    pages = publish(a, hashes)
    a.pool.bytes[1, pages[2], 77] ^= 4
    assert b.match(hashes) == tuple(pages[:2])
    assert b.counts.withdrawn == 1 and b.lookup(hashes) == 2 and a.lookup(hashes) == 2
    check(a, b)
    assert a.usage().withdrawn == 1
    a.release(pages)  # its publisher still had it
    for one in (a, b):
        one.renew()
    assert a.usage().withdrawn == 0
    assert a.publish(hashes[2:3], a.allocate(1), (5,)) == (True,)  # the hash is free for a right page
    check(a, b)


def test_a_published_page_of_wrong_identity_is_not_served(pair):
    """Right bytes of another hash: the checksum covers the hash."""
    a, b = pair
    hashes = chain(1, 2)
    pages = a.allocate(2)
    for page, one in zip(pages, hashes, strict=True):
        a.pool.write(page, content_of(one))
    sums = a.checksums(hashes, pages)
    a.publish(hashes[::-1], pages, sums)
    assert b.match(hashes[::-1]) == () and b.counts.withdrawn == 1


def test_held_pages_are_never_evicted_and_others_go_in_order_of_use(tmp_path):
    made = layout(n_pages=12)
    with member(tmp_path, made) as a, member(tmp_path, made) as b:
        old, held, new = chain(1, 4), chain(2, 4), chain(3, 4)
        kept = [publish(a, hashes) for hashes in (old, held, new)]
        assert b.match(held) == tuple(kept[1])
        a.release([page for pages in kept for page in pages])
        a.renew()
        assert b.usage().evictable == 8
        assert b.allocate(1) == (kept[0][3],)  # the end of the chain unused for longest
        assert b.lookup(old) == 3 and b.lookup(new) == 4
        b.allocate(7)
        assert b.lookup(old) == b.lookup(new) == 0 and b.lookup(held) == 4
        with pytest.raises(DirectoryFull, match="1 host pages are needed, 0 of 12"):
            b.allocate(1)
        assert right(b, held, kept[1])
        check(a, b)


def test_own_released_pages_are_had_back_without_a_heartbeat(tmp_path):
    made = layout(n_pages=8)
    with member(tmp_path, made) as a:
        for seed in range(5):
            a.release(publish(a, chain(seed, 8)))
        check(a)


def test_a_page_recycled_between_lookup_and_acquire_is_not_taken(tmp_path):
    made = layout(n_pages=4)
    with member(tmp_path, made) as a, member(tmp_path, made) as b:
        hashes = chain(1, 4)
        a.release(publish(a, hashes))
        a.renew()
        halves = split_hashes(hashes)
        found = b._store.lookup(halves[:, 0], Deadline(1))
        assert len(found) == 4
        publish(a, chain(2, 2))  # evicts the last two
        assert len(b._store.acquire(b.member, found, halves, Deadline(1))) == 2
        b._store.drop(b.member, [page for _, page, _ in found[:2]], Deadline(1))
        check(a, b)


def test_not_even_if_it_holds_the_same_hash_again(tmp_path):
    made = layout(n_pages=4)
    with member(tmp_path, made) as a, member(tmp_path, made) as b:
        hashes, halves = chain(1, 4), split_hashes(chain(1, 4))
        a.release(publish(a, hashes))
        a.renew()
        found = b._store.lookup(halves[:, 0], Deadline(1))
        a.release(publish(a, chain(2, 4)))
        a.renew()
        a.release(publish(a, hashes))
        again = b._store.lookup(halves[:, 0], Deadline(1))
        assert len(again) == 4 and not set(again) & set(found)
        assert b._store.acquire(b.member, found, halves, Deadline(1)) == []
        assert len(b.match(hashes)) == 4
        check(a, b)


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        ("UPDATE pages SET refs = refs + 1 WHERE page = 0", "page 0 has 2 references, 1 members hold it"),
        ("INSERT INTO holds VALUES (99, 0)", "page 0 is held by member 99, who is not there"),
        ("INSERT INTO holds VALUES (1, 99)", "page 99 is held by member 1, but is not in the pool"),
        ("UPDATE pages SET owner = 99 WHERE page = 3", "page 3 is owned by member 99, who is not there"),
        ("UPDATE extents SET free = 2 WHERE extent = 1", "extent 1 counts 2 free pages, it has 4"),
        ("UPDATE pages SET key = (SELECT key FROM pages WHERE page = 0) WHERE page = 1", "2 pages have hash"),
        ("DELETE FROM pages WHERE page = 31", "there are 31 pages, not 32"),
        ("UPDATE pages SET state = 0, owner = NULL WHERE page = 3", r"member 1 owns \[3\] only for itself, \[\] only in the store"),
        ("DELETE FROM holds WHERE page = 1", r"member 1 holds \[1\] only for itself"),
    ],
)
def test_check_sees_what_is_wrong(tmp_path, damage, finding):
    with member(tmp_path) as a:
        publish(a, chain(1, 2))
        a.check()
        with a._store.connection.transaction(Deadline(1)) as db:
            db.execute(damage)
        with pytest.raises(AssertionError, match=finding):
            a.check()


def test_the_second_half_of_a_hash_counts(pair):
    a, b = pair
    hashes = chain(1, 1)
    publish(a, hashes)
    for one in (a, b, b):  # one that holds the page, one that does not, and does then
        assert one.match([hashes[0][:8] + b"12345678"]) == ()
        assert one.match(hashes)


def test_pages_of_a_request_lie_side_by_side(pair):
    a, b = pair
    first = a.allocate(3)
    other = b.allocate(4)
    assert list(first) == [0, 1, 2] and list(other) == [4, 5, 6, 7]
    assert a.allocate(1, after=first[-1]) == (3,)
    assert a.allocate(6, after=other[-1]) == tuple(range(8, 14))  # the extent behind it
    check(a, b)


def test_most_allocations_need_no_transaction(tmp_path):
    with member(tmp_path, layout(n_pages=128, extent_pages=64)) as a:
        a.allocate(1)
        a._store.connection.close()
        assert len(a.allocate(63)) == 63


def test_calls_are_few_statements_of_the_store(pair):
    a, b = pair
    hashes = chain(1, 12)
    said: list[str] = []
    for one in pair:
        one._store.connection._db.set_trace_callback(said.append)

    def statements(call, *args):
        said.clear()
        call(*args)
        return [text for text in said if not text.startswith("--")]

    publish(a, hashes)
    (only,) = statements(b.lookup, hashes)
    assert only.startswith("SELECT key")
    assert statements(b.lookup, chain(2, 12)) and statements(b.match, chain(2, 12))[0].startswith("SELECT") and len(said) == 1
    b.match(hashes)
    assert len(statements(b.match, hashes)) == 1  # held already
    assert statements(a.release, a.allocate(0)) == []


def test_spare_pages_go_back(pair):
    a, b = pair
    a.release(a.allocate(32))
    with pytest.raises(DirectoryFull):
        b.allocate(1)
    a.renew()
    assert len(b.allocate(24)) == 24  # all but two extents
    check(a, b)


def test_spare_pages_that_cannot_go_back_stay(pair, monkeypatch):
    a, _ = pair
    a.release(a.allocate(20))
    with monkeypatch.context() as patch, pytest.raises(DirectoryBusy):
        patch.setattr(a._store, "give_back", lambda *_: (_ for _ in ()).throw(DirectoryBusy("locked")))
        a.renew()
    check(a)
    assert len(a.allocate(20)) == 20


def test_close_gives_everything_back_but_what_is_published(tmp_path):
    with member(tmp_path) as b:
        hashes = chain(1, 3)
        with member(tmp_path) as a:
            publish(a, hashes)
            a.allocate(7)
        used = b.usage()
        assert (used.free, used.owned, used.published, used.evictable, used.members) == (29, 0, 3, 3, 1)
        assert len(b.match(hashes)) == 3
        check(b)
        a.close()
        with pytest.raises(ValueError, match="closed"):
            a.allocate(1)
    with member(tmp_path) as c:
        assert len(c.match(hashes)) == 3  # the store outlives all its members


def test_misuse_is_noticed_and_changes_nothing(pair):
    a, b = pair
    hashes = chain(1, 2)
    pages = publish(a, hashes)
    b.match(hashes)
    b.release(pages)
    for wrong in (pages, [31]):
        with pytest.raises(AssertionError, match="released more often"):
            b.release(wrong)
    with pytest.raises(AssertionError, match="not the member's to write"):
        b.publish(hashes, pages, (1, 2))
    check(a, b)


def test_a_locked_store_ends_every_call_in_time(tmp_path):
    limits = DirectoryLimits(lease=5, call=0.1, heartbeat=False)
    with member(tmp_path, limits=limits) as a, member(tmp_path, limits=limits) as b:
        hashes = chain(1, 2)
        held = publish(a, hashes)
        mine = b.allocate(1)
        with a._store.connection.transaction(Deadline(1)):
            start = time.monotonic()
            assert b.match(hashes) == () and b.counts.busy == 1
            assert b.lookup(hashes) == 2  # reading waits for nobody
            for call in (lambda: b.allocate(9), lambda: b.publish(chain(2, 1), mine, (1,)), b.renew):
                with pytest.raises(DirectoryBusy):
                    call()
            b.release(mine)
            assert time.monotonic() - start < 2
        assert b.match(hashes) == tuple(held)
        check(a, b)


def test_a_call_waits_no_longer_than_that_for_another_thread(tmp_path):
    with member(tmp_path, limits=DirectoryLimits(lease=5, call=0.1, heartbeat=False)) as a:
        inside, done = threading.Event(), threading.Event()

        def hold():
            with a._entered():
                inside.set()
                done.wait(5)

        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait(5)
        with pytest.raises(DirectoryBusy, match="another thread"):
            a.allocate(1)
        done.set()
        thread.join()


def test_verification_stops_at_its_deadline(tmp_path):
    with member(tmp_path) as a, member(tmp_path, limits=DirectoryLimits(call=5, verify=1e-9, heartbeat=False)) as b:
        hashes = chain(1, 4)
        publish(a, hashes)
        assert b.match(hashes) == ()
        b.renew()
        assert b.usage().evictable == 0
        check(a, b)


def test_a_member_that_was_taken_out_learns_it(pair):
    a, _ = pair
    with a._store.connection.transaction(Deadline(1)) as db:
        db.execute("DELETE FROM members WHERE member = ?", (a.member,))
    for call in (a.renew, lambda: a.allocate(1)):
        with pytest.raises(MemberLost, match="open it again"):
            call()


def test_the_heartbeat_renews_and_drops_references(tmp_path):
    limits = DirectoryLimits(lease=0.2, call=5)
    with member(tmp_path, limits=limits) as a, member(tmp_path) as b:
        a.release(publish(a, chain(1, 3)))
        until = time.monotonic() + 10
        while b.usage().evictable < 3 and time.monotonic() < until:
            time.sleep(0.02)
        assert b.usage().evictable == 3
        time.sleep(0.5)
        b.renew()
        assert b.usage().members == 2
        a.check()


def test_a_heartbeat_that_fails_ends_the_member_not_its_pages(tmp_path):
    with member(tmp_path, limits=DirectoryLimits(lease=0.1, call=1)) as a, member(tmp_path) as b:
        a.allocate(3)
        with b._store.connection.transaction(Deadline(1)) as db:
            db.execute("DELETE FROM members WHERE member = ?", (a.member,))
        time.sleep(0.3)
        with pytest.raises(DirectoryError, match="heartbeat has ended: member 1 is not in"):
            a.allocate(1)
        assert b.usage().owned == 4


def test_a_hash_twice_in_a_chain_ends_it(pair):
    a, b = pair
    hashes = chain(1, 2)
    publish(a, hashes)
    assert len(b.match([*hashes, *hashes])) == 2
    check(a, b)


def test_a_forked_child_may_not_use_it(pair):
    a, b = pair
    child = os.fork()
    if child == 0:
        try:
            a.allocate(1)
        except ValueError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    check(a, b)


def test_random_calls_agree_with_a_plain_model(tmp_path):
    """1,500 calls of three members over a small pool: no page has two writers, nothing wrong is served, all books agree."""
    made = layout(n_pages=40)
    rng = np.random.default_rng(5)
    members = [member(tmp_path, made) for _ in range(3)]
    writing: list[list[int]] = [[], [], []]
    held: list[list[int]] = [[], [], []]
    for step in range(1500):
        who = int(rng.integers(3))
        one, hashes = members[who], chain(int(rng.integers(8)), int(rng.integers(1, 9)))
        kind = rng.integers(6)
        if kind < 2:
            found = list(one.match(hashes))
            assert right(one, hashes, found)
            held[who] += found
            rest = hashes[len(found) :]
            try:
                pages = list(one.allocate(len(rest)))
            except DirectoryFull:
                continue
            others = {page for part in (*writing, *held) for page in part}
            assert not others & set(pages)
            for page, name in zip(pages, rest, strict=True):
                one.pool.write(page, content_of(name))
            done = one.publish(rest, pages, one.checksums(rest, pages), first=len(found))
            held[who] += [page for page, new in zip(pages, done, strict=True) if new]
            writing[who] += [page for page, new in zip(pages, done, strict=True) if not new]
        elif kind == 2:
            one.renew()
        elif step % 40 == 39:
            one.check()
        else:
            count = int(rng.integers(len(held[who]) + 1))
            one.release(held[who][:count] + writing[who])
            held[who], writing[who] = held[who][count:], []
    for one in members:
        one.check()
        one.close()
    assert sum(one.counts.matched for one in members) > 300
    with member(tmp_path, made) as last:
        used = last.usage()
        assert used.owned == used.withdrawn == 0 and used.published == used.evictable and used.members == 1
