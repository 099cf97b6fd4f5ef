"""Offloading on CUDA: tokens of the embedded model are those of a run with everything on the device, in graphs and without."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.gpu.test_engine_graphs import only_decode
from tests.offload.engines import counters, expect_idle, shuffle
from tests.offload.restless import changes, unsettle
from tests.ranks import run_ranks

TINY = Path(__file__).resolve().parents[2] / "launch" / "tiny"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")]


@pytest.fixture(autouse=True)
def exact_float32():
    """fp32 means fp32: no TF32 in matrix products."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")


def prompts() -> list[str]:
    rows = [json.loads(line) for line in (TINY / "eval" / "recall.jsonl").read_text().splitlines()]
    short, long = ([r["prompt"] for r in rows if r["target_tokens"] == n] for n in (512, 2048))
    return short[:6] + long[:3]


def tokens(policy: str, check=None, before=None, count: int | None = None, **args) -> list[list[int]]:
    from rorqual import LLM, SamplingParams

    base = {"max_total_tokens": 32768, "max_num_seqs": 4, "cuda_graph_capture": "lazy", "cuda_graph_bs": (4,), "disable_log_stats": True}
    if policy != "off":
        base |= {"kv_offload": policy, "kv_host_memory": 1.0, "kv_device_tokens": 64 * (24 if policy == "host" else 9)}
    with LLM("tiny", device="cuda", dtype="float32", max_num_batched_tokens=512, **{**base, **args}) as llm:
        shuffle(llm, 3)
        if before is not None:
            before(llm)
        outputs = llm.generate(prompts()[:count], SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True), use_tqdm=False)
        if check is not None:
            check(llm)
        return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    return tokens("off")


@pytest.mark.parametrize("args", [{}, {"enforce_eager": True}, {"kv_hot_policy": "lru"}, {"kv_overlap_fetch": True}], ids=str)
@pytest.mark.parametrize("policy", ["host", "hybrid"])
def test_fp32_tokens_are_those_of_offload_off(policy, args, reference, monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1" if "enforce_eager" in args else "")

    def check(llm):
        found = counters(llm)
        assert found["misses"] > 0 and found["unwritten"] == 0, found
        stats = llm.engine.runner.stats
        assert ("enforce_eager" in args) == (stats.graph_steps == 0)
        if "enforce_eager" not in args:
            assert any(key.offloaded for key in llm.engine.runner.graphs._captured)
        expect_idle(llm)

    assert tokens(policy, check, **args) == reference


@pytest.mark.parametrize("args", [{}, {"enforce_eager": True}], ids=str)
@pytest.mark.parametrize("policy", ["host", "hybrid"])
def test_tokens_stay_while_leases_come_and_go(policy, args, reference, monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1")  # what is free holds NaN

    def check(llm):
        found = counters(llm)
        assert found["misses"] > 0 and found["unwritten"] == 0, found
        assert min(changes(llm)) > 3 and ("enforce_eager" in args) == (llm.engine.runner.stats.graph_steps == 0)
        expect_idle(llm)

    assert tokens(policy, check, lambda llm: unsettle(llm, 4), kv_device_tokens=64 * 30, **args) == reference


def test_hybrid_without_pressure_looks_for_nothing(reference):
    def check(llm):
        assert sum(counters(llm).values()) == 0
        assert llm.engine.leader.scheduler.tier.book.mirrored > 0

    assert tokens("hybrid", check, kv_device_tokens=40000) == reference


def test_fp8_rows(reference):
    wanted = tokens("off", kv_cache_dtype="fp8")
    assert tokens("host", kv_cache_dtype="fp8") == wanted


@pytest.mark.parametrize("policy", ["host", "hybrid"])
@pytest.mark.parametrize("args", [{}, {"enforce_eager": True}], ids=str)
def test_a_decode_step_waits_for_nothing_but_the_last_tokens(policy, args):
    """Moves, copies to the host and readings of the counters included."""
    from rorqual import LLM, SamplingParams

    @contextmanager
    def no_sync():
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    base = {"max_total_tokens": 32768, "max_num_seqs": 4, "cuda_graph_capture": "lazy", "cuda_graph_bs": (4,), "disable_log_stats": True}
    base |= {"kv_offload": policy, "kv_host_memory": 1.0, "kv_device_tokens": 64 * 24, "max_num_batched_tokens": 512}
    with LLM("tiny", device="cuda", dtype="float32", **base, **args) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
        llm.generate(prompts()[:4], params, use_tqdm=False)
        only_decode(llm.engine, no_sync)
        llm.generate(prompts()[:4], params, use_tqdm=False)


def rank_tokens(args: dict) -> list[list[int]]:
    torch.backends.cuda.matmul.allow_tf32 = False
    found = []
    ids = tokens("host", lambda llm: found.append(counters(llm)), count=6, **args)
    assert found[0]["unwritten"] == 0 and found[0]["misses"] > 0, found
    return ids


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("args", [{"tensor_parallel_size": 2, "kv_host_backing": "shm"}, {"pipeline_parallel_size": 2}], ids=str)
def test_two_gpus(args, reference):
    assert run_ranks(rank_tokens, 2, args, timeout=120.0)[0] == reference[:6]
