"""The real engine with offloading: every token is that of a lone run without it, whatever is spilled, preempted or shuffled."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual import LLM
from rorqual.attention.batch import AttentionBatch
from rorqual.engine import assembly, tables
from rorqual.engine.graphs import DecodeGraphs
from rorqual.engine.models.build import Stage
from rorqual.engine.offload.mover import Mover
from rorqual.engine.step_inputs import InputLayout
from tests.checkpoints import checkpoint
from tests.engine.parity import greedy_tokens, ragged_prompts
from tests.engine.random_calls import check_random_call
from tests.engine.stub import FakeStreams
from tests.offload.engines import PROMPTS, alone, counters, expect_idle, make, params
from tests.ranks import run_ranks


@functools.cache
def engine(policy: str, overlap: bool) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RORQUAL_DEBUG", "1")  # what is free holds NaN
        return make(policy, seed=5, disable_overlap_schedule=not overlap)


@pytest.mark.parametrize(("policy", "overlap"), [("host", True), ("host", False), ("hybrid", True), ("hybrid", False)])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_random_calls_end_with_the_tokens_of_a_lone_run(policy, overlap, data):
    llm = engine(policy, overlap)
    check_random_call(data, llm, PROMPTS, params(), alone)
    expect_idle(llm)


@pytest.mark.parametrize("name", ["v32", "glm_dsa"])
@pytest.mark.parametrize("policy", ["host", "hybrid"])
def test_families_with_an_indexer_keep_tokens(policy, name, monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    with make(policy, name=name) as llm:
        for _ in range(2):  # the second time prompts come from the prefix tree, whose pages are on the host
            outputs = llm.generate(PROMPTS, params(), use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == [alone(i, name) for i in range(len(PROMPTS))]
            expect_idle(llm)
        found = counters(llm)
        assert found["misses"] > 0 and found["bytes"] > 0 and (policy == "hybrid" or found["hits"] > 0)


def test_a_prefix_on_the_host_is_used_without_a_copy_of_it(monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    with make("host", max_total_tokens=400) as llm:
        tier, prompt = llm.engine.leader.scheduler.tier, PROMPTS[-1]
        first = llm.generate([prompt], params(), use_tqdm=False)[0]
        assert tier.n_free == tier.limits.n_device_pages  # all of it is on the host
        second = llm.generate([prompt], params(), use_tqdm=False)[0]
        assert second.outputs[0].token_ids == first.outputs[0].token_ids == alone(len(PROMPTS) - 1)
        assert second.metrics.cached_tokens >= len(prompt) - 4 - 1 and tier.book.restored == 0
        short = prompt[: tier.limits.topk - 2]  # every key of it is read: its pages come back
        restored = llm.generate([short], params(2), use_tqdm=False)[0]
        assert tier.book.restored == len(short[:-1]) // 4 > 0
        assert restored.outputs[0].token_ids == make_plain(short)
        llm.reset_prefix_cache()
        assert tier.book._host_pages.n_used == 0 and tier.n_free == tier.limits.n_device_pages
        expect_idle(llm)


def make_plain(prompt: list[int]) -> list[int]:
    with make("off", max_total_tokens=400) as llm:
        return llm.generate([prompt], params(2), use_tqdm=False)[0].outputs[0].token_ids


def test_hybrid_without_pressure_moves_nothing():
    with make("hybrid", max_total_tokens=800, kv_device_tokens=800) as llm:
        outputs = llm.generate(PROMPTS, params(), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [alone(i) for i in range(len(PROMPTS))]
        assert sum(counters(llm).values()) == 0  # no row was looked for in the tiers
        book = llm.engine.leader.scheduler.tier.book
        assert book.mirrored > 0 and book.drops == book.restored == 0


SETTINGS = [
    {"page_size": 1, "kv_device_tokens": 60},
    {"page_size": 16, "kv_device_tokens": 256, "max_total_tokens": 480},
    {"max_num_batched_tokens": 1},
    {"max_num_batched_tokens": 7, "enable_prefix_caching": False},
    {"kv_hot_slots": 24, "kv_device_tokens": 48},
    {"kv_cache_dtype": "bfloat16"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("policy", ["host", "hybrid"])
def test_settings_keep_tokens(policy, settings, monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    texts, plain = PROMPTS[3::3], {k: v for k, v in settings.items() if not k.startswith("kv_") or k == "kv_cache_dtype"}
    with make("off", **{**plain, "max_total_tokens": 2000}) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(texts, params(6), use_tqdm=False)]
    with make(policy, **settings) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(texts, params(6), use_tqdm=False)] == expected
        expect_idle(llm)


@pytest.mark.parametrize("backing", ["file", "shm", "cxl"])
def test_backings_and_the_lru_policy_keep_tokens(backing, tmp_path):
    path = {"file": str(tmp_path / "pool"), "shm": str(tmp_path), "cxl": "stand-in"}[backing]
    with make("host", kv_host_backing=backing, kv_host_path=path, kv_hot_policy="lru") as llm:
        outputs = llm.generate(PROMPTS, params(), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [alone(i) for i in range(len(PROMPTS))]
        expect_idle(llm)


# ---- layouts

TP, DP, PP = "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"
POOLS = {"kv_host_memory": 0.6, "kv_device_tokens": 160, "max_total_tokens": 1200}
TIGHT = {**POOLS, "page_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 48}
LAYOUTS = [
    {TP: 2, "kv_offload": "host"},
    {TP: 2, "kv_offload": "hybrid", "kv_host_backing": "shm"},
    {DP: 2, "kv_offload": "hybrid", "kv_host_backing": "shm"},
    {DP: 2, "kv_offload": "host", "disable_overlap_schedule": True},
    {PP: 2, "kv_offload": "host"},
    {PP: 2, TP: 2, "kv_offload": "hybrid", "kv_host_backing": "shm"},
]


@functools.cache
def reference() -> list[list[int]]:
    return greedy_tokens(checkpoint("v32"), prompts=ragged_prompts(16), n=20)


@pytest.mark.parametrize("args", LAYOUTS, ids=lambda a: "-".join(map(str, a.values())))
def test_layouts_keep_tokens(args, tmp_path):
    if args.get("kv_host_backing") == "shm":
        args = {**args, "kv_host_path": str(tmp_path)}
    world = args.get(TP, 1) * args.get(DP, 1) * args.get(PP, 1)
    job = (str(checkpoint("v32")), {**TIGHT, **args}, ragged_prompts(16), 20)
    results = run_ranks(offloaded_tokens, world, *job, timeout=240.0, env={"RORQUAL_DEBUG": "1"})
    assert results[0] == reference()


def test_ranks_of_a_replica_on_several_hosts_each_write_their_pool(tmp_path):
    """Two hosts of one rank each: what one of them copies the other does not see."""
    args = {**TIGHT, TP: 2, "kv_offload": "host", "kv_host_backing": "shm", "kv_host_path": str(tmp_path)}
    job = (str(checkpoint("v32")), args, ragged_prompts(16)[:8], 20)
    env = {"RORQUAL_DEBUG": "1", "LOCAL_WORLD_SIZE": "1"}
    assert run_ranks(offloaded_tokens, 2, *job, timeout=240.0, env=env)[0] == reference()[:8]


def test_stages_on_several_hosts_share_pools_of_their_own_layers(tmp_path):
    args = {**TIGHT, PP: 2, "kv_offload": "hybrid", "kv_host_backing": "shm", "kv_host_path": str(tmp_path)}
    job = (str(checkpoint("v32")), args, ragged_prompts(16)[:8], 20)
    env = {"RORQUAL_DEBUG": "1", "LOCAL_WORLD_SIZE": "1"}
    assert run_ranks(offloaded_tokens, 2, *job, timeout=240.0, env=env)[0] == reference()[:8]


def offloaded_tokens(*job):
    found = []

    def look(llm):
        found.append(counters(llm))

    tokens = greedy_tokens(job[0], prompts=job[2], n=job[3], check=look, **job[1])
    assert found[0]["unwritten"] == 0 and found[0]["misses"] > 0
    return tokens


# ---- graphs, played on the CPU


def play_graphs(monkeypatch):
    """Engines made from now on replay their decode steps as graphs would, on the CPU."""

    def batch(entry, positions, rows, page_size, max_context, n_valid, tier):
        if tier.offloaded:
            leased = (tier.tables.hot_pages[tier.slots, 0] >= 0).numpy()
            tier = dataclasses.replace(tier, absent=(tier.latent_table < 0).any(1).numpy(), leased=leased)
        return AttentionBatch.build(positions.numpy(), np.ones(len(rows)), entry.page_table, page_size, positions.device, tier)

    monkeypatch.setattr(assembly, "uses_graphs", lambda *a: True)
    monkeypatch.setattr(Stage, "capturable", True)
    monkeypatch.setattr(assembly, "DecodeGraphs", lambda **given: DecodeGraphs(**{**given, "make_batch": batch}))
    monkeypatch.setattr(tables, "Streams", FakeStreams)
    monkeypatch.setattr(Mover, "step", functools.partialmethod(eager_step, Mover.step))


@pytest.mark.parametrize("policy", ["host", "hybrid"])
def test_moves_inside_graphs_keep_tokens(policy, monkeypatch):
    """Steps are replayed with the tier tables changed by the graph itself, in both families of graphs."""
    expected = [alone(i) for i in range(len(PROMPTS))]
    play_graphs(monkeypatch)
    with make(policy, cuda_graph_bs=(2, 5), max_model_len=128) as llm:
        moved = []
        pack = InputLayout._pack_moves
        noted = lambda self, block, plan, *a: (moved.append(plan.n_moves), pack(self, block, plan, *a))[1]  # noqa: E731
        monkeypatch.setattr(InputLayout, "_pack_moves", noted)
        outputs = llm.generate(PROMPTS, params(), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected
        expect_idle(llm)
        keys = {key.offloaded for key in llm.engine.runner.graphs._captured}
        assert keys == {True, False} and sum(n > 0 for n in moved) > 5
        assert 0 < llm.engine.runner.stats.graph_steps < llm.engine.runner.stats.steps


def eager_step(self, step, plan, page_table, slots, positions):
    """The torch path takes no static batches."""
    return step(self, plan, page_table, slots, None)
