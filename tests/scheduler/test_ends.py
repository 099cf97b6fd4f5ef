"""How requests end: end tokens, stop tokens, stop strings found by the caller, aborts."""

import pytest

from rorqual.engine.request import FinishReason, RequestState
from rorqual.engine.scheduling.scheduler import Scheduler
from tests.scheduler.harness import EOS, Loop, expect_lone, make_config, make_request


def feed(tokens, **params):
    scheduler = Scheduler(make_config(overlap=False))
    request = make_request("a", 0, [1], **params)
    scheduler.add(request)
    for token in tokens:
        step = scheduler.schedule().step
        scheduler.complete(step, [token])
    return scheduler, request


def test_end_token():
    _, request = feed([5, EOS])
    assert (request.output_ids, request.finish_reason, request.stop_reason) == ([5, EOS], FinishReason.STOP, None)


def test_end_token_ignored():
    _, request = feed([5, EOS, 4], ignore_eos=True)
    assert request.state is RequestState.RUNNING


def test_stop_token_is_named():
    _, request = feed([5, 9], stop_token_ids=[9], ignore_eos=True)
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, 9)


def test_nothing_stops_before_min_tokens():
    _, request = feed([EOS, 9, 5], stop_token_ids=[9], min_tokens=3)
    assert request.state is RequestState.RUNNING
    _, request = feed([EOS, 9, 5, 9], stop_token_ids=[9], min_tokens=3)
    assert request.stop_reason == 9


def test_length():
    _, request = feed([5, 5, 5], max_tokens=3)
    assert (request.finish_reason, request.stop_reason) == (FinishReason.LENGTH, None)


def test_an_end_token_at_the_length_limit_is_a_stop():
    _, request = feed([5, EOS], max_tokens=2)
    assert request.finish_reason is FinishReason.STOP


def test_stop_string_found_by_the_caller():
    """The caller cuts the output; the token under way is dropped."""
    scheduler = Scheduler(make_config())
    request = make_request("a", 0, [1, 2], ignore_eos=True)
    scheduler.add(request)
    scheduler.schedule()
    scheduler.schedule()
    assert scheduler.complete(0, [7]) == [(request, 7)]
    scheduler.schedule()
    assert scheduler.complete(1, [8]) == [(request, 8)]
    scheduler.finish(request, FinishReason.STOP, "xy", keep_tokens=1)
    assert (request.output_ids, request.finish_reason, request.stop_reason) == ([7], FinishReason.STOP, "xy")
    assert scheduler.has_work  # step 2 names it
    assert scheduler.complete(2, [9]) == [] and request.output_ids == [7]
    assert scheduler.idle
    scheduler.check()


def test_stop_string_in_the_last_allowed_token():
    scheduler, request = feed([5, 5], max_tokens=2)
    assert request.finish_reason is FinishReason.LENGTH
    scheduler.finish(request, FinishReason.STOP, "x")
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "x")
    scheduler.check()


def test_abort_of_unknown_and_ended_requests_is_ignored():
    scheduler, request = feed([5, EOS])
    assert scheduler.abort("never seen") is False and scheduler.abort("a") is False
    assert request.finish_reason is FinishReason.STOP


def test_abort_while_waiting():
    scheduler = Scheduler(make_config(max_num_seqs=1))
    requests = [make_request(str(i), i, [1]) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    assert scheduler.abort("1") and scheduler.n_waiting == 1
    assert requests[1].finish_reason is FinishReason.ABORT and requests[1].finish_time is not None


def test_many_aborts_while_waiting_leave_nothing_behind():
    scheduler = Scheduler(make_config(max_num_seqs=1))
    for i in range(1000):
        scheduler.add(make_request(str(i), i, [1]))
    for i in range(1, 1000):
        assert scheduler.abort(str(i))
    assert scheduler.n_waiting == 1 and len(scheduler._waiting._heap) <= 65


def test_an_id_may_be_used_again_after_its_end():
    loop = Loop(make_config())
    loop.run([make_request("a", 0, [1, 2])])
    again = make_request("a", 1, [1, 2])
    loop.run([again])
    expect_lone([again], loop.config)


def scenario(pp, overlap, caching):
    limits = {"page_size": 2, "n_pages": 9, "max_num_seqs": 3, "max_num_batched_tokens": 5, "admission_horizon": 0}
    config = make_config(**limits, pp=pp, overlap=overlap, prefix_caching=caching)
    shared = [1, 2, 3, 4]
    requests = [make_request(str(i), i, shared + [5 + i] * i, max_tokens=4, ignore_eos=True) for i in range(4)]
    return config, requests


LAYOUTS = [(1, True, True), (1, False, False), (2, True, True), (2, False, True), (3, True, False)]


@pytest.mark.parametrize(("pp", "overlap", "caching"), LAYOUTS)
def test_abort_of_every_request_at_every_step(pp, overlap, caching):
    """Enumerated, before the step is scheduled and between scheduling and launch; the neighbours' tokens stay the same."""
    config, requests = scenario(pp, overlap, caching)
    base = Loop(config)
    base.run(requests)
    expect_lone(requests, config)
    steps = len(base.plans)
    for at in range(steps):
        for victim in range(4):
            for late in (False, True):
                config, requests = scenario(pp, overlap, caching)
                loop = Loop(config)
                for request in requests:
                    loop.scheduler.add(request)
                launch = loop.device.launch

                def between(plan, loop=loop, launch=launch, at=at, victim=victim, late=late):
                    if late and plan.step == at:
                        loop.scheduler.abort(str(victim))
                    launch(plan)

                loop.device.launch = between
                while loop.scheduler.has_work:
                    if loop.scheduler._step == at and not late:
                        loop.scheduler.abort(str(victim))
                    loop.tick()
                loop.drain()
                ended = [r for r in requests if r.finish_reason is not FinishReason.ABORT]
                assert len(ended) >= 3
                expect_lone(ended, config)
