"""The prefix directory on CUDA: index keys and latent rows that another engine wrote are used in place, with the same tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.gpu.test_engine_graphs import only_decode
from tests.gpu.test_offload_cuda import prompts, tokens
from tests.offload.engines import counters
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")]
SIZE = 64  # tokens of a page


@pytest.fixture(autouse=True)
def exact_float32():
    """fp32 means fp32: no TF32 in matrix products."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def pool() -> Iterator[Path]:
    """A pool file in shared memory, which CUDA registers."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="directory-test-") as folder:
        yield Path(folder) / "pool"


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    return tokens("off")


def engine(pool: Path, policy: str, **args):
    from rorqual import LLM

    base = {"max_total_tokens": 32768, "max_num_seqs": 4, "cuda_graph_capture": "lazy", "cuda_graph_bs": (4,), "disable_log_stats": True}
    base |= {"kv_offload": policy, "kv_host_memory": 1.0, "kv_device_tokens": 64 * 24, "kv_prefix_directory": True}
    base |= {"kv_host_backing": "file", "kv_host_path": str(pool), "max_num_batched_tokens": 512, "gpu_memory_utilization": 0.98}
    return LLM("tiny", device="cuda", dtype="float32", **{**base, **args})


def run(llm, n: int = 48) -> tuple[list[list[int]], list[int], list[int]]:
    """Tokens, cached tokens and prompt lengths."""
    from rorqual import SamplingParams

    outputs = llm.generate(prompts(), SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True), use_tqdm=False)
    cached = [o.metrics.cached_tokens for o in outputs]
    return [o.outputs[0].token_ids for o in outputs], cached, [len(o.prompt_token_ids) for o in outputs]


@pytest.mark.parametrize("policy", ["host", "hybrid"])
@pytest.mark.parametrize("args", [{}, {"enforce_eager": True}], ids=str)
def test_an_engine_finds_what_another_has_computed(policy, args, reference, pool, monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1" if args else "")
    with engine(pool, policy, **args) as first, engine(pool, policy, **args) as second:
        assert run(first)[0] == reference
        assert first.engine.leader.scheduler.share.flush()
        found, cached, lengths = run(second)
        assert found == reference
        assert cached == [(length - 1) // SIZE * SIZE for length in lengths]
        for llm in (first, second):
            share = llm.engine.leader.scheduler.share
            assert share.flush() and counters(llm)["unwritten"] == 0
            share.directory.check()
        assert share.stats()["withdrawn"] == share.stats()["late"] == 0


def test_fp8_rows(pool):
    wanted = tokens("off", kv_cache_dtype="fp8")
    with engine(pool, "host", kv_cache_dtype="fp8") as first:
        assert run(first)[0] == wanted
    with engine(pool, "host", kv_cache_dtype="fp8") as second:  # the first has ended
        found, cached, _ = run(second)
        assert found == wanted and all(cached)


def test_a_decode_step_waits_for_nothing_but_the_last_tokens(pool):
    """Neither for the directory nor for copies that others will read."""
    from rorqual import SamplingParams

    @contextmanager
    def no_sync():
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with engine(pool, "hybrid") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
        llm.generate(prompts()[:4], params, use_tqdm=False)
        only_decode(llm.engine, no_sync)
        llm.generate(prompts()[:4], params, use_tqdm=False)


def replica_tokens(folder: str) -> tuple[list[list[int]], int]:
    """Prompts one after the other, twice: by turns on one replica and the other."""
    from rorqual import SamplingParams

    torch.backends.cuda.matmul.allow_tf32 = False
    place = {"kv_host_backing": "shm", "kv_host_path": folder, "data_parallel_size": 2, "max_num_seqs": 4}
    with engine(Path(folder), "hybrid", **place) as llm:
        params, texts = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True), prompts()[:3]
        found = []
        for text in [*texts, *texts]:
            found += [o.outputs[0].token_ids for o in llm.generate([text], params, use_tqdm=False)]
        assert counters(llm)["unwritten"] == 0
        return found, llm.engine.leader.scheduler.share.imported


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_replicas(reference, pool):
    results = run_ranks(replica_tokens, 2, str(pool.parent), timeout=120.0)
    assert results[0][0] == [*reference[:3], *reference[:3]]
    assert all(imported > 0 for _, imported in results)
    assert not list(pool.parent.iterdir())
