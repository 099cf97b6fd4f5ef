"""Members of a full directory: what they tell each other, and fewer pages than asked for."""

from __future__ import annotations

import pytest

from rorqual.attention.kv.directory import DirectoryFull, Wanted
from rorqual.attention.kv.directory import pressure as module
from tests.attention.kv.directory.common import chain, layout, member, publish


def test_who_wants_pages_for_longest_comes_first(tmp_path, monkeypatch):
    with member(tmp_path) as first, member(tmp_path) as second, member(tmp_path) as third:
        assert first.pressure.wanted() == Wanted(pages=0, first=None)
        second.pressure.want(5)
        first.pressure.want(3)
        second.pressure.want(7)  # said again: it has waited since the first time
        assert first.pressure.wanted() == Wanted(pages=7, first=second.member)
        assert second.pressure.wanted() == Wanted(pages=3, first=second.member)
        assert third.pressure.wanted() == Wanted(pages=10, first=second.member)
        second.pressure.want(0)
        assert third.pressure.wanted() == Wanted(pages=3, first=first.member)
        second.pressure.want(1)
        assert third.pressure.wanted().first == first.member  # the second begins anew
        monkeypatch.setattr(module, "FRESH_S", 0.0)
        assert third.pressure.wanted() == Wanted(pages=0, first=None)  # nobody has said so lately
        third.check()


def test_a_want_ends_with_its_member(tmp_path):
    with member(tmp_path) as first:
        with member(tmp_path) as second:
            second.pressure.want(4)
            assert first.pressure.wanted().pages == 4
        assert first.pressure.wanted().pages == 0


def test_as_many_pages_as_there_are(tmp_path):
    made = layout(n_pages=10, extent_pages=1)
    with member(tmp_path, made) as first, member(tmp_path, made) as second:
        first.allocate(6)
        with pytest.raises(DirectoryFull, match="5 host pages are needed, 4 of 10"):
            second.allocate(5)
        assert len(second.allocate(5, least=2)) == 4
        with pytest.raises(DirectoryFull):
            second.allocate(3, least=1)
        assert second.allocate(3, least=0) == ()
        second.check()


def test_what_is_available_and_who_has_the_rest(tmp_path):
    made = layout(n_pages=10, extent_pages=2)
    with member(tmp_path, made) as first, member(tmp_path, made) as second:
        pages = publish(first, chain(1, 3))
        assert second.pressure.available() == 10 - 4 and first.pressure.available() == 6 + 1  # of two extents one page is in stock
        first.release(pages[2:])
        first.renew()
        assert second.pressure.available() == 7
        first.trim()
        assert second.pressure.available() == 8
        told = [str(holder) for holder in second.pressure.holders()]
        assert "0 of its own, 2 shared ones" in told[0] and "0 of its own, 0 shared ones" in told[1]
