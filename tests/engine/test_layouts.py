"""Layout, scheduling and caching settings never change a greedy token."""

from __future__ import annotations

import functools

import pytest

from tests.checkpoints import checkpoint
from tests.engine.parity import N_TOKENS, greedy_tokens, ragged_prompts, rank_tokens
from tests.ranks import run_ranks

TP, DP, PP, EP = "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "expert_parallel_size"


@functools.cache
def reference(name: str = "v32") -> list[list[int]]:
    """Tokens of one rank with default settings (tests/oracle compares these with transformers)."""
    return greedy_tokens(checkpoint(name))


LAYOUTS = [
    {TP: 2},
    {TP: 4},
    {DP: 2},
    {DP: 4},
    {TP: 2, EP: 1},
    {DP: 4, EP: 1},
    {PP: 2},
    {DP: 2, TP: 2},
    {PP: 2, DP: 2},
    {PP: 2, DP: 2, TP: 2},
    {PP: 2, "disable_overlap_schedule": True},
    {DP: 2, "disable_overlap_schedule": True},
    {DP: 2, TP: 2, "moe_a2a_backend": "torch_node", "ranks_per_node": 2},
    {DP: 2, TP: 2, "moe_a2a_backend": "torch_static"},
    {DP: 2, TP: 2, "enable_deterministic_inference": True},
    {PP: 2, TP: 2, "max_num_batched_tokens": 7, "page_size": 1},
]


def world(args: dict) -> int:
    return args.get(TP, 1) * args.get(DP, 1) * args.get(PP, 1)


def few(args: dict) -> tuple[list[list[int]], int, list[list[int]]]:
    """(prompts, tokens of each, the right ones): fewer of both where steps hold a few tokens only, and so are many."""
    every, n = (6, 24) if args.get("max_num_batched_tokens", 64) < 8 else (1, N_TOKENS)
    return ragged_prompts()[::every], n, [tokens[:n] for tokens in reference()[::every]]


def title(args: dict) -> str:
    return "-".join(f"{k.split('_')[0] if k in (TP, DP, PP, EP) else k}{v}" for k, v in args.items())


@pytest.mark.parametrize("args", LAYOUTS, ids=title)
def test_layout_keeps_tokens(args):
    prompts, n, right = few(args)
    results = run_ranks(rank_tokens, world(args), str(checkpoint("v32")), args, prompts, n, timeout=240.0)
    assert results[0] == right
    assert all(r == [] for r in results[1:])


@pytest.mark.parametrize("name", ["v3", "v2_groups", "glm_dsa"])
def test_all_axes_keep_tokens_of_other_families(name):
    args, prompts = {PP: 2, DP: 2, TP: 2}, ragged_prompts()[::4]
    right = greedy_tokens(checkpoint(name), prompts=prompts, n=32)
    assert run_ranks(rank_tokens, 8, str(checkpoint(name)), args, prompts, 32, timeout=240.0)[0] == right


def test_made_up_weights_are_the_same_on_every_layout():
    """--load-format dummy needs the configuration only; a stage here begins with a layer that shares its selection."""
    args, prompts = {"load_format": "dummy", "max_num_seqs": 16}, ragged_prompts(12)
    alone = greedy_tokens(checkpoint("glm_dsa"), prompts=prompts, n=12, **args)
    for layout in ({PP: 4}, {TP: 2, EP: 1}):
        assert run_ranks(rank_tokens, world(layout), str(checkpoint("glm_dsa")), {**args, **layout}, prompts, 12, timeout=120.0)[0] == alone


SETTINGS = [
    {"page_size": 1},
    {"page_size": 16},
    {"max_num_batched_tokens": 1},
    {"max_num_batched_tokens": 7},
    {"max_num_batched_tokens": 64},
    {"enable_prefix_caching": False},
    {"disable_overlap_schedule": True},
    {"disable_overlap_schedule": True, "enable_prefix_caching": False, "page_size": 16},
    {"max_num_seqs": 3},
    {"enable_deterministic_inference": True},
]


@pytest.mark.parametrize("args", SETTINGS, ids=title)
def test_setting_keeps_tokens(args):
    prompts, n, right = few(args)
    assert greedy_tokens(checkpoint("v32"), prompts=prompts, n=n, **args) == right


@pytest.mark.parametrize("overlap", [True, False])
def test_tiny_pool_preempts_everybody_and_keeps_tokens(overlap, monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    seen = {}

    def check(llm):
        seen.update(llm.stats()["ranks"][0]["scheduler"])

    args = {"page_size": 4, "max_total_tokens": 400, "max_num_seqs": 16, "disable_overlap_schedule": not overlap}
    assert greedy_tokens(checkpoint("v32"), check=check, **args) == reference()
    assert seen["preemptions"] >= 20


@pytest.mark.parametrize("overlap", [True, False])
def test_every_request_is_preempted_and_keeps_its_tokens(overlap, monkeypatch):
    """Each request loses its pages once, in the middle of its output or of a chunk of its prompt."""
    from rorqual.engine.leader import Leader

    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    tick, preempted = Leader.tick, set()

    def preempting_tick(self, commands, *, more):
        for request in self.scheduler.running_requests():
            due = len(request.output_ids) >= request.index % 60 and request.computed > request.index % 5
            if due and request.request_id not in preempted and self.scheduler.preempt(request.request_id):
                preempted.add(request.request_id)
        return tick(self, commands, more=more)

    monkeypatch.setattr(Leader, "tick", preempting_tick)
    args = {"page_size": 4, "max_num_batched_tokens": 50, "disable_overlap_schedule": not overlap}
    assert greedy_tokens(checkpoint("v32"), **args) == reference()
    assert len(preempted) == 64


def test_warm_prefix_cache_keeps_tokens():
    """The second call finds the first one's pages."""
    from rorqual import LLM, SamplingParams

    with LLM(str(checkpoint("v32")), skip_tokenizer_init=True, dtype="float32", page_size=4, disable_log_stats=True) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        for attempt in range(2):
            outputs = llm.generate(ragged_prompts(), params, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == reference()
            cached = sum(o.metrics.cached_tokens for o in outputs)
            assert attempt == 0 or cached > 2500, cached
