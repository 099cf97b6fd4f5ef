import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.engine.scheduling.prefix_cache import PrefixCache


def ids(*tokens):
    return np.array(tokens, dtype=np.int32)


def test_match_is_page_aligned_and_splits_a_run():
    tree = PrefixCache(2)
    inserted = tree.insert(ids(1, 2, 3, 4, 5, 6), [10, 11, 12])
    assert inserted.adopted == (10, 11, 12) and inserted.duplicates == () and tree.n_nodes == 1
    assert tree.match(ids(1, 2, 3))[0] == (10,)
    assert tree.n_nodes == 2  # split after the first page
    assert tree.match(ids(1, 2, 3, 4, 9, 9))[0] == (10, 11)
    assert tree.match(ids(1, 2, 3, 4, 5, 6, 7))[0] == (10, 11, 12)
    assert tree.match(ids(1, 9))[0] == () and tree.match(ids())[0] == ()
    tree.check()


def test_duplicates_stay_with_the_caller_and_only_the_rest_is_adopted():
    tree = PrefixCache(1)
    tree.insert(ids(1, 2, 3), [0, 1, 2])
    again = tree.insert(ids(1, 2, 4, 5), [0, 7, 8, 9])
    assert again.duplicates == (7,) and again.adopted == (8, 9)
    assert tree.match(ids(1, 2, 4, 5))[0] == (0, 1, 8, 9)
    assert tree.match(ids(1, 2, 3))[0] == (0, 1, 2)
    assert tree.n_pages == 5
    tree.check()


def test_least_recently_used_leaf_goes_first_from_its_end():
    tree = PrefixCache(1)
    tree.insert(ids(1, 2, 3), [0, 1, 2])
    tree.insert(ids(1, 5, 6), [0, 3, 4])
    tree.match(ids(1, 2, 3))
    assert tree.evict(1) == (4,)
    assert tree.match(ids(1, 5, 6))[0] == (0, 3)  # now the other leaf is older
    assert tree.evict(3) == (1, 2, 3) or tree.n_pages == 1
    assert tree.match(ids(1))[0] == (0,)
    assert tree.evict(9) == (0,) and tree.n_pages == tree.n_nodes == 0
    assert tree.evict(1) == ()
    tree.check()


def test_a_locked_path_is_not_evicted_even_when_split_later():
    tree = PrefixCache(1)
    tree.insert(ids(1, 2, 3, 4), [0, 1, 2, 3])
    tree.insert(ids(9, 9), [8, 9])
    _, node = tree.match(ids(1, 2, 3, 4))
    tree.lock(node)
    assert tree.evictable_pages == 2
    tree.insert(ids(1, 2, 7), [0, 1, 5])  # splits the locked run
    assert sorted(tree.evict(100)) == [5, 8, 9]
    assert tree.match(ids(1, 2, 3, 4))[0] == (0, 1, 2, 3)
    assert tree.flush() == ()
    tree.unlock(node)
    assert sorted(tree.flush()) == [0, 1, 2, 3]
    tree.check()


def test_unlocking_twice_is_caught():
    tree = PrefixCache(1)
    node = tree.insert(ids(1), [0]).node
    tree.lock(node)
    tree.unlock(node)
    with pytest.raises(AssertionError, match="unlocked more often"):
        tree.unlock(node)


def test_what_comes_out_cannot_change_the_tree():
    tree = PrefixCache(1)
    mine = [0, 1, 2]
    inserted = tree.insert(ids(1, 2, 3), mine)
    mine.append(99)
    pages, _ = tree.match(ids(1, 2, 3))
    assert isinstance(pages, tuple) and isinstance(inserted.adopted, tuple) and isinstance(tree.pages(), tuple)
    assert pages == (0, 1, 2)
    source = ids(4, 5)
    tree.insert(source, [5, 6])
    source[:] = 0
    assert tree.match(ids(4, 5))[0] == (5, 6)
    tree.check()


def test_the_eviction_queue_stays_small_under_hits():
    tree = PrefixCache(1)
    node = tree.insert(ids(1, 2), [0, 1]).node
    for _ in range(5000):
        tree.lock(node)
        tree.match(ids(1, 2))
        tree.unlock(node)
    assert len(tree._heap) <= 2 * tree.n_nodes + 64
    tree.check()


tokens = st.lists(st.integers(0, 2), max_size=10)
operations = st.one_of(
    st.tuples(st.sampled_from(["insert", "match", "lock"]), tokens),
    st.tuples(st.just("evict"), st.integers(0, 5)),
    st.tuples(st.just("unlock"), st.integers(0, 9)),
)


@settings(max_examples=150, deadline=None)
@given(
    page_size=st.sampled_from([1, 2, 4]),
    script=st.lists(operations, max_size=40),
)
def test_random_scripts_against_a_flat_model(page_size, script):
    """The tree against a dict from whole-page prefixes to pages: same hits, locked paths stay, pages are unique."""
    tree, model, next_page, locks = PrefixCache(page_size), {}, 0, []

    def expected(seq):
        found = []
        for end in range(page_size, len(seq) + 1, page_size):
            if tuple(seq[:end]) not in model:
                break
            found.append(model[tuple(seq[:end])])
        return tuple(found)

    for op, value in script:
        if op == "insert":
            whole = value[: len(value) // page_size * page_size]
            hit = expected(whole)
            pages = list(range(next_page, next_page + len(whole) // page_size))
            next_page += len(pages)
            done = tree.insert(ids(*whole), pages)
            assert done.duplicates == tuple(pages[: len(hit)]) and done.adopted == tuple(pages[len(hit) :])
            for i in range(len(hit), len(pages)):
                model[tuple(whole[: (i + 1) * page_size])] = pages[i]
        elif op in ("match", "lock"):
            pages, node = tree.match(ids(*value))
            assert pages == expected(value)
            if op == "lock":
                tree.lock(node)
                locks.append((node, pages))
        elif op == "unlock" and locks:
            tree.unlock(locks.pop(value % len(locks))[0])
        elif op == "evict":
            room = tree.evictable_pages
            gone = set(tree.evict(value))
            assert len(gone) == min(value, room)
            assert not any(gone.intersection(pages) for _, pages in locks)
            model = {k: page for k, page in model.items() if page not in gone}
        tree.check()
        assert sorted(tree.pages()) == sorted(model.values())
