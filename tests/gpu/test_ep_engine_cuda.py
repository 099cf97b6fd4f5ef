"""Expert parallelism in the engine on CUDA: over symmetric memory, in graphs and in halves, the tokens of one rank; a lost one ends all."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.parity import ragged_prompts
from tests.ranks import collect_ranks, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")]
REFERENCE = json.loads((Path(__file__).resolve().parents[2] / "launch" / "tiny" / "eval" / "reference.json").read_text())
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
TP, DP = "tensor_parallel_size", "data_parallel_size"
HALVES = {"enable_two_batch_overlap": True, "two_batch_overlap_min_tokens": 2}
GRAPHS = {"cuda_graph_bs": (2, 4, 8), "max_num_seqs": 8}
EAGER = {"enforce_eager": True, "max_num_seqs": 8}
#: several ranks on one GPU: correctness only
ONE_GPU = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}
SAFE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def make(**args: Any) -> Any:
    from rorqual import LLM

    torch.backends.cuda.matmul.allow_tf32 = False
    settings = {
        "device": "cuda",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "max_total_tokens": 16384,
        "max_model_len": 512,
    }
    return LLM("tiny", **{**settings, **args})


def generate(llm: Any, n: int = 24) -> list[list[int]]:
    from rorqual import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
    return [o.outputs[0].token_ids for o in llm.generate(ragged_prompts(12), params, use_tqdm=False)]


def tokens_by(settings: list[dict[str, Any]], apart: bool = False) -> list[tuple[list[list[int]], dict[str, Any]]]:
    """Tokens and this rank's counters for each of ``settings``, one engine after the other. ``apart``: NCCL shall think so."""
    if apart:
        os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
    found = []
    for args in settings:
        with make(**args) as llm:
            found.append((generate(llm), llm.engine.rank_stats()))
    return found


SYMM: list[dict[str, Any]] = [
    {**GRAPHS, "moe_a2a_backend": "torch_static"},
    {**EAGER, "moe_a2a_backend": "symm"},
    {**EAGER, "moe_a2a_backend": "symm", "max_num_batched_tokens": 33, **HALVES},
    {**GRAPHS, "moe_a2a_backend": "symm"},
    {**GRAPHS, "moe_a2a_backend": "symm", **HALVES},
    {**GRAPHS, "moe_a2a_backend": "symm", "enable_deterministic_inference": True, **HALVES},
]


@two_gpus
@pytest.mark.parametrize("layout", [{DP: 2}, {TP: 2}], ids=str)
def test_symm_keeps_tokens(layout):
    with make(**EAGER) as llm:
        expected = generate(llm)
    results = run_ranks(tokens_by, 2, [{**layout, **args} for args in SYMM], timeout=240.0, env=SAFE)
    for args, (tokens, stats), (_, other) in zip(SYMM, results[0], results[1], strict=True):
        assert tokens == expected, args
        graphed = DP in layout and "cuda_graph_bs" in args
        assert (stats["graph_steps"] > 5) == graphed and stats["graph_steps"] == other["graph_steps"], args
        assert stats["dispatch_bytes"][1] > 0 and other["dispatch_bytes"][0] > 0, args


@two_gpus
def test_fp8_payload_has_the_tokens_of_torch():
    """Values travel by the same rounding; fp32 experts widen them alike."""
    settings = [{DP: 2, "moe_payload": "fp8", **EAGER, "moe_a2a_backend": name} for name in ("torch", "symm")]
    settings.append({DP: 2, "moe_payload": "fp8", **GRAPHS, "moe_a2a_backend": "symm", **HALVES})
    by_torch, by_symm, in_graphs = (tokens for tokens, _ in run_ranks(tokens_by, 2, settings, timeout=200.0, env=SAFE)[0])
    assert by_torch == by_symm == in_graphs


def test_two_ranks_of_one_gpu_keep_tokens():
    with make(**EAGER) as llm:
        expected = generate(llm)
    settings = [{DP: 2, "moe_a2a_backend": "symm", "gpu_memory_utilization": 0.3, **EAGER}]
    environment = {**ONE_GPU, **SAFE, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    results = run_ranks(tokens_by, 2, settings, True, timeout=200.0, env=environment)
    assert results[0][0][0] == expected


def stall(prompts: list[list[int]], n: int, args: dict[str, Any]) -> None:
    """Rank 1's device stops in the middle; its host goes on. Rank 0 says what tokens it was given until then."""
    from rorqual import SamplingParams

    with make(dist_timeout=4.0, **args) as llm:
        if int(os.environ["RANK"]) == 1:
            execute = llm.engine.runner.execute

            def sleepy(plan: Any) -> Any:
                if plan.step == 20:
                    torch.cuda._sleep(1 << 34)  # 8 s or more
                return execute(plan)

            llm.engine.runner.execute = sleepy
        given: list[list[int]] = [[] for _ in prompts]
        try:
            for chunk in llm.generate_stream(prompts, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)):
                given[chunk.prompt_index] += chunk.token_ids
        finally:
            print("GIVEN", json.dumps(given), flush=True)


@two_gpus
@pytest.mark.parametrize("args", [{**GRAPHS, "cuda_graph_bs": (8,)}, {**EAGER, **HALVES}], ids=["graphs", "eager halves"])
def test_a_stalled_device_is_named_and_no_wrong_token_is_given_out(args):
    rows = REFERENCE["prompts"][:12]
    n = min(len(row["ids"]) for row in rows)
    exits = collect_ranks(stall, 2, [r["prompt_ids"] for r in rows], n, {DP: 2, "moe_a2a_backend": "symm", **args}, timeout=90.0, env=SAFE)
    said = exits[0].stderr
    assert exits[0].code not in (0, None) and "rank 1 did not come to" in said and ", layer " in said, said[-3000:]
    given = json.loads(said.split("GIVEN ", 1)[1].splitlines()[0])
    assert any(given) and all(tokens == row["ids"][: len(tokens)] for tokens, row in zip(given, rows, strict=True))
    assert not all(len(tokens) == n for tokens in given)


def die_at(step: int, args: dict[str, Any]) -> None:
    """Rank 1 is killed while steps run."""
    with make(dist_timeout=10.0, **args) as llm:
        if int(os.environ["RANK"]) == 1:
            execute = llm.engine.runner.execute

            def fail(plan: Any) -> Any:
                if plan.step >= step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return execute(plan)

            llm.engine.runner.execute = fail
        generate(llm, 200)


@two_gpus
@pytest.mark.parametrize("args", [GRAPHS, EAGER], ids=["graphs", "eager"])
def test_a_dead_rank_ends_the_other(args):
    start = time.monotonic()
    exits = collect_ranks(die_at, 2, 40, {DP: 2, "moe_a2a_backend": "symm", **args}, timeout=120.0, env=SAFE)
    assert all(e.code != 0 for e in exits) and exits[0].code is not None, [e.code for e in exits]
    said = exits[0].stderr + exits[0].error
    assert "rank 1" in said, said[-2000:]
    assert time.monotonic() - start < 100.0
