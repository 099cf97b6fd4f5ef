"""The real engine while leases grow and shrink at random steps: every token is that of a lone run, and nothing that was freed is read."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual import LLM
from tests.checkpoints import checkpoint
from tests.engine.parity import ragged_prompts
from tests.engine.random_calls import check_random_call
from tests.offload.engines import PROMPTS, alone, counters, expect_idle, make, params
from tests.offload.restless import changes, unsettle
from tests.offload.test_engine import DP, PP, TIGHT, TP, play_graphs, reference
from tests.ranks import run_ranks

ROOM = {"kv_device_tokens": 140}  # for more hot rows than those that are promised


@functools.cache
def engine(policy: str, hot_policy: str) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RORQUAL_DEBUG", "1")  # what is free holds NaN
        llm = make(policy, seed=6, kv_hot_policy=hot_policy, **ROOM)
    unsettle(llm, 1)
    return llm


@pytest.mark.parametrize(("policy", "hot_policy"), [("host", "score"), ("hybrid", "score"), ("host", "lru")])
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_random_calls_end_with_the_tokens_of_a_lone_run(policy, hot_policy, data):
    llm = engine(policy, hot_policy)
    check_random_call(data, llm, PROMPTS, params(), alone)
    expect_idle(llm)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("policy", ["host", "hybrid"])
def test_tokens_stay_and_leases_do_not(policy, graphs, monkeypatch):
    """In graphs too, whose kernels know no more than the widest lease."""
    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    if graphs:
        play_graphs(monkeypatch)
    with make(policy, seed=2, **ROOM, **({"cuda_graph_bs": (2, 5), "max_model_len": 128} if graphs else {})) as llm:
        unsettle(llm, 3)
        for _ in range(2):
            outputs = llm.generate(PROMPTS, params(), use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == [alone(i) for i in range(len(PROMPTS))]
            expect_idle(llm)
        assert min(changes(llm)) > 1
        assert counters(llm)["hits"] > 0 and (not graphs or llm.engine.runner.stats.graph_steps > 0)


def test_larger_leases_miss_less():
    found = []
    for most in (24, 48, 96):
        with make("host", kv_hot_slots=24, kv_hot_slots_max=most, kv_device_tokens=400, enable_prefix_caching=False) as llm:
            llm.engine.leader.scheduler.tier.leases.every = 1
            outputs = llm.generate(PROMPTS, params(), use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == [alone(i) for i in range(len(PROMPTS))]
            found.append(counters(llm)["misses"])
            assert llm.engine.leader.scheduler.tier.limits.largest_lease == most // 4
            expect_idle(llm)
    assert found[0] > found[1] > found[2]


LAYOUTS = [
    {TP: 2, "kv_offload": "host"},
    {DP: 2, "kv_offload": "hybrid", "kv_host_backing": "shm", "kv_device_tokens": 100},
    {PP: 2, "kv_offload": "host"},
]


@pytest.mark.parametrize("args", LAYOUTS, ids=lambda a: "-".join(map(str, a.values())))
def test_layouts_keep_tokens(args, tmp_path):
    if args.get("kv_host_backing") == "shm":
        args = {**args, "kv_host_path": str(tmp_path)}
    job = (str(checkpoint("v32")), {**TIGHT, **args}, ragged_prompts(16)[6:], 20)
    assert run_ranks(restless_tokens, 2, *job, timeout=240.0, env={"RORQUAL_DEBUG": "1"})[0] == reference()[6:]


def restless_tokens(folder, args, prompts, n):
    with LLM(folder, skip_tokenizer_init=True, dtype="float32", disable_log_stats=True, **args) as llm:
        unsettle(llm, 7)
        outputs = llm.generate(prompts, params(n), use_tqdm=False)
        found = counters(llm)
        assert found["unwritten"] == 0 and found["misses"] > 0
        assert llm.engine.leader is None or min(changes(llm)) > 0
        return [o.outputs[0].token_ids for o in outputs]
