"""Rows that move to hot rows before their pages go, as plans say and as the engine does it."""

from __future__ import annotations

import pytest

from tests.offload.engines import PROMPTS, alone, counters, expect_idle, make, params
from tests.offload.test_policy import Script


def test_a_spill_that_is_foreseen_begins_with_warm_hot_rows():
    script = Script(n_device_pages=20)
    large, small = script.enter(0, 48), script.enter(1, 20)
    script.write(large, 12)
    script.write(small, 2)
    script.write(small, 2)
    script.pass_steps(3)
    assert len(script.tier.book.free) == 2 and large.lease and not large.tolerant  # four were free, two of them are leased now
    plan = script.end([(0, 48, 1), (1, 16, 1)])
    assert plan.moving.tolist() == [[0, 1]] and plan.offloaded and len(plan.hot_pages) == 2 and not script.absent(large.pages)
    assert plan.host_pages.tolist() == [[page, script.tier.book.host[page]] for page in large.pages]  # they move where copies are known
    assert large.tolerant and script.tier.book.moves.moving == {0: 0} and script.tier.book.droppable == 12  # it had its row
    assert script.tier.room(5) == 5 and script.absent(large.pages) == large.pages[:3]


def test_pages_that_somebody_else_needs_do_not_move():
    script = Script(n_device_pages=20)
    large, small = script.enter(0, 48), script.enter(1, 20)
    script.write(large, 12)
    script.pass_steps(2)
    other = script.enter(2, 20, pages=large.pages[:1], count=16)
    script.write(small, 2)
    script.write(small, 2)
    script.pass_steps(3)
    plan = script.end([(0, 48, 1), (1, 16, 1)])
    assert plan.moving.tolist() == [[0, 1]] and not other.tolerant
    assert plan.host_pages[:, 0].tolist() == large.pages[1:]


def test_policy_host_drops_pages_that_could_still_move_when_they_are_wanted():
    script = Script(policy="host", n_device_pages=12)
    stay = script.enter(0, 16)
    assert script.tier.ready(stay, 0, 8, 16)
    script.write(stay, 2)
    assert script.tier.ready(stay, 8, 8, 8) and not stay.lease
    script.write(stay, 2)
    script.tier.take(stay, [script.unused[-1]])  # more than a lease has: it gets one
    stay.pages.append(script.unused.pop())
    script.end([(0, 16, 3)])
    script.end([(0, 19, 1)])
    script.pass_steps(1)
    assert stay.tolerant and stay.lease and script.absent(stay.pages) == stay.pages[:4] and script.tier.book.droppable == 1
    assert script.tier.room(10) == 10 and script.absent(stay.pages) == stay.pages


@pytest.mark.parametrize("policy", ["host", "hybrid"])
def test_chosen_rows_move_to_hot_rows_before_their_pages_go(policy, monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    with make(policy, max_total_tokens=600, kv_device_tokens=200, max_num_seqs=3) as llm:  # hybrid: spills are foreseen
        outputs = llm.generate(PROMPTS, params(), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [alone(i) for i in range(len(PROMPTS))]
        found, spilled = counters(llm), llm.engine.leader.scheduler.tier.spills
        assert found["moved"] > 20 and (policy == "host" or spilled > 0)
        expect_idle(llm)
