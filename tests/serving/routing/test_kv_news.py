"""What a prefix tree holds, as the router hears of it: always the same set, whatever came, went or was lost."""

import random

import numpy as np
import pytest

from rorqual.engine.scheduling.prefix_cache import PrefixCache
from rorqual.engine.serving.routing.hashes import page_hashes
from rorqual.engine.serving.routing.kv_events import KvBatch, decode_batch, encode_batch, pack
from rorqual.engine.serving.routing.kv_index import KvIndex, leading
from rorqual.engine.serving.routing.kv_log import KvLog

PAGE = 4


def ids(*tokens):
    return np.array(tokens, dtype=np.int32)


def hashes(tokens):
    return page_hashes(ids(*tokens).tobytes(), PAGE)


def known(index, rank):
    return {value for value, have in index._ranks.items() if have >> rank & 1}


def test_hashes_name_whole_pages_and_all_that_is_before_them():
    a, b = hashes(range(12)), hashes([*range(8), 99, 99, 99, 99])
    assert len(a) == 3 and a[:2] == b[:2] and a[2] != b[2]
    assert hashes(range(11)) == a[:2] and hashes([]) == []
    assert hashes([1] * 12)[0] != hashes([1] * 12)[1]  # equal pages at other places
    assert page_hashes(ids(*range(4, 12)).tobytes(), PAGE, a[0]) == a[1:]


def test_leading_is_the_same_as_counting_rank_by_rank():
    rng = random.Random(0)
    for _ in range(300):
        masks = [rng.choice([rng.randrange(16), 15, 15]) for _ in range(rng.randrange(6))]
        slow = [next((i for i, m in enumerate(masks) if not m >> r & 1), len(masks)) for r in range(4)]
        assert leading(4, iter(masks)) == slow


@pytest.mark.parametrize("most_pending", [3, 10_000])
def test_index_follows_a_random_tree(most_pending):
    """Inserts, splits, evictions and flushes of two trees, read at random moments; a log that is too full tells all."""
    rng = random.Random(most_pending)
    trees = [PrefixCache(PAGE) for _ in range(2)]
    trees[0].insert(ids(*range(8)), [0, 1])  # before there is a log
    logs = [tree.start_log() for tree in trees]
    for log in logs:
        log._most = most_pending
    index, page = KvIndex(2, 10_000), 10
    for _ in range(1500):
        rank = rng.randrange(2)
        tree, act = trees[rank], rng.random()
        if act < 0.6:
            tokens = ids(*(rng.randrange(2) for _ in range(PAGE * rng.randrange(1, 5))))
            matched, node = tree.match(tokens)
            tree.lock(node)
            if rng.random() < 0.9:
                tree.unlock(node)
            more = len(tokens) // PAGE - len(matched)
            tree.insert(tokens, [*matched, *range(page, page + more)])
            page += more
        elif act < 0.9:
            tree.evict(rng.randrange(1, 6))
        elif act < 0.92:
            tree.flush()
        else:
            if data := logs[rank].take():
                index.heard(rank, data)
            paths = {id(tree._root): ()}
            whole = set()
            for node in tree.nodes():
                paths[id(node)] = (*paths[id(node.parent)], *node.tokens.tolist())
                whole |= set(hashes(paths[id(node)]))
            assert known(index, rank) == whole and index.blocks[rank] == len(whole) == tree.n_pages
            tree.check()
    assert index.gaps == index.ignored == 0


def test_after_a_loss_nothing_is_believed_until_all_is_told():
    present = {1, 2, 3}
    log, index = KvLog(lambda: present), KvIndex(2, 100)
    log.stored([1])
    index.heard(1, log.take())
    log.stored([2])
    log.take()  # lost on the way
    log.stored([3])
    assert not index.heard(1, log.take())
    assert index.blocks == [0, 0] and index.gaps == 1
    log.removed([9])
    assert index.heard(1, log.take()) and index.gaps == 1  # no further loss
    log.resync()
    log.take()  # lost too
    log.stored([3])
    assert not index.heard(1, log.take()) and index.gaps == 2
    assert index.blocks == [0, 0]
    log.resync()
    log.stored([4])  # is in ``present`` or not when all is told
    index.heard(1, log.take())
    assert known(index, 1) == present
    assert log.take() is None
    log.removed([2])
    index.heard(1, log.take())
    assert known(index, 1) == {1, 3}


def test_memory_of_log_and_index_is_bounded():
    log = KvLog(lambda: range(5), most_pending=10)
    for value in range(1000):
        log.stored([value])
        assert len(log._pending) <= 10
    assert decode_batch(log.take()).whole
    for _ in range(1000):
        log.stored([7])
        log.removed([7])
    batch = decode_batch(log.take())
    assert batch.stored == b"" and batch.removed == pack([7])
    index = KvIndex(2, 10)
    index.add(0, range(20))
    index.add(1, range(20))  # the same pages again need no room
    assert index.blocks == [10, 10] and index.ignored == 20 and len(index._ranks) == 10
    index.remove(0, range(20))
    index.remove(0, range(20))
    assert index.blocks == [0, 10]
    index.forget(1)
    assert index.blocks == [0, 0] and not index._ranks


@pytest.mark.parametrize("data", [b"", b"x", b"\x80", encode_batch(KvBatch(seq=0, stored=b"123"))])
def test_bad_news_are_value_errors_and_change_nothing(data):
    index = KvIndex(1, 10)
    index.add(0, [5])
    with pytest.raises(ValueError):
        index.heard(0, data)
    assert known(index, 0) == {5} and index.gaps == 0
