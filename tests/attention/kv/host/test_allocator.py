"""Host pages: nothing handed out twice, nothing lost, and runs where there can be runs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.attention.kv.host.allocator import HostPageAllocator, count_runs, longest_run


def test_a_request_fills_extents_and_others_leave_it_room():
    pages = HostPageAllocator(40, 10)
    first, second = pages.take(3), pages.take(4)
    assert (first, second) == ([0, 1, 2], [10, 11, 12, 13])
    first += pages.take(5, after=first[-1])
    assert first == list(range(8))
    assert pages.take(15) == list(range(20, 35))
    assert pages.take(4, after=7) == [8, 9, 14, 15]  # extent 0 is full; of the others extent 1 has most room
    pages.check()


def test_a_dropped_page_of_a_neighbour_is_used_when_it_follows():
    pages = HostPageAllocator(8, 4)
    held = pages.take(8)
    pages.drop(held[2:4])
    assert pages.take(2, after=1) == [2, 3]


def test_the_longest_run_of_an_extent_is_taken():
    pages = HostPageAllocator(10, 10)
    held = pages.take(10)
    pages.drop([held[0], held[4], held[5], held[6], held[9]])
    assert pages.take(5) == [4, 5, 6, 0, 9]
    assert pages.n_free == 0


def test_every_free_page_can_be_had_however_scattered():
    pages = HostPageAllocator(37, 5)
    held = pages.take(37)
    pages.drop(held[::2])
    assert sorted(pages.take(19)) == held[::2]
    pages.check()
    with pytest.raises(AssertionError, match="1 host pages wanted, 0 free"):
        pages.take(1)


def test_pages_with_several_holders():
    pages = HostPageAllocator(4, 2)
    held = pages.take(2)
    pages.share(held)
    assert pages.drop(held) == [] and pages.refs(held[0]) == 1
    assert pages.drop(reversed(held)) == [1, 0]
    for misuse in (pages.share, pages.drop):
        with pytest.raises(AssertionError, match="host page 0"):
            misuse([0])
    with pytest.raises(ValueError, match="got 0 and 4"):
        HostPageAllocator(0, 4)


@given(
    n_pages=st.integers(1, 90),
    extent=st.integers(1, 17),
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 2**16)), max_size=60),
)
@settings(max_examples=150, deadline=None)
def test_free_and_used_add_up_and_no_page_has_two_owners(n_pages, extent, moves):
    pages, twin = HostPageAllocator(n_pages, extent), HostPageAllocator(n_pages, extent)
    owners: list[list[int]] = []
    for what, count, seed in moves:
        if what <= 1:  # a new request, or one that grows
            count = min(count, pages.n_free)
            grown = owners[seed % len(owners)] if what and owners else []
            new = pages.take(count, after=grown[-1] if grown else None)
            assert new == twin.take(count, after=grown[-1] if grown else None) and len(set(new)) == count
            assert not any(set(new) & set(owner) for owner in owners)
            if grown:
                grown += new
            elif new:
                owners.append(new)
        elif owners and what == 2:
            gone = owners.pop(seed % len(owners))
            assert sorted(pages.drop(gone)) == sorted(gone)
            twin.drop(gone)
        elif owners:
            shared = owners[seed % len(owners)]
            for allocator in (pages, twin):
                allocator.share(shared)
                assert allocator.drop(shared) == []
        pages.check()
        assert pages.n_used == sum(map(len, owners)) and pages.n_free + pages.n_used == n_pages
        assert 0 <= pages.fragmentation <= 1


@given(st.integers(1, 2**70 - 1))
def test_longest_run(mask):
    text = bin(mask)[:1:-1]
    longest = max(map(len, text.split("0")))
    assert text[: longest_run(mask) + longest].endswith("1" * longest) and text.find("1" * longest) == longest_run(mask)


def test_requests_stay_in_few_runs_under_churn():
    """Requests that come, grow page by page and go, at four fifths of the pool: runs per extent of pages stay low."""
    rng, extent = random.Random(1), 50
    pages = HostPageAllocator(20_000, extent)
    owners: list[list[int]] = []
    measured = []
    for step in range(6000):
        if pages.n_used < 16_000:
            owners.append(pages.take(rng.randrange(20, 400)))
        for owner in rng.sample(owners, min(8, len(owners))):
            if pages.n_free:
                owner += pages.take(1, after=owner[-1])
        if pages.n_used > 15_500:
            pages.drop(owners.pop(rng.randrange(len(owners))))
        if step > 3000 and step % 500 == 0:
            measured.append(sum(map(count_runs, owners)) / sum(-(-len(owner) // extent) for owner in owners))
    pages.check()
    assert max(measured) < 1.6, measured
    assert pages.fragmentation < 0.9
