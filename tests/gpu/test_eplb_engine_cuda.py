"""Experts on the move on CUDA: eager, in graphs and in halves of a step, tokens stay those of one rank and slots are whole."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.checkpoints import TINY
from tests.engine.eplb.jobs import DEBUG, DP, TP, Found, balanced, check_whole, run
from tests.engine.parity import ragged_prompts
from tests.gpu.test_ep_engine_cuda import ONE_GPU
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
MOVES = balanced(policy="random", step_interval=1, num_redundant_experts=4, staging_experts=12)
CUDA = {"device": "cuda", "max_model_len": 512, "max_total_tokens": 16384, "max_num_seqs": 8}
GRAPHS = {"cuda_graph_bs": (2, 4, 8)}
HALVES = {"enable_two_batch_overlap": True, "two_batch_overlap_min_tokens": 2}
SAFE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
N = 64


def job(settings: list[dict[str, Any]], apart: bool = False) -> list[tuple[Found, int, int]]:
    """(what was found, steps from graphs, host waits beyond one a step) for each of ``settings``. ``apart``: NCCL shall think so."""
    if apart:
        os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
    torch.backends.cuda.matmul.allow_tf32 = False
    seen: list[Any] = []
    found = []
    for args in settings:
        one = run(str(TINY), ragged_prompts(12), N, {**CUDA, **args}, prepare=seen.append)
        found.append((one, seen[-1].engine.runner.stats.graph_steps, seen[-1].engine.runner.streams.waits))
    return found


@two_gpus
@pytest.mark.parametrize("layout", [{DP: 2}, {TP: 2}], ids=str)
def test_random_rebalances_keep_tokens(layout):
    plain = {"enforce_eager": True}
    (alone,) = job([plain])
    settings = [
        {**MOVES, "enforce_eager": True, "moe_a2a_backend": "symm"},
        {**MOVES, **GRAPHS, "moe_a2a_backend": "symm"},
        {**MOVES, **GRAPHS, "moe_a2a_backend": "symm", **HALVES},
        {**MOVES, **GRAPHS, "moe_a2a_backend": "torch_static", "ep_dispatch_algorithm": "dynamic"},
        {**MOVES, "enforce_eager": True, "disable_overlap_schedule": True},
    ]
    by_rank = run_ranks(job, 2, [{**layout, **args} for args in settings], env={**DEBUG, **SAFE}, timeout=300.0)
    for args, *ranks in zip(settings, *by_rank, strict=True):
        found = [rank[0] for rank in ranks]
        assert found[0].tokens == alone[0].tokens, args
        check_whole(found)
        cycles = found[0].stats["cycles"]
        assert cycles["ended"] >= 2 and cycles["aborted"] == 0, (args, cycles)
        if DP in layout and "cuda_graph_bs" in args:
            assert ranks[0][1] > 5 and ranks[0][1] == ranks[1][1], args


def test_two_ranks_of_one_gpu_move_experts_between_graphs():
    (alone,) = job([{"enforce_eager": True}])
    settings = [
        {**MOVES, DP: 2, **args, "moe_a2a_backend": "symm", "gpu_memory_utilization": 0.3} for args in ({"enforce_eager": True}, GRAPHS)
    ]
    environment = {**DEBUG, **SAFE, **ONE_GPU, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    by_rank = run_ranks(job, 2, settings, True, env=environment, timeout=240.0)
    for args, *ranks in zip(settings, *by_rank, strict=True):
        found = [rank[0] for rank in ranks]
        assert found[0].tokens == alone[0].tokens, args
        check_whole(found)
        assert found[0].stats["cycles"]["ended"] >= 2 and found[0].stats["cycles"]["aborted"] == 0, (args, found[0].stats["cycles"])
    assert by_rank[0][1][1] > 5, "no step ran from a graph"


@two_gpus
def test_memory_stays_as_it_was():
    """Device memory after many rebalances is that after a few."""
    first, second = run_ranks(memory_job, 2, {DP: 2, **MOVES, **GRAPHS, "moe_a2a_backend": "symm"}, env={**DEBUG, **SAFE}, timeout=300.0)
    for used in (first, second):
        assert used[-1] <= used[2] + (2 << 20), used


def memory_job(settings: dict[str, Any]) -> list[int]:
    """Bytes in use on the device after each of several calls."""
    from rorqual import LLM, SamplingParams

    with LLM(str(TINY), skip_tokenizer_init=True, disable_log_stats=True, **{**CUDA, **settings}) as llm:
        used, params = [], SamplingParams(temperature=0.0, max_tokens=N, ignore_eos=True)
        for _ in range(10):
            llm.generate(ragged_prompts(8), params, use_tqdm=False)
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            used.append(total - free)
        assert llm.engine.experts.stats()["cycles"]["ended"] > 20, os.environ["RANK"]
        return used
