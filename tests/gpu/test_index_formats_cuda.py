"""FP4 index keys in the engine on CUDA: graphs, chunks, prefixes and offloading keep tokens, and facts are recalled."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_offload_cuda import prompts
from tests.offload.engines import counters, expect_idle, shuffle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")]
BASE = {"max_total_tokens": 32768, "max_num_seqs": 4, "cuda_graph_capture": "lazy", "cuda_graph_bs": (4,), "disable_log_stats": True}
OFFLOAD = {"kv_host_memory": 1.0, "kv_device_tokens": 64 * 24}


@pytest.fixture(autouse=True)
def exact_float32():
    """fp32 means fp32: no TF32 in matrix products."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")


def tokens(check=None, **args) -> list[list[int]]:
    from rorqual import LLM, SamplingParams

    settings = {"dtype": "float32", "index_cache_dtype": "fp4", "max_num_batched_tokens": 512, **BASE, **args}
    with LLM("tiny", device="cuda", **settings) as llm:
        shuffle(llm, 3)
        outputs = llm.generate(prompts(), SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True), use_tqdm=False)
        if check is not None:
            check(llm)
        return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    return tokens(enforce_eager=True, enable_prefix_caching=False, disable_overlap_schedule=True)


@pytest.mark.parametrize("args", [{}, {"page_size": 16}, {"max_num_batched_tokens": 96}], ids=str)
def test_fp32_tokens_are_those_of_an_eager_run(args, reference):
    def check(llm):
        assert llm.engine.runner.stats.graph_steps > 0
        width = llm.engine.model_config.attention.indexer.head_dim
        assert all(layer.index.pool.shape[1] == llm.engine.config.page_size * (width // 2 + 4) for layer in llm.engine.runner.cache.layers)

    assert tokens(check, **args) == reference


@pytest.mark.parametrize("policy", ["host", "hybrid"])
def test_fp32_tokens_are_those_of_offload_off(policy, reference):
    def check(llm):
        found = counters(llm)
        assert found["unwritten"] == 0 and (policy == "hybrid" or found["misses"] > 0), found
        expect_idle(llm)

    assert tokens(check, kv_offload=policy, **OFFLOAD) == reference


@pytest.mark.parametrize("rows", ["auto", "fp8"])
def test_bf16_recalls_facts(rows):
    from rorqual import LLM
    from tests.oracle.test_eval import recall

    settings = {"dtype": "bfloat16", "kv_cache_dtype": rows, "index_cache_dtype": "fp4", "cuda_graph_capture": "lazy"}
    with LLM("tiny", device="cuda", disable_log_stats=True, **settings) as llm:
        found = [recall(llm, length, n) for length, n in ((512, 24), (2048, 24))]
    assert sum(found) >= 46, found
