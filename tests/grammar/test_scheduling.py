"""A request with a grammar is never ahead of its own tokens; others go on as ever."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.harness import Loop, expect_lone, make_config, make_request


def requests(count: int, *, every: int = 2, seed: int = 1, **params: object):
    draw = random.Random(seed)
    found = []
    for i in range(count):
        prompt = [draw.randrange(1, 13) for _ in range(draw.randrange(1, 20))]
        found.append(make_request(str(i), i, prompt, max_tokens=draw.randrange(1, 14), **params))
        found[-1].grammar = "g" if i % every == 0 else None
    return found


class Watching(Loop):
    """Looks at every plan: rows of requests with a grammar sample only when all before is known."""

    guided = ahead = 0

    def check_plan(self, plan):
        super().check_plan(plan)
        for request, samples in zip(self.scheduler.requests_of(plan.step), plan.samples.tolist(), strict=True):
            if request.grammar is not None and samples:
                self.guided += 1
                assert request.n_launched == 1, "its last token is not known, so nobody can tell what may come next"
            elif samples:
                self.ahead += request.n_launched > 1


@pytest.mark.parametrize(
    "settings", [{}, {"overlap": False}, {"pp": 2}, {"pp": 4}, {"pp": 2, "overlap": False}, {"max_num_batched_tokens": 3}]
)
@pytest.mark.parametrize("hurry", [True, False])
def test_never_ahead_of_its_own_tokens_and_the_tokens_stay_the_same(settings, hurry):
    config, asked = make_config(**settings), requests(12)
    loop = Watching(config, hurry=hurry)
    loop.run(asked)
    expect_lone(asked, config)
    assert loop.guided
    assert (loop.ahead > 0) == config.overlap  # the others are


def test_small_pool_preempts_and_keeps_tokens():
    config, asked = make_config(n_pages=9, max_model_len=32, admission_horizon=0), requests(16, ignore_eos=True)
    loop = Watching(config, hurry=True)
    loop.run(asked)
    expect_lone(asked, config)
    assert loop.scheduler.stats.preemptions


@pytest.mark.parametrize("seed", range(4))
def test_preempted_and_aborted_at_any_moment(seed):
    config, asked, draw = make_config(n_pages=24, pp=1 + seed % 3), requests(14, seed=seed), random.Random(seed)
    loop = Watching(config, hurry=bool(seed % 2))
    for request in asked:
        loop.scheduler.add(request)
    gone = set()
    while loop.scheduler.has_work:
        name = str(draw.randrange(14))
        if draw.random() < 0.1 and loop.scheduler.abort(name):
            gone.add(name)
        elif draw.random() < 0.2:
            loop.scheduler.preempt(name)
        loop.tick()
    loop.drain()
    expect_lone([r for r in asked if r.request_id not in gone], config)


def test_all_rows_with_grammars_leave_every_other_step_to_the_results():
    config, asked = make_config(), requests(3, every=1, ignore_eos=True)
    loop = Watching(config, hurry=True)
    loop.run(asked)
    longest = max(len(r.output_ids) for r in asked)
    assert loop.plans[-1].step <= 2 * longest + 6  # no step is lost to waiting
