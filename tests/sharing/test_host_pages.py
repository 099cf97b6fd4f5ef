"""Host pages that come from a directory: in hand, in use, published, and back only when the copies that wrote them have ended."""

from __future__ import annotations

import contextlib
import sqlite3

import numpy as np
import pytest

from rorqual.attention.kv.directory import DirectoryLimits
from rorqual.engine.plan import StepPlan
from rorqual.engine.sharing.host_pages import SharedHostPages
from tests.attention.kv.directory.common import chain, layout, member


@pytest.fixture
def made(tmp_path):
    with member(tmp_path, layout(n_pages=12, extent_pages=2)) as directory:
        yield directory


class Copies:
    def __init__(self) -> None:
        self.done = -1

    def __call__(self, plan: int) -> bool:
        return plan <= self.done


def wrote(pages: SharedHostPages, step: int, *hosts: int) -> None:
    plan = StepPlan(step=step)
    plan.mirrors = np.array([(0, host) for host in hosts], dtype=np.int32)
    pages.note(plan)


def test_a_page_comes_back_when_its_copy_has_ended(made):
    copies, poisoned = Copies(), []
    pages = SharedHostPages(made, copies, poisoned.extend)
    assert pages.in_hand == 0 and pages.secure(3) == 3 == pages.in_hand
    taken = pages.take(3)
    assert poisoned == taken and pages.n_used == 3
    wrote(pages, 4, taken[0])
    pages.drop(taken)
    assert list(pages.returned) == taken[1:] and pages.cooling  # nothing was copied to the others
    pages.cool()
    assert pages.cooling
    copies.done = 4
    pages.cool()
    assert not pages.cooling and sorted(pages.returned) == sorted(taken) and pages.n_used == 0
    pages.give_back()
    assert not pages.returned
    made.check()
    with pytest.raises(AssertionError, match="freed twice"):
        pages.drop(taken[:1])


def test_published_and_found_pages_are_held_as_often_as_they_came(made):
    copies = Copies()
    pages, names = SharedHostPages(made, copies), chain(1, 2)
    pages.secure(2)
    mine = pages.take(2)
    wrote(pages, 0, *mine)
    assert not pages.ripe(mine) and all(map(pages.owned, mine))
    copies.done = 0
    assert pages.ripe(mine)
    pages.share(mine)  # while they are being published
    assert made.publish(names, mine, made.checksums(names, mine)) == (True, True)
    found = made.match(names)  # before the first holder knows that they are published
    assert list(found) == mine
    pages.bring(found[:1])
    pages.published(mine)
    pages.drop(mine)
    assert not any(map(pages.owned, mine)) and pages.n_used == 3
    pages.drop(mine)
    assert list(pages.returned) == [mine[1]]
    pages.drop(mine[:1])
    assert sorted(pages.returned) == sorted([mine[0], mine[0], mine[1]])
    pages.returned.append(found[1])  # the one that was not brought in
    pages.give_back()
    made.renew()
    assert made.usage().evictable == 2
    made.check()


def test_an_empty_hand_and_what_others_granted(made):
    pages = SharedHostPages(made, lambda plan: True)
    pages.granted.extend(made.allocate(5))
    assert pages.in_hand == 5
    pages.empty_hand()
    assert pages.in_hand == 0 and len(pages.returned) == 5
    assert pages.secure(12) == 12  # what was returned is given back first
    assert pages.secure(13) == 12 and not pages.busy
    made.check()


def test_a_locked_store_is_no_lack_of_pages(tmp_path):
    limits = DirectoryLimits(call=0.05, heartbeat=False)
    with member(tmp_path, layout(n_pages=12, extent_pages=2), limits) as directory:
        pages = SharedHostPages(directory, lambda plan: True)
        assert pages.secure(1) == 1
        with contextlib.closing(sqlite3.connect(tmp_path / "store", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert pages.secure(4) == 1 and pages.busy
            other.execute("ROLLBACK")
        assert pages.secure(4) == 4 and not pages.busy
