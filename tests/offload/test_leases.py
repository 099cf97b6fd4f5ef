"""Leases that grow into idle device pages and shrink before anybody suffers for them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rorqual.engine.offload.leases import GROW_EVERY, REST, lease_level, shared_by
from rorqual.engine.offload.stay import Stay
from tests.offload.test_policy import PAGE, Script, limits
from tests.offload.test_residency import tiered_scripts
from tests.offload.tiered import TieredLoop, tiered
from tests.scheduler.harness import expect_lone, make_config, make_request
from tests.scheduler.test_random import expect, play


def offloaded(script: Script, slot: int, pages: int, rank: int = 0) -> Stay:
    """A long prompt of ``pages`` whole pages, computed; its next row is a decode row that has hot rows."""
    stay = script.enter(slot, pages * PAGE, rank=rank, count=8)
    while len(stay.pages) < pages:
        start = len(stay.pages) * PAGE
        assert script.tier.ready(stay, start, 8, pages * PAGE - start)
        script.write(stay, min(2, pages - len(stay.pages)))
    assert script.tier.ready(stay, pages * PAGE, 1, 1) and stay.lease
    return stay


def decode(script: Script, *stays: Stay, steps: int = 1) -> list:
    """Steps in which ``stays`` have a row that completes no page."""
    return [script.end([(stay.slot, len(stay.pages) * PAGE - 2, 1) for stay in stays]) for _ in range(steps)]


class Recorded(Script):
    """A script that keeps its plans."""

    def end(self, rows):
        self.plans = [*getattr(self, "plans", []), super().end(rows)]
        return self.plans[-1]


def host(**values) -> Recorded:
    base = {"policy": "host", "topk": 16, "hot_pages": 4, "most_hot_pages": 12, "n_device_pages": 40, "step_tokens": 8}
    return Recorded(**{**base, **values})


def test_a_lone_lease_grows_to_the_most_and_later_ones_share():
    script = host()
    first = offloaded(script, 0, 20)
    decode(script, first, steps=GROW_EVERY)
    assert len(first.lease) == 12
    changes = [plan.hot_pages.tolist() for plan in script.plans if len(plan.hot_pages)]
    assert sum(changes, []) == [[0, index, page] for index, page in enumerate(first.lease)]
    second = offloaded(script, 1, 20)
    decode(script, first, second, steps=GROW_EVERY)
    assert len(first.lease) == len(second.lease) == 12 and script.tier.stays.spare == 16
    stats = script.tier.stats()
    assert (stats["hot_rows_least"], stats["hot_rows_mean"], stats["hot_rows_most"]) == (48, 48, 48)
    script.tier.check([*first.pages, *second.pages])


def test_a_lease_is_no_larger_than_its_request_and_grows_in_whole_pieces():
    script = host(hot_pages=8, most_hot_pages=16, n_device_pages=60)
    stay = offloaded(script, 0, 11)
    decode(script, stay, steps=2 * GROW_EVERY)
    assert len(stay.lease) == 10  # two pages a piece


def test_pressure_takes_the_last_pages_of_the_largest_leases_and_nobody_is_spilled():
    script = host(n_device_pages=34)
    first, second = offloaded(script, 0, 20), offloaded(script, 1, 20, rank=1)
    decode(script, first, second, steps=GROW_EVERY)
    assert len(first.lease) == len(second.lease) == 12
    lost, spills = second.lease[11], script.tier.spills
    free = len(script.tier.book.free)
    assert script.tier.room(free + 1) == free + 1
    assert len(first.lease) == 12 and len(second.lease) == 11 and lost in script.tier.book.free
    moves = script.tier.book.moves
    assert moves.hot == {(1, 11): -1} and lost in moves.vacated
    assert script.tier.room(free + 16) == free + 16 and script.tier.stays.spare == 0
    assert len(first.lease) == len(second.lease) == 4  # what is promised
    assert script.tier.room(free + 17) < free + 17 and len(first.lease) == len(second.lease) == 4 and script.tier.spills == spills
    decode(script, first, second, steps=REST - 1)
    assert len(first.lease) == len(second.lease) == 4  # wanted back a while ago
    decode(script, first, second, steps=GROW_EVERY)
    assert len(first.lease) == len(second.lease) == 12


def test_changes_are_rare():
    script = host()
    stays = [offloaded(script, slot, 20) for slot in range(3)]
    changes = []
    for _ in range(120):
        plan = decode(script, *stays)[0]
        changes += [plan.step] if len(plan.hot_pages) else []
    assert all(b - a >= GROW_EVERY for a, b in zip(changes[1:], changes[2:], strict=False)) and len(changes) <= 4


def test_leases_that_cannot_grow_stay():
    script = host(most_hot_pages=0)
    stay = offloaded(script, 0, 20)
    decode(script, stay, steps=3 * GROW_EVERY)
    assert len(stay.lease) == 4
    with pytest.raises(ValueError, match="leases of 4 pages cannot grow to 3"):
        limits(topk=8, hot_pages=4, most_hot_pages=3)


def test_a_spill_is_not_foreseen_while_leases_can_shrink():
    script = host(policy="hybrid", n_device_pages=60)
    script.tier._look_again = 10**9
    other, large = script.enter(0, 80), script.enter(1, 80)
    for stay in (large, other):
        for _ in range(10):
            script.write(stay, 2)
    script.pass_steps(3)
    assert script.tier.room(30) == 30 and large.lease and not other.lease  # 20 are free, the rest comes from the spilled
    script.tier._look_again = 0
    decode(script, large, other, steps=GROW_EVERY + REST)
    assert len(large.lease) > 4 and not other.lease
    spills = script.tier.spills
    script.tier._demand = 1
    while len(script.tier.book.free) + script.tier.book.droppable > 4:
        script.write(other, 1)
        assert script.tier.spills == spills and not other.lease
    assert script.tier.stays.spare > 0


@pytest.mark.parametrize("requests", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("policy", ["host", "hybrid"])
def test_the_leases_that_are_reached_are_the_planned_ones(policy, requests):
    config = tiered(
        make_config(n_pages=900, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=400),
        policy=policy,
        topk=16,
        hot=2,
        spare=70,
        more=24,
    )
    loop = TieredLoop(config)
    for slot in range(requests):
        loop.scheduler.add(make_request(str(slot), slot, [slot + 1, 2] * 100, max_tokens=190, ignore_eos=True))
    tier = loop.scheduler.tier
    reached = 0
    for _ in range(150):
        loop.tick()
        if tier.stays.leased == requests:
            reached = max(reached, min(len(stay.lease) for stay in tier.stays.leasing()))
    planned = lease_level(config.tier, requests, shared_by(config.tier, requests))
    assert reached == planned
    loop.run()


class Restless(TieredLoop):
    """Leases grow whenever they can, and shrink at random steps for no reason."""

    seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._random = random.Random(self.seed)
        leases = self.scheduler.tier.leases
        leases.every, leases.rest = 1, self._random.choice((0, 0, 2))

    def tick(self):
        tier = self.scheduler.tier
        if self._random.random() < 0.3:
            tier.leases.give_back(len(tier.book.free) + self._random.randint(1, 6))
        return super().tick()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tiered_scripts(), st.integers(1, 9), st.integers(0, 2**20))
def test_requests_keep_their_tokens_while_leases_come_and_go(script, more, seed):
    tier = script.config.tier
    script = replace(script, config=replace(script.config, tier=replace(tier, most_hot_pages=tier.hot_pages + more)))
    loop = play(script, type("Seeded", (Restless,), {"seed": seed}))
    for arrival in script.arrivals:
        expect(arrival, script.config)
    loop.drain()


@pytest.mark.parametrize("policy", ["host", "hybrid"])
def test_restless_leases_grow_and_shrink(policy):
    """What the random test relies on."""
    config = tiered(make_config(n_pages=200, max_num_seqs=6, max_num_batched_tokens=32), policy=policy, topk=8, hot=2, spare=20, more=6)
    loop = Restless(config)
    requests = [make_request(str(i), i, [i % 5 + 1] * (30 + i), max_tokens=20, ignore_eos=True) for i in range(10)]
    loop.run(requests)
    expect_lone(requests, config)
    assert loop.scheduler.tier.leases.grown > 5 and loop.scheduler.tier.leases.shrunk > 5
