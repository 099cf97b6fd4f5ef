"""Prompts whose rows get fewer pages than they want, of either kind."""

from __future__ import annotations

import pytest

from tests.offload.test_policy import Script
from tests.offload.tiered import TieredLoop, tiered
from tests.scheduler.harness import make_config, make_request


@pytest.mark.parametrize("wanted", [14, 18])
def test_a_prompt_row_cut_to_one_token_finds_its_rows(wanted):
    """Logical pages run out, so that a chunk has one token; then a lower rank takes device pages in the same step."""
    script = Script()
    stay = script.enter(0, 60, count=16)
    script.write(stay, 5)
    script.pass_steps(3)
    assert script.tier.ready(stay, 20, 16, 40) and script.tier.room(1) == 1
    script.tier.take(stay, [script.unused[-1]])
    stay.pages.append(script.unused.pop())
    script.end([(0, 20, 3)])
    script.pass_steps(3)
    assert script.tier.ready(stay, 23, 16, 37) and stay.open
    assert not script.tier.stuck(stay)  # the row of one token can be
    script.tier.room(wanted)
    assert not stay.open and bool(script.absent(stay.pages)) == bool(stay.lease) == (wanted > 14)  # spilled, it has hot rows
    script.end([(0, 23, 1)])
    script.tier.check(stay.pages)


def test_a_row_of_one_token_that_misses_pages_is_stuck():
    script = Script()
    stay = script.enter(0, 60, count=16)
    script.write(stay, 5)
    script.pass_steps(3)
    assert script.tier.ready(stay, 20, 16, 40) and script.tier.room(18) == 18 and script.absent(stay.pages)
    assert script.tier.stuck(stay) and stay.open


@pytest.mark.parametrize("room", [0, 2])
def test_nothing_is_evicted_for_pages_that_the_device_has_no_room_for(room):
    config = tiered(make_config(n_pages=24), topk=8, hot=1)
    loop = TieredLoop(config)
    loop.run([make_request("a", 0, range(1, 61), max_tokens=4, ignore_eos=True)])
    pool, tier = loop.scheduler._pool, loop.scheduler.tier
    stay = tier.enter(slot=0, rank=(0, 0), pages=[], cached=0, total=40, count=40)
    free = pool.pages.take(pool.pages.n_free)
    cached = pool.cache.n_pages
    assert stay is not None and cached > 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier, "room", lambda count: min(count, room))
        pages = pool.grab(4, stay)
    assert len(pages) == room and pool.cache.n_pages == cached - room
    tier.leave(stay)
    pool.pages.drop(free)
