"""How a hot buffer begins: with what a prompt's last tokens chose, or with rows moved before their pages go; counted exactly."""

from __future__ import annotations

import pytest
import torch

from rorqual.attention.kv.tier import TierCounter
from tests.attention.common import SPARSE
from tests.attention.tiered import Resident, Setting, Tiered

LENGTH = 60


class Scripted(Tiered):
    """A single request, without chance: leased from the beginning, and what else a test says."""

    seeding = move_all = False

    def settle(self, r: int, static: bool) -> None:
        if not self.leased(r):
            self.lease(r)
        self.move(r, self.move_all)

    def seeds(self, counts, leased):
        return (0,) if self.seeding and counts[0] > 1 else ()

    def mirror_all(self) -> None:
        for page in self.full_pages(0):
            self.mirror(page)

    def drop_all(self) -> None:
        for page in self.full_pages(0):
            self.drop(page)


def worlds(fused: bool, static: bool = False) -> tuple[Resident, Scripted]:
    setting = Setting(config=SPARSE, n_layers=1, lengths=(LENGTH,), fused=fused, static=static, seed=3)
    one, many = Resident(setting), Scripted(setting)
    for world in (one, many):
        world.x[0][50:52] = world.x[0][49]  # alike tokens choose alike
    return one, many


def push(one: Resident, many: Scripted, count: int) -> dict[TierCounter, int]:
    """A step of both, equal: what it added to the counters."""
    before = many.cache.hot.counters.sum(0).clone()
    assert torch.equal(many.step([0], [count]), one.step([0], [count]))
    return dict(zip(TierCounter, (many.cache.hot.counters.sum(0) - before).tolist(), strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_a_seeded_buffer_holds_what_the_last_tokens_chose(fused):
    misses = {}
    for seeding in (False, True):
        one, many = worlds(fused)
        many.seeding = seeding
        push(one, many, 50)
        held = set(many.cache.hot.positions[0, many.slots[0]].tolist()) - {-1}
        assert len(held) == (16 if seeding else 0)  # two selections' worth of rows
        many.mirror_all()
        many.drop_all()
        many.seeding = False
        found = push(one, many, 1)
        misses[seeding] = found[TierCounter.MISSES]
        assert found[TierCounter.MISSES] + found[TierCounter.HITS] + found[TierCounter.RESIDENT] == 8 and not found[TierCounter.UNWRITTEN]
        assert found[TierCounter.BYTES] == found[TierCounter.MISSES] * many.host[0].row_bytes
    assert misses[True] <= 2 < misses[False]


@pytest.mark.parametrize(("fused", "static"), [(False, False), (True, False), (True, True)])
def test_rows_move_before_their_pages_go(fused, static):
    one, many = worlds(fused, static)
    push(one, many, 50)
    many.mirror_all()
    many.move_all = True
    first = push(one, many, 1)
    assert first[TierCounter.MOVED] > 0 and not first[TierCounter.MISSES] and not first[TierCounter.BYTES]
    many.move_all = False
    again = many.cache.hot.positions[0, many.slots[0]].clone()
    many.drop_all()
    second = push(one, many, 1)
    assert second[TierCounter.HITS] > 0 and set(again.tolist()) - {-1}
    assert second[TierCounter.MISSES] + second[TierCounter.HITS] + second[TierCounter.RESIDENT] == 8


@pytest.mark.parametrize("fused", [False, True])
def test_a_row_that_is_nowhere_is_counted(fused):
    """A page dropped without a finished host copy: a fault of the scheduler's that may not pass in silence."""
    one, many = worlds(fused)
    push(one, many, 50)
    for page in many.full_pages(0):
        many.host_of[page] = 0
        many.drop(page)
    many.step([0], [1])
    assert many.counted(TierCounter.UNWRITTEN) > 0
