"""Formats of index keys in the engine: layouts, chunks, prefixes and offloading keep the tokens of one rank; what cannot be is refused."""

from __future__ import annotations

import functools

import pytest

from rorqual import LLM
from tests.checkpoints import checkpoint
from tests.engine.parity import greedy_tokens, ragged_prompts, rank_tokens
from tests.offload.engines import counters, expect_idle, make, params
from tests.ranks import run_ranks

TP, DP, PP = "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"
PROMPTS, N_TOKENS = ragged_prompts(8), 12
BYTES = {"float32": 128, "bfloat16": 64, "fp8": 36, "fp4": 20}  # of an index key of 32 values


@functools.cache
def reference(index: str = "fp4", **args: str) -> list[list[int]]:
    """Tokens of one rank that prefills a prompt in one step and keeps no prefixes."""
    return greedy_tokens(
        checkpoint("v32"), prompts=PROMPTS, n=N_TOKENS, index_cache_dtype=index, enable_prefix_caching=False, max_num_seqs=1, **args
    )


def test_fp4_tokens_are_others_than_those_of_fp32_keys():
    """Otherwise the tests below would show nothing; most tokens stay."""
    exact, coded = reference("auto"), reference("fp4")
    same = sum(a == b for left, right in zip(exact, coded, strict=True) for a, b in zip(left, right, strict=True))
    assert exact != coded and same > len(PROMPTS) * N_TOKENS // 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_auto_is_the_format_of_the_rows(dtype):
    assert reference("auto", kv_cache_dtype=dtype) == reference(dtype, kv_cache_dtype=dtype)


@pytest.mark.parametrize("args", [{TP: 2}, {DP: 2}, {PP: 2}], ids=lambda args: next(iter(args)))
def test_layouts_keep_tokens(args):
    results = run_ranks(
        rank_tokens, 2, str(checkpoint("v32")), {**args, "index_cache_dtype": "fp4"}, PROMPTS, N_TOKENS, timeout=240.0,
        env={"RORQUAL_DEBUG": "1"},
    )  # fmt: skip
    assert results[0] == reference()


@pytest.mark.parametrize(
    "args",
    [{"max_num_batched_tokens": 7, "page_size": 1}, {"max_num_batched_tokens": 40, "page_size": 16, "disable_overlap_schedule": True}],
)
def test_chunks_and_cached_prefixes_keep_tokens(args, monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "disable_log_stats": True, "max_num_seqs": 4}
    with LLM(str(checkpoint("v32")), index_cache_dtype="fp4", **settings, **args) as llm:
        for _ in range(2):  # the second time prompts come from the prefix tree
            outputs = llm.generate(PROMPTS, params(N_TOKENS), use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == reference()
        assert sum(o.metrics.cached_tokens for o in outputs) > 0


@pytest.mark.parametrize("index", ["fp8", "fp4"])
@pytest.mark.parametrize("policy", ["host", "hybrid"])
def test_offloading_keeps_tokens(policy, index, monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    with make(policy, index_cache_dtype=index) as llm:
        outputs = llm.generate(PROMPTS, params(N_TOKENS), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == reference(index)
        found = counters(llm)
        assert found["misses"] > 0 and found["unwritten"] == 0
        expect_idle(llm)


def test_pages_of_a_prefix_directory_keep_tokens(tmp_path, monkeypatch):
    """Index keys of shared pages go through the host pool, whose pages have the bytes of the format."""
    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    settings = {"kv_host_backing": "shm", "kv_host_path": str(tmp_path), "kv_prefix_directory": True, "index_cache_dtype": "fp4"}
    with make("host", **settings) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, params(N_TOKENS), use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == reference()
        assert sum(o.metrics.cached_tokens for o in outputs) > 0


@pytest.mark.parametrize("index", BYTES)
def test_pools_hold_what_was_planned(index):
    """More tokens fit as keys shrink; that the bytes are those planned is asserted at every start."""
    with make("off", index_cache_dtype=index) as llm:
        cache = llm.engine.runner.cache
        layers = [layer for layer in cache.layers if layer.index is not None]
        assert layers and all(layer.index.n_bytes == (cache.n_pages + 1) * cache.page_size * BYTES[index] for layer in layers)


def test_a_model_without_an_indexer_has_no_index_keys():
    with pytest.raises(ValueError, match="index_cache_dtype fp4 is of no use: the model has no indexer; use auto"):
        make("off", name="v3", index_cache_dtype="fp4")


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="index_cache_dtype must be one of auto, bfloat16, float32, fp8, fp4, found 'int4'"):
        make("off", index_cache_dtype="int4")
