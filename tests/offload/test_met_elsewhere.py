"""What users of other engines met with rows in host memory, where no other test has it. docs/host-kv.md lists all of them."""

from __future__ import annotations

import random
import time

import pytest

from rorqual import SamplingParams
from rorqual.engine.offload.mover import Mover
from rorqual.engine.offload.plan_report import largest_batch
from tests.checkpoints import checkpoint, hf_model, stable_indexer
from tests.engine.parity import greedy_tokens, ragged_prompts
from tests.offload.engines import PROMPTS, alone, counters, expect_idle, make, params
from tests.offload.live import Live
from tests.offload.test_engine import TIGHT, TP
from tests.offload.tiered import TieredLoop, tiered
from tests.oracle.test_engine import assert_greedy_equals
from tests.ranks import run_ranks
from tests.scheduler.harness import make_config, make_request

POLICIES = pytest.mark.parametrize("policy", ["host", "hybrid"])


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1")  # what is free holds NaN


@POLICIES
def test_every_request_loses_its_pages_once_and_goes_on(policy):
    with make(policy, seed=9) as llm:
        live, pushed = Live(llm), set()
        for place, prompt in enumerate(PROMPTS):
            live.add(place, prompt, params())
        while live.open:
            for request in live.scheduler.running_requests():
                if request.output_ids and request.request_id not in pushed and live.scheduler.preempt(request.request_id):
                    pushed.add(request.request_id)
            live.step()
        live.finish(time.monotonic() + 60.0)
        assert len(pushed) == len(PROMPTS) == len(live.ended)
        assert all(asked.tokens == alone(asked.place) for asked in live.ended)
        expect_idle(llm)


@POLICIES
@pytest.mark.parametrize("name", ["v32", "glm_dsa"])
def test_tokens_are_those_of_transformers(policy, name):
    """The reference shares no code with the engine, which compares with itself elsewhere."""
    prompts, found = ragged_prompts(10, longest=90), []
    args = {"kv_offload": policy, "kv_host_memory": 0.2, "kv_device_tokens": 100, "max_total_tokens": 240, "page_size": 4}
    args |= {"max_num_seqs": 5, "max_num_batched_tokens": 32}
    tokens = greedy_tokens(checkpoint(name), prompts=prompts, n=16, check=lambda llm: found.append(counters(llm)), **args)
    assert assert_greedy_equals(stable_indexer(hf_model(checkpoint(name))), prompts, tokens) == 0
    assert found[0]["misses"] > 0


@POLICIES
def test_log_probabilities_have_the_same_bits(policy):
    """Of a request alone: its steps are the same with offloading and without."""
    found = []
    for way in ("off", policy):
        with make(way, max_num_batched_tokens=16) as llm:
            outputs = [llm.generate([prompt], params(16, logprobs=3, prompt_logprobs=1), use_tqdm=False)[0] for prompt in PROMPTS[5::2]]
            rows = [[*o.prompt_logprobs[1:], *o.outputs[0].logprobs] for o in outputs]
            found.append([[{token: entry.logprob for token, entry in row.items()} for row in each] for each in rows])
            assert way != "host" or counters(llm)["misses"] > 0
    assert found[0] == found[1]


@POLICIES
def test_lengths_around_the_selection_the_hot_rows_and_the_pages(policy):
    rng = random.Random(4)
    with make(policy, seed=4, kv_hot_slots_max=None) as llm, make("off", max_total_tokens=2000) as plain:
        limits = llm.engine.leader.scheduler.tier.limits
        edges = {limits.topk, limits.hot_pages * limits.page_size, limits.largest_lease * limits.page_size, 40}
        lengths = sorted({max(1, edge + shift) for edge in edges for shift in range(-2, 3)})
        prompts = [[rng.randrange(3, 512) for _ in range(length)] for length in lengths]
        some = SamplingParams(temperature=0.0, max_tokens=limits.page_size + 2, ignore_eos=True)
        expected = [o.outputs[0].token_ids for o in plain.generate(prompts, some, use_tqdm=False)]
        for prompt, wanted in zip(prompts, expected, strict=True):  # alone
            assert llm.generate([prompt], some, use_tqdm=False)[0].outputs[0].token_ids == wanted, len(prompt)
        llm.reset_prefix_cache()
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, some, use_tqdm=False)] == expected
        expect_idle(llm)


def slow_tokens(folder: str, args: dict, backwards: bool) -> tuple[list[list[int]], dict[str, int], tuple[int, str]]:
    """Tokens, counters, and size and kind of the host pool of a rank whose moves take their time."""
    rng, found = random.Random(1), []

    def late(method):
        def slow(self, plan, **more):
            time.sleep(rng.random() * 0.01 if (self._writes != backwards) else 0.0)
            method(self, plan, **more)

        return slow

    Mover.before, Mover.after = late(Mover.before), late(Mover.after)

    def look(llm):
        pool = llm.engine._host_pool
        found.append((counters(llm), (pool.n_bytes, pool.about)))

    tokens = greedy_tokens(folder, prompts=ragged_prompts(16)[6:12], n=12, check=look, **args)
    return tokens, *found[0]


def test_ranks_that_are_late_decide_the_same_and_share_one_pool(tmp_path):
    args = {**TIGHT, "max_total_tokens": 400, "kv_offload": "host", "kv_host_backing": "shm", "kv_host_path": str(tmp_path)}
    folder = str(checkpoint("v32"))
    (lone,) = run_ranks(slow_tokens, 1, folder, args, False)
    for backwards in (False, True):
        first, second = run_ranks(slow_tokens, 2, folder, args | {TP: 2}, backwards, timeout=120.0)
        assert first[0] == lone[0] and first[1] == second[1] == lone[1]  # the same rows were found in the same places
        assert first[2] == second[2] == (lone[2][0], lone[2][1].replace("1 rank", "2 ranks"))  # no larger than for one


@POLICIES
def test_pools_are_reported_and_an_empty_engine_reports_empty_ones(policy):
    with make(policy) as llm:
        llm.generate(PROMPTS, params(), use_tqdm=False)
        llm.reset_prefix_cache()
        tier, limits = llm.stats()["ranks"][0]["scheduler"]["tier"], llm.engine.leader.scheduler.tier.limits
        assert tier["device_pages"] == tier["device_pages_free"] == limits.n_device_pages == 25
        assert tier["host_pages"] >= limits.n_pages == 60 and tier["offloaded_requests"] == 0


@POLICIES
def test_more_requests_give_more_tokens_a_step_up_to_the_planned_batch_and_no_fewer_beyond(policy):
    config = tiered(make_config(n_pages=900, max_num_seqs=40, max_num_batched_tokens=128), policy=policy, topk=8, hot=2, spare=45)
    planned, _ = largest_batch(44, page_size=config.page_size, n_pages=config.n_pages, max_num_seqs=config.max_num_seqs, limits=config.tier)
    rates = {}
    for clients in (1, 2, planned // 2, planned, 2 * planned, 4 * planned):
        loop = TieredLoop(config)
        loop.run([make_request(str(i), i, [i % 11 + 1, i % 13 + 1] * 13, max_tokens=18, ignore_eos=True) for i in range(clients)])
        rates[clients] = 18 * clients / sum(plan.n_rows > 0 for plan in loop.plans)
    found = list(rates.values())
    assert planned > 4 and found[:4] == sorted(found[:4]) and found[3] > 2 * found[0], (planned, rates)
    assert min(found[3:]) > 0.9 * max(found), (planned, rates)
