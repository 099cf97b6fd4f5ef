"""Choices of the router, and its accounts, against a slow twin."""

import random

import pytest

from rorqual.engine.serving.routing.kv_log import KvLog
from rorqual.engine.serving.routing.router import Router
from rorqual.engine.serving.routing.settings import RoutingSettings
from rorqual.engine.serving.settings import ServeSettings


def router(policy, n_ranks=4, page_size=4, **more):
    return Router(n_ranks, RoutingSettings(dp_routing=policy, **more), page_size=page_size)


def place(found, names, n_prompt=8, max_tokens=2):
    return [found.pick(str(name), [1] * n_prompt, max_tokens, sure=True) for name in names]


@pytest.mark.parametrize("policy", ["round_robin", "total_requests", "total_tokens"])
def test_a_burst_of_equal_requests_is_spread_evenly(policy):
    found = router(policy)
    assert place(found, range(8)) == [0, 1, 2, 3] * 2
    for name in range(8):
        found.done(str(name))
    assert place(found, range(4)) == [0, 1, 2, 3] and found.tokens == [10] * 4


def test_ties_go_round_when_requests_come_one_by_one():
    """Idle ranks take turns: always the first one would wear one replica's cache and leave the others cold."""
    for policy in ("total_requests", "total_tokens", "kv"):
        found, seen = router(policy), []
        for name in range(8):
            seen.append(found.pick("x", [name] * 8, 4))
            found.done("x")
        assert seen == [0, 1, 2, 3] * 2, policy


def test_tokens_count_not_requests():
    found = router("total_tokens")
    place(found, range(8), 8, 2)
    found.done("2")
    found.done("6")
    assert found.pick("a", [1] * 3, 2, sure=True) == 2
    assert found.pick("b", [1] * 98, 2, sure=True) == 2  # 5 tokens are still fewer than 20
    assert found.tokens == [20, 20, 105, 20]
    found = router("total_requests", 2)
    assert [found.pick("a", [1] * 100, 1), found.pick("b", [1], 1), found.pick("c", [1], 1)] == [0, 1, 0]


def test_skew_of_a_homogeneous_load_is_one_request():
    """Requests that end in any order: no rank gets more than one request (of tokens) ahead when it is chosen."""
    rng, found, open_names = random.Random(1), router("total_tokens"), []
    for name in range(4000):
        if len(open_names) >= 64:
            found.done(open_names.pop(rng.randrange(64)))
        rank = found.pick(str(name), [1] * 10, 6, sure=True)
        open_names.append(str(name))
        assert found.tokens[rank] - min(found.tokens) <= 16
    picked = found.snapshot()["picked"]
    assert max(picked) / (sum(picked) / 4) < 1.05


def test_output_is_expected_to_be_as_long_as_of_late():
    found = router("total_tokens", 1)
    found.pick("a", [1], 100_000)
    assert found.tokens == [513]
    for name in range(300):
        found.pick(str(name), [1], 100_000)
        found.done(str(name), 20)
    found.pick("b", [1], 100_000)
    assert found.tokens[0] - 513 <= 22
    found.pick("c", [1], 100_000, sure=True)
    assert found.tokens[0] > 100_000


def test_a_named_rank_is_honoured_and_counted():
    found = router("total_tokens")
    assert found.pick("a", [1] * 8, 2, dp_rank=3, sure=True) == 3
    assert found.snapshot()["pinned"] == [0, 0, 0, 1] and found.tokens == [0, 0, 0, 10]
    for bad in (4, -1):
        with pytest.raises(ValueError, match=f"rank {bad} was asked for; there are ranks 0 to 3"):
            found.pick("b", [1], 1, dp_rank=bad)
    assert found.snapshot()["picked"] == [0, 0, 0, 1]
    found.done("nobody")
    found.began("nobody")


def test_kv_goes_where_the_prefix_is_unless_that_rank_is_busy():
    found, log = router("kv"), KvLog(lambda: ())
    prefix, shared = list(range(40)), 10
    log.stored(found.hashes(prefix))
    found.heard(2, log.take())
    assert found.pick("a", [*prefix, 7], 2) == 2
    assert found.snapshot()["hit_blocks"] == [0, 0, shared, 0]
    assert found.pick("b", [*range(100, 108)], 2, dp_rank=2) == 2
    assert found.pick("c", [*prefix, 8], 2) == 2  # still the cheapest one
    for name in range(3):
        found.pick(f"d{name}", [*range(200 + 40 * name, 240 + 40 * name)], 2, dp_rank=2)
    assert found.pick("e", [*prefix, 9], 2) != 2


def test_kv_counts_on_what_it_has_just_sent_somewhere():
    """Nothing is cached yet, but a request with the prefix is under way: the next one follows once that costs least."""
    found = router("kv")
    first = found.pick("first", [*range(400), 1], 2)
    assert found.pick("at once", [*range(400), 2], 2) != first  # it would have to wait there for as long as it takes elsewhere
    found.began("first")
    assert found.pick("later", [*range(400), 3], 2) == first
    for name in ("first", "at once", "later"):
        found.done(name)
    assert not found._users and not found._soon
    assert found.pick("much later", [*range(400)], 2) not in (first,)  # nobody told that it was stored


def test_a_popular_prefix_is_taken_to_others_when_all_are_busy_but_a_lone_conversation_stays():
    lone, log = router("kv", 2), KvLog(lambda: ())
    log.stored(lone.hashes(range(40)))
    news = log.take()
    lone.heard(0, news)
    for turn in range(100):
        assert lone.pick("x", [*range(40), turn], 2) == 0
        lone.done("x")
    busy = router("kv", 2)
    busy.heard(0, news)
    for rank in range(2):
        busy.pick(f"other {rank}", [9], 2, dp_rank=rank)
    seen = []
    for turn in range(100):
        seen.append(busy.pick("x", [*range(40), turn], 2))
        busy.done("x")
    assert seen[:4] == [0] * 4 and 10 < sum(seen) < 50


def test_weight_zero_forgets_the_prefix_and_temperature_draws():
    log = KvLog(lambda: ())
    cold = router("kv", 2, overlap_score_weight=0.0)
    log.stored(cold.hashes(range(40)))
    news = log.take()
    cold.heard(1, news)
    assert cold.pick("a", [*range(40)], 2) == 0
    warm = router("kv", 2, router_temperature=1.0)
    warm.heard(1, news)
    seen = []
    for _ in range(300):
        seen.append(warm.pick("a", [*range(40)], 2))
        warm.done("a")
    assert 0.65 < sum(seen) / 300 < 0.81  # 1 / (1 + 1/e) is 0.731
    again = router("kv", 2, router_temperature=1.0)
    again.heard(1, news)
    assert again.pick("a", [*range(40)], 2) == seen[0]


@pytest.mark.parametrize("policy", ["round_robin", "total_requests", "total_tokens", "kv"])
def test_accounts_are_those_of_a_slow_twin_and_end_at_zero(policy):
    rng, found, open_ones = random.Random(2), router(policy), {}
    for name in map(str, range(600)):
        prompt = [*([rng.randrange(3)] * rng.randrange(0, 40)), rng.randrange(100)]
        rank = found.pick(name, prompt, 6, sure=True, dp_rank=rng.choice([None, None, 1]))
        open_ones[name] = (rank, prompt)
        for act in (found.began, found.done):
            if len(open_ones) > 20:
                ended = rng.choice(list(open_ones))
                act(ended)
                if act == found.done:
                    del open_ones[ended]
        mine = [[p for r, p in open_ones.values() if r == rank] for rank in range(4)]
        view = found.snapshot()
        assert view["open_requests"] == [len(m) for m in mine]
        assert view["open_tokens"] == [sum(len(p) + 6 for p in m) for m in mine]
        if policy == "kv":
            assert view["decode_blocks"] == [sum(-(-(len(p) + 6) // 4) for p in m) for m in mine]
        assert min(view["prefill_blocks"]) >= 0
    for name in open_ones:
        found.done(name)
    view = found.snapshot()
    for key in ("open_requests", "open_tokens", "prefill_blocks", "decode_blocks"):
        assert view[key] == [0] * 4, key
    assert not found._users and not found._soon and not found._open


def test_prompts_as_bytes_and_as_ids_are_the_same():
    import numpy as np

    found = router("kv")
    data = np.arange(40, dtype="<i4").tobytes()
    found.heard(3, _news(found, range(40)))
    assert found.pick("a", data, 2) == 3
    found.done("a")
    assert found.pick("a", list(range(40)), 2) == 3


def _news(found, tokens):
    log = KvLog(lambda: ())
    log.stored(found.hashes(tokens))
    return log.take()


@pytest.mark.parametrize(
    ("name", "value"),
    [("dp_routing", "best"), ("overlap_score_weight", -1.0), ("router_temperature", float("nan"))],
)
def test_bad_settings_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        RoutingSettings(**{name: value})


def test_counts_below_the_least_are_named_by_their_flag():
    with pytest.raises(ValueError, match="^--router-max-blocks must be at least 1, found 0$"):
        RoutingSettings(router_max_blocks=0)
    with pytest.raises(ValueError, match="^--max-queued-requests must be at least 0, found -1$"):
        ServeSettings(max_queued_requests=-1)
    assert ServeSettings(max_queued_requests=0).max_queued_requests == 0


def test_one_rank_hashes_nothing():
    found = router("kv", 1)
    assert not found.uses_kv and found.pick("a", [1] * 400, 4) == 0 and not found._users


@pytest.mark.parametrize("policy", ["round_robin", "total_requests", "total_tokens", "kv"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_those_that_may_be_chosen_are_and_they_share_alike(policy, temperature):
    found = router(policy, router_temperature=temperature)
    for name in range(40):
        assert found.pick(str(name), [name] * 8, 4, among={1, 3}) in (1, 3)
    picked = found.snapshot()["picked"]
    assert picked[0] == picked[2] == 0 and abs(picked[1] - picked[3]) <= (0 if temperature == 0 else 4)
