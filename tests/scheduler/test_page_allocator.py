import pytest

from rorqual.engine.scheduling.page_allocator import PageAllocator
from rorqual.engine.scheduling.slots import SlotPool


def test_pages_come_back_last_in_first_out():
    pool = PageAllocator(6)
    first, second = pool.take(2), pool.take(3)
    assert (first, second) == ([0, 1], [2, 3, 4])
    assert pool.drop(second) == [2, 3, 4]
    assert pool.take(3) == [2, 3, 4]
    assert (pool.n_free, pool.n_used, pool.taken, pool.returned) == (1, 5, 8, 3)
    pool.check()


def test_a_shared_page_is_free_after_its_last_holder():
    pool = PageAllocator(2)
    (page,) = pool.take(1)
    pool.share([page])
    assert pool.refs(page) == 2
    assert pool.drop([page]) == [] and pool.n_free == 1
    assert pool.drop([page]) == [page] and pool.n_free == 2
    pool.check()


def test_misuse_is_caught():
    pool = PageAllocator(2)
    (page,) = pool.take(1)
    pool.drop([page])
    with pytest.raises(AssertionError, match=f"page {page} is freed twice"):
        pool.drop([page])
    with pytest.raises(AssertionError, match=f"page {page} is free and cannot be shared"):
        pool.share([page])
    with pytest.raises(AssertionError, match="3 pages wanted, 2 free"):
        pool.take(3)
    assert pool.take(0) == []


def test_check_sees_a_corrupt_free_list():
    pool = PageAllocator(3)
    pool.take(1)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="disagree"):
        pool.check()


def test_slots():
    slots = SlotPool(2)
    a, b = slots.take(0), slots.take(0)
    assert {a, b} == {0, 1} and slots.n_free == 0 and not slots.is_free(a)
    with pytest.raises(AssertionError, match="no slot for step 0: 2 of 2 are taken"):
        slots.take(0)
    slots.give(a, 0)
    assert slots.is_free(a) and slots.take(0) == a
    slots.give(b, 0)
    with pytest.raises(AssertionError, match=f"slot {b} is freed twice"):
        slots.give(b, 0)
    slots.check()


def test_a_slot_is_handed_out_from_its_first_step_on():
    slots = SlotPool(1)
    slots.give(slots.take(4), 7)
    assert slots.n_free == 1 and not slots.ready(6) and slots.ready(7)
    with pytest.raises(AssertionError, match="no slot for step 6: 0 of 1 are taken"):
        slots.take(6)
    assert slots.take(7) == 0
