"""What plans hold: budget, order, chunks, pages, entering requests, step numbers."""

import numpy as np
import pytest

from rorqual.engine.plan import INT_COLUMNS
from rorqual.engine.request import RequestState
from rorqual.engine.sampling.noise import request_seed
from rorqual.engine.scheduling.scheduler import Scheduler
from tests.scheduler.harness import EOS, Loop, expect_lone, make_config, make_request

SLOT, LENGTH, PROMPT, TOP_K, SEED, LOGPROBS, PROMPT_LOGPROBS = range(len(INT_COLUMNS))


def test_step_numbers_rise_also_for_empty_plans():
    scheduler = Scheduler(make_config())
    for step in range(3):
        plan = scheduler.schedule()
        assert (plan.step, plan.n_rows, plan.n_tokens) == (step, 0, 0)
        assert plan.pages.shape == (0, 3) and plan.new_ints.shape == (0, len(INT_COLUMNS))
        scheduler.skip(step)
    assert (scheduler.stats.plans, scheduler.stats.empty_plans) == (3, 3)
    assert scheduler.idle


def test_decodes_first_then_chunks_under_one_budget():
    scheduler = Scheduler(make_config(max_num_batched_tokens=8, overlap=False))
    scheduler.add(make_request("a", 0, range(1, 6), ignore_eos=True))
    plan = scheduler.schedule()
    assert (plan.counts.tolist(), plan.samples.tolist()) == ([5], [True])
    scheduler.complete(0, [1])
    scheduler.add(make_request("b", 1, range(1, 13), ignore_eos=True))
    scheduler.add(make_request("c", 2, [5], ignore_eos=True))
    plan = scheduler.schedule()
    assert (plan.starts.tolist(), plan.counts.tolist(), plan.samples.tolist()) == ([5, 4], [1, 7], [True, False])
    scheduler.complete(1, [1])
    plan = scheduler.schedule()  # b had a hit of 4, 7 computed, 1 left; c fits as well
    assert (plan.counts.tolist(), plan.samples.tolist()) == ([1, 1, 1], [True, True, True])
    assert plan.starts.tolist() == [6, 11, 0]


def test_an_entering_request_brings_tokens_and_parameters():
    config = make_config(seed=5)
    scheduler = Scheduler(config)
    scheduler.add(make_request("a", 4, [3, 1, 2], seed=None, top_k=9, logprobs=2, temperature=0.5, top_p=0.9))
    scheduler.add(make_request("b", 6, [8], seed=77, prompt_logprobs=3, min_tokens=2, stop_token_ids=[6], logit_bias={5: -2.5, 1: 3}))
    plan = scheduler.schedule()
    assert plan.new_ints.tolist() == [
        [0, 3, 3, 9, request_seed(None, 5, 4, 0), 2, -1],
        [1, 1, 1, -1, 77, -1, 3],
    ]
    assert plan.new_floats[0].tolist() == [0.5, 0.9, 0.0, 0.0, 0.0, 1.0]
    assert plan.new_tokens.tolist() == [3, 1, 2, 8] and plan.new_tokens.dtype == np.int32
    assert plan.new_bans.tolist() == [[1, 3, EOS], [1, 3, 6]]
    assert plan.new_biases.tolist() == [[1, 1, 3], [1, 5, -2.5]]
    assert plan.pages.tolist() == [[0, 0, 0], [1, 0, 1]]
    assert scheduler.schedule().new_ints.shape == (0, len(INT_COLUMNS))


def test_seeds_of_requests_without_one_differ_by_index_and_engine():
    def seed(index, engine):
        scheduler = Scheduler(make_config(seed=engine))
        scheduler.add(make_request("a", index, [1], seed=None))
        return int(scheduler.schedule().new_ints[0, SEED])

    assert len({seed(0, 0), seed(1, 0), seed(0, 1)}) == 3
    assert seed(1, 0) == seed(1, 0)


def test_pages_are_assigned_as_rows_need_them():
    loop = Loop(make_config(page_size=2, overlap=False))
    loop.run([make_request("a", 0, [1, 2, 3], max_tokens=4, ignore_eos=True)])
    assert [plan.pages[:, 1].tolist() for plan in loop.plans] == [[0, 1], [], [2], []]


def test_freed_pages_are_in_the_next_plan():
    loop = Loop(make_config(prefix_caching=False, overlap=False))
    loop.run([make_request("a", 0, range(1, 10), max_tokens=1)])
    assert sorted(loop.scheduler.schedule().freed_pages.tolist()) == [0, 1, 2]
    assert loop.scheduler.schedule().freed_pages.tolist() == []


def test_lengths_end_without_a_step_too_many():
    """Prefill gives the first token: n tokens take n rows that sample, although results are late."""
    for pp, overlap in ((1, True), (1, False), (3, True)):
        loop = Loop(make_config(pp=pp, overlap=overlap))
        loop.run([make_request("a", 0, [1, 2], max_tokens=5, ignore_eos=True)])
        assert sum(plan.n_samples for plan in loop.plans) == 5


def test_max_model_len_ends_a_request():
    config = make_config(max_model_len=8)
    request = make_request("a", 0, [1, 2, 3], max_tokens=100, ignore_eos=True)
    Loop(config).run([request])
    assert len(request.output_ids) == 5
    expect_lone([request], config)


@pytest.mark.parametrize(("pp", "overlap"), [(1, False), (1, True), (2, False), (2, True), (3, True)])
def test_a_late_end_token_costs_at_most_one_dropped_row(pp, overlap):
    """The row launched before the end token was seen is dropped, and its pages come back after it."""
    config = make_config(pp=pp, overlap=overlap, eos_token_ids=tuple(range(20)))
    request = make_request("a", 0, [1, 2, 3], max_tokens=9)
    loop = Loop(config)
    loop.run([request])
    assert len(request.output_ids) == 1
    assert sum(plan.n_samples for plan in loop.plans) == 1 + overlap


@pytest.mark.parametrize("pp", [2, 3])
def test_micro_batches_are_balanced(pp):
    loop = Loop(make_config(pp=pp, max_num_seqs=8))
    loop.run([make_request(str(i), i, [1 + i], max_tokens=20, ignore_eos=True) for i in range(2 * pp)])
    steady = [plan.n_rows for plan in loop.plans[2 * pp : 10 * pp]]
    assert set(steady) == {2}


def test_consecutive_chunks_with_pipeline_stages():
    loop = Loop(make_config(pp=3, max_num_batched_tokens=4))
    loop.run([make_request("a", 0, range(1, 13), max_tokens=1)])
    assert [plan.n_tokens for plan in loop.plans[:3]] == [4, 4, 4]


def test_plans_do_not_depend_on_token_values():
    """Two runs that sample different tokens make the same plans but for the tokens themselves."""

    def shapes(offset):
        loop = Loop(make_config(n_pages=8, max_num_seqs=3, prefix_caching=False))
        loop.run([make_request(str(i), i, [offset + i] * (3 + 2 * i), max_tokens=12, ignore_eos=True) for i in range(5)])
        names = ("slots", "starts", "counts", "samples", "pages", "freed_pages")
        assert loop.scheduler.stats.preemptions > 0
        return [[getattr(plan, name).tolist() for name in names] for plan in loop.plans], [r.output_ids for r, _ in loop.events]

    (one, tokens_one), (two, tokens_two) = shapes(1), shapes(100)
    assert one == two and tokens_one != tokens_two


def test_requests_of_a_step_are_known_until_it_completes():
    scheduler = Scheduler(make_config())
    a, b = make_request("a", 0, [1]), make_request("b", 1, [2])
    scheduler.add(a)
    scheduler.add(b)
    scheduler.schedule()
    scheduler.abort("a")
    assert scheduler.requests_of(0) == [a, b] and scheduler.running_requests() == [b]
    assert scheduler.complete(0, [5, 6]) == [(b, 6)]
    with pytest.raises(AssertionError, match="step 0 is not under way"):
        scheduler.requests_of(0)


def test_steps_complete_in_order_with_all_their_tokens():
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("a", 0, [1]))
    scheduler.schedule()
    scheduler.schedule()
    with pytest.raises(AssertionError, match="cannot be skipped"):
        scheduler.skip(0)
    with pytest.raises(AssertionError, match="sampled 1 tokens, 2 came back"):
        scheduler.complete(0, [1, 2])
    with pytest.raises(AssertionError, match="step 2 completed, but the oldest is another"):
        scheduler.complete(2, [])


def test_state_of_a_request_on_its_way():
    scheduler = Scheduler(make_config())
    request = make_request("a", 0, [1, 2, 3], max_tokens=2, ignore_eos=True)
    scheduler.add(request)
    assert (scheduler.n_waiting, scheduler.n_running, request.state) == (1, 0, RequestState.WAITING)
    scheduler.schedule()
    assert (request.slot, request.computed, request.n_launched, request.total_len, request.last_step) == (0, 3, 1, 4, 0)
    scheduler.schedule()
    assert (scheduler.n_waiting, scheduler.n_running, request.n_launched) == (0, 1, 2)
    scheduler.complete(0, [4])
    assert (request.output_ids, request.n_launched, request.finish_time) == ([4], 1, None) and request.first_token_time is not None
    scheduler.complete(1, [5])
    assert (request.slot, request.pages, request.state) == (-1, [], RequestState.FINISHED)
    assert request.finish_time is not None and scheduler.idle and not scheduler.has_work
