"""What routing is for, in virtual time: first tokens come sooner, and nobody is left with the work of the others."""

import pytest

from rorqual.engine.serving.routing.settings import RoutingSettings
from tests.serving.routing.replicas import Replicas, SharedPrefixes

LOAD = SharedPrefixes(requests=240)


def run(policy, load=LOAD, **more):
    return Replicas(RoutingSettings(dp_routing=policy), **more).run(load.arrivals())


def test_kv_halves_the_time_to_first_token_of_round_robin_and_stays_balanced():
    turns, kv = run("round_robin"), run("kv")
    assert turns.mean_ttft >= 2 * kv.mean_ttft
    assert kv.balance <= 1.2
    assert sum(kv.computed) < sum(turns.computed) / 2
    view = kv.view
    assert sum(view["picked"]) == 240 and view["lost_news"] == view["ignored_blocks"] == 0
    assert sum(view["hit_blocks"]) > 0.7 * sum(view["prompt_blocks"])


def test_popular_prefixes_do_not_leave_ranks_without_work():
    """Zipf's law: the first group has a quarter of all requests."""
    load = SharedPrefixes(requests=160, skew=1.0)
    assert run("kv", load).balance <= 1.2


@pytest.mark.parametrize("policy", ["total_tokens", "kv"])
def test_a_burst_of_different_prompts_is_spread_evenly(policy):
    """All at once, before any replica has told anything."""
    load = SharedPrefixes(groups=1000, requests=48, prefix=256, rate=1e6)
    assert run(policy, load, dp=8).balance < 1.2


def test_the_router_knows_what_every_tree_holds_after_a_run_and_a_flush():
    replicas = Replicas(RoutingSettings(dp_routing="kv"), dp=2, pool_tokens=6144, debug=True)
    replicas.run(SharedPrefixes(groups=8, requests=40).arrivals())
    for flush in (False, True):
        for rank, (scheduler, log) in enumerate(zip(replicas.schedulers, replicas.logs, strict=True)):
            if flush:
                assert scheduler.flush_prefix_cache() > 0
                replicas.router.heard(rank, log.take())
            assert replicas.router.index.blocks[rank] == scheduler._pool.cache.n_pages
    assert replicas.router.index.blocks == [0, 0] and not replicas.router.index._ranks
