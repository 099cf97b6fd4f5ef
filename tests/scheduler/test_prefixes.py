"""The prefix tree in the scheduler: what is inserted when, and what a newcomer may take."""

from rorqual.engine.request import FinishReason
from rorqual.engine.scheduling.scheduler import Scheduler
from tests.scheduler.harness import EOS, Loop, expect_lone, make_config, make_request

PROMPT = list(range(1, 13))


def cached_of(loop, request):
    loop.run([request])
    expect_lone([request], loop.config)
    return request.cached


def test_hit_is_page_aligned_and_leaves_the_last_token():
    loop = Loop(make_config())
    assert cached_of(loop, make_request("a", 0, PROMPT, max_tokens=1)) == 0
    assert cached_of(loop, make_request("b", 1, PROMPT, max_tokens=1)) == 8  # not 12: the last token is computed
    assert cached_of(loop, make_request("c", 2, PROMPT + [50], max_tokens=1)) == 12
    assert cached_of(loop, make_request("d", 3, PROMPT[:7] + [50, 51], max_tokens=1)) == 4
    assert loop.scheduler.stats.cached_tokens == 24
    assert loop.scheduler.stats.computed_tokens == 12 + 4 + 1 + 5


def test_prompt_is_shared_while_its_first_owner_still_runs():
    loop = Loop(make_config())
    first = make_request("a", 0, PROMPT, max_tokens=20, ignore_eos=True)
    loop.scheduler.add(first)
    for _ in range(4):
        loop.tick()
    second = make_request("b", 1, PROMPT + [40], max_tokens=20, ignore_eos=True)
    loop.scheduler.add(second)
    loop.tick()
    assert second.cached == 12 and second.pages[:3] == first.pages[:3]
    loop.run()
    expect_lone([first, second], loop.config)


def test_outputs_are_cached_for_the_next_turn():
    loop = Loop(make_config())
    first = make_request("a", 0, PROMPT, max_tokens=9, ignore_eos=True)
    loop.run([first])
    # 21 tokens; the newest has no row: 20 rows, 5 pages
    second = make_request("b", 1, PROMPT + first.output_ids + [30], max_tokens=2)
    assert cached_of(loop, second) == 20


def test_only_known_tokens_are_cached_after_a_cut():
    scheduler = Scheduler(make_config(page_size=1, overlap=False))
    request = make_request("a", 0, [1, 2], max_tokens=9, ignore_eos=True)
    scheduler.add(request)
    for token in (3, 4, 5):
        scheduler.complete(scheduler.schedule().step, [token])
    scheduler.finish(request, FinishReason.STOP, "x", keep_tokens=1)
    assert scheduler._pool.cache.n_pages == 3 and scheduler.idle
    scheduler.check()


def test_duplicates_of_prompts_computed_side_by_side():
    """Both compute the same prompt; the tree keeps one set of pages, and both keep what their page tables name."""
    loop = Loop(make_config(max_num_batched_tokens=64))
    a, b = (make_request(name, i, PROMPT + [20], max_tokens=12, ignore_eos=True) for i, name in enumerate("ab"))
    for request in (a, b):
        loop.scheduler.add(request)
    for _ in range(5):
        loop.tick()
    assert not set(a.pages).intersection(b.pages)
    assert loop.scheduler._pool.cache.n_pages == 3
    loop.run()
    expect_lone([a, b], loop.config)


def test_duplicates_pin_no_pages():
    """b runs on its own copies, so the tree's copies can be evicted when b needs room, and b ends."""
    config = make_config(n_pages=8, page_size=2, max_model_len=16, max_num_batched_tokens=64)
    loop = Loop(config)
    a = make_request("a", 0, [1, 2, 3, 4, 5], max_tokens=1)
    b = make_request("b", 1, [1, 2, 3, 4, 5], max_tokens=11, ignore_eos=True)
    loop.run([a, b])
    assert b.cached == 0 and b.preemptions == 0 and loop.scheduler.stats.evictions > 0
    expect_lone([a, b], config)


def test_prompt_logprobs_take_no_hits_but_give_them():
    loop = Loop(make_config())
    loop.run([make_request("a", 0, PROMPT, max_tokens=1)])
    assert cached_of(loop, make_request("b", 1, PROMPT, max_tokens=1, prompt_logprobs=0)) == 0
    loop.scheduler.flush_prefix_cache()
    assert cached_of(loop, make_request("c", 2, PROMPT, max_tokens=1, prompt_logprobs=0)) == 0
    assert cached_of(loop, make_request("d", 3, PROMPT, max_tokens=1)) == 8


def test_off_switch():
    loop = Loop(make_config(prefix_caching=False))
    for i in range(2):
        assert cached_of(loop, make_request(str(i), i, PROMPT, max_tokens=3)) == 0
    assert loop.scheduler._pool.cache.n_pages == 0 and loop.scheduler._pool.pages.n_free == loop.config.n_pages


def test_flush_keeps_what_runs():
    loop = Loop(make_config())
    loop.run([make_request("a", 0, [60] * 9, max_tokens=1)])
    request = make_request("b", 1, PROMPT, max_tokens=20, ignore_eos=True)
    loop.scheduler.add(request)
    for _ in range(4):
        loop.tick()
    assert loop.scheduler.flush_prefix_cache() == 2
    assert loop.scheduler._pool.cache.n_pages == 3
    loop.run()
    expect_lone([request], loop.config)


def test_pages_after_a_late_end_token_are_cached_with_it():
    """The row launched before the end token was seen wrote that token's row: it is right, and may be reused."""
    config = make_config(page_size=1, eos_token_ids=tuple(range(20)))
    loop = Loop(config)
    first = make_request("a", 0, [1, 2], max_tokens=9)
    loop.run([first])
    assert loop.scheduler._pool.cache.n_pages == 3 and len(first.output_ids) == 1
    assert cached_of(loop, make_request("b", 1, [1, 2, first.output_ids[0], 30], max_tokens=1)) == 3
    assert EOS == 0
