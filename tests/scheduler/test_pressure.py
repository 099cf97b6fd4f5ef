"""Too few pages or slots: admission, eviction, preemption, progress."""

import pytest

from rorqual.engine.request import RequestState
from rorqual.engine.scheduling.scheduler import Scheduler
from tests.scheduler.harness import Loop, expect_lone, make_config, make_request


def order_of_first_rows(loop, requests):
    seen = []
    for _, names in loop.rows:
        seen.extend(name for name in names if name not in seen)
    return seen


class Recorded(Loop):
    """A loop that also remembers whose rows each plan has."""

    def __post_init__(self):
        super().__post_init__()
        self.rows = []

    def check_plan(self, plan):
        super().check_plan(plan)
        self.rows.append((plan, [r.request_id for r in self.scheduler.requests_of(plan.step)]))


def test_admission_by_priority_then_arrival():
    loop = Recorded(make_config(max_num_seqs=1))
    ranks = {"a": 1, "b": 0, "c": 1, "d": -1}
    requests = [make_request(name, i, [1, 2], priority=p, max_tokens=2) for i, (name, p) in enumerate(ranks.items())]
    loop.run(requests)
    assert order_of_first_rows(loop, requests) == ["d", "b", "a", "c"]


def test_nobody_overtakes_the_first_that_does_not_fit():
    """b is too large beside a; c would fit, but waits behind b."""
    config = make_config(n_pages=8, prefix_caching=False)
    loop = Recorded(config)
    requests = [
        make_request("a", 0, range(1, 17), max_tokens=8, ignore_eos=True),
        make_request("b", 1, range(1, 17), max_tokens=8, ignore_eos=True),
        make_request("c", 2, [1], max_tokens=1),
    ]
    loop.run(requests)
    assert order_of_first_rows(loop, requests) == ["a", "b", "c"]
    first_b = next(i for i, (_, names) in enumerate(loop.rows) if "b" in names)
    assert not any("c" in names for _, names in loop.rows[:first_b])
    expect_lone(requests, config)


def test_the_tree_is_evicted_before_anybody_is_preempted():
    config = make_config(n_pages=8)
    loop = Loop(config)
    loop.run([make_request("a", 0, range(1, 21), max_tokens=1)])
    assert loop.scheduler._pool.cache.n_pages == 5
    requests = [make_request(str(i), i, [50 + i] * 8, max_tokens=8, ignore_eos=True) for i in (1, 2)]
    loop.run(requests)
    assert loop.scheduler.stats.evictions > 0 and loop.scheduler.stats.preemptions == 0
    expect_lone(requests, config)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_lowest_ranked_is_preempted_and_recomputed(overlap):
    config = make_config(n_pages=6, overlap=overlap, prefix_caching=False, page_size=2, admission_horizon=0)
    loop = Loop(config)
    high = make_request("high", 1, [1, 2], priority=0, max_tokens=10, ignore_eos=True)
    low = make_request("low", 0, [3, 4], priority=1, max_tokens=10, ignore_eos=True)
    loop.scheduler.add(low)
    loop.tick()
    loop.run([high])
    assert (high.preemptions, low.preemptions) == (0, loop.scheduler.stats.preemptions) and low.preemptions >= 1
    expect_lone([high, low], config)


def test_a_preempted_request_gets_its_pages_back_from_the_tree():
    """What it computed is in the tree when it leaves; as long as nobody needs the pages, nothing is computed twice."""
    config = make_config(n_pages=8, page_size=1, max_num_batched_tokens=4, overlap=False)
    loop = Loop(config)
    low = make_request("low", 0, [1, 2, 3], priority=1, max_tokens=5, ignore_eos=True)
    loop.scheduler.add(low)
    loop.tick()
    loop.tick()
    assert loop.scheduler.preempt("low")
    assert low.state is RequestState.WAITING and (low.slot, low.pages, low.computed) == (-1, [], 0)
    loop.run()
    assert low.cached == 4 and low.preemptions == 1
    expect_lone([low], config)


def test_tokens_under_way_of_a_preempted_request_stay_valid():
    """It is preempted with a token unseen, and comes back only after that token is known."""
    config = make_config()
    loop = Loop(config)
    request = make_request("a", 0, [1, 2, 3], max_tokens=6, ignore_eos=True)
    loop.scheduler.add(request)
    loop.tick()
    loop.tick()
    assert request.n_launched == 1
    pool = loop.scheduler._pool
    assert loop.scheduler.preempt("a") and not loop.scheduler.preempt("a") and not loop.scheduler.preempt("b")
    assert pool.leaving and pool.slots.n_free == 3  # the slot is not back yet
    assert loop.tick().n_rows == 0
    assert request.n_launched == 0 and len(request.output_ids) == 2 and not pool.leaving
    loop.run()
    expect_lone([request], config)


def test_a_request_that_ends_while_preempted_is_not_readmitted():
    loop = Loop(make_config(eos_token_ids=tuple(range(20))))
    request = make_request("a", 0, [1, 2, 3], max_tokens=6)
    loop.scheduler.add(request)
    plan = loop.scheduler.schedule()
    loop.device.launch(plan)
    assert loop.scheduler.preempt("a") and not loop.scheduler.preempt("a") and not loop.scheduler.preempt("b")
    loop.scheduler.complete(plan.step, loop.device.results[plan.step])
    assert request.state is RequestState.FINISHED and loop.scheduler.n_waiting == 0 and loop.scheduler.idle
    loop.scheduler.check()
    assert loop.scheduler.schedule().n_rows == 0


def test_no_admission_in_a_step_that_is_short_of_pages():
    config = make_config(n_pages=6, page_size=2, prefix_caching=False, overlap=False, admission_horizon=0)
    loop = Recorded(config)
    requests = [make_request(str(i), i, [1 + i, 2], max_tokens=8, ignore_eos=True) for i in range(3)]
    for request in requests:
        loop.scheduler.add(request)
    while loop.scheduler.has_work:
        before, running = loop.scheduler.stats.preemptions, set(map(id, loop.scheduler.running_requests()))
        plan = loop.scheduler.schedule()
        if loop.scheduler.stats.preemptions > before:
            assert len(plan.new_ints) == 0 and set(map(id, loop.scheduler.running_requests())) < running
        loop.device.launch(plan)
        loop.scheduler.complete(plan.step, loop.device.results[plan.step])
    assert loop.scheduler.stats.preemptions > 0
    expect_lone(requests, config)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize(("chunk", "horizon"), [(1, 16), (3, 0), (64, 0), (64, 16)])
def test_a_pool_for_one_finishes_all_and_the_first_is_never_preempted(pp, overlap, caching, chunk, horizon):
    limits = {"n_pages": 4, "page_size": 4, "max_model_len": 16, "max_num_batched_tokens": chunk, "admission_horizon": horizon}
    config = make_config(**limits, pp=pp, overlap=overlap, prefix_caching=caching)
    requests = [make_request(str(i), i, [1 + i % 3] * (1 + i), max_tokens=16, ignore_eos=i % 2 == 0) for i in range(8)]
    loop = Loop(config)
    loop.run(requests)
    expect_lone(requests, config)
    assert requests[0].preemptions == 0
    assert max(request.preemptions for request in requests) <= 8


@pytest.mark.parametrize(("horizon", "most"), [(16, 1), (4, 3), (0, 10)])
def test_preemptions_stay_bounded_under_steady_arrivals(horizon, most):
    """Fresh requests keep coming; each one loses its pages at most a few times, since it must fit whole to come back."""
    config = make_config(n_pages=24, page_size=1, max_num_seqs=6, max_num_batched_tokens=8, admission_horizon=horizon)
    loop = Loop(config)
    requests = [make_request(str(i), i, [1 + i % 4, 2, 3 + i % 5], max_tokens=16, ignore_eos=True) for i in range(60)]
    for i, request in enumerate(requests):
        loop.scheduler.add(request)
        if i > 5:
            loop.tick()
    loop.run()
    expect_lone(requests, config)
    assert max(request.preemptions for request in requests) <= most


def test_the_first_in_rank_advances_in_every_round():
    """Under pressure the highest ranked request has a row at least once per lag of steps."""
    for overlap in (False, True):
        config = make_config(n_pages=6, page_size=2, overlap=overlap, max_num_seqs=4, admission_horizon=0)
        loop = Recorded(config)
        requests = [make_request(str(i), i, [1 + i], max_tokens=11, ignore_eos=True) for i in range(4)]
        loop.run(requests)
        steps = [i for i, (_, names) in enumerate(loop.rows) if "0" in names]
        assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) <= 1 + config.lag + int(overlap)
        assert requests[0].preemptions == 0


def test_a_decode_without_pages_does_not_hold_back_the_first_in_rank():
    """The budget is one token. The lower ranked decode finds no page; that token must go to the prefill above it."""
    limits = {"max_num_batched_tokens": 1, "page_size": 1, "n_pages": 18, "max_model_len": 18, "admission_horizon": 0}
    config = make_config(**limits, pp=2, overlap=False, prefix_caching=False)
    low = make_request("low", 1, [1] * 4, priority=1, max_tokens=30, ignore_eos=True)
    high = make_request("high", 2, [2] * 9, max_tokens=30, ignore_eos=True)
    loop = Loop(config)
    loop.scheduler.add(low)
    while not low.output_ids:
        loop.tick()
    loop.run([high], limit=400)
    assert high.preemptions == 0
    expect_lone([low, high], config)


def test_a_slot_returns_only_after_the_last_step_that_names_it():
    scheduler = Scheduler(make_config(max_num_seqs=1))
    scheduler.add(make_request("a", 0, [1], max_tokens=9))
    scheduler.add(make_request("b", 1, [2], max_tokens=9))
    scheduler.schedule()
    scheduler.schedule()
    scheduler.complete(0, [0])  # the end token of a; step 1 names its slot
    assert scheduler.n_running == 0 and scheduler.schedule().n_rows == 0
    scheduler.complete(1, [5])
    scheduler.skip(2)
    plan = scheduler.schedule()
    assert plan.n_rows == 1 and plan.new_ints[0, 0] == 0 and scheduler.running_requests()[0].request_id == "b"
