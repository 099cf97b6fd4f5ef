"""How experts' tokens travel, in halves or whole, leaves greedy tokens unchanged; a rank that is lost ends all of them by name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from rorqual.engine.config import EngineConfig, check_config
from tests.checkpoints import checkpoint
from tests.engine.parity import greedy_tokens, ragged_prompts
from tests.ranks import collect_ranks, run_ranks

TP, DP, PP, EP = "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "expert_parallel_size"
HALVES = {"enable_two_batch_overlap": True, "two_batch_overlap_min_tokens": 2}
SHM = {"moe_a2a_backend": "shm"}
PROMPTS, N = 9, 12


def tokens_by(folder: str, settings: list[dict[str, Any]]) -> list[tuple[list[list[int]], int]]:
    """Tokens by each of ``settings``, one engine after the other, and how many steps' layers ran in halves."""
    from rorqual.engine.models import deepseek

    torch.set_num_threads(1)
    run, halved = deepseek.run_halves, 0

    def counting(*args: Any) -> torch.Tensor:
        nonlocal halved
        halved += 1
        return run(*args)

    deepseek.run_halves = counting
    found = []
    for args in settings:
        halved = 0
        found.append((greedy_tokens(folder, prompts=ragged_prompts(PROMPTS), n=N, **args), halved))
    return found


CASES = [
    ({DP: 2}, [{**SHM}, {**SHM, **HALVES}, {**HALVES, "max_num_batched_tokens": 33}, {"moe_a2a_backend": "torch_static", **HALVES}]),
    ({TP: 2}, [{**SHM, **HALVES, "max_num_batched_tokens": 7}, {**HALVES}, {**SHM, "enable_deterministic_inference": True, **HALVES}]),
    ({DP: 2, TP: 2}, [{**SHM}, {**SHM, **HALVES, "page_size": 1, "max_num_batched_tokens": 33}]),
    ({DP: 2, PP: 2}, [{**SHM, **HALVES, "disable_overlap_schedule": True}]),
]


@pytest.mark.parametrize(("layout", "settings"), CASES, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_exchange_keeps_tokens(layout, settings):
    expected = greedy_tokens(checkpoint("v32"), prompts=ragged_prompts(PROMPTS), n=N)
    world = layout.get(TP, 1) * layout.get(DP, 1) * layout.get(PP, 1)
    found = run_ranks(tokens_by, world, str(checkpoint("v32")), [{**layout, **args} for args in settings], timeout=240.0)
    for args, *by_rank in zip(settings, *found, strict=True):
        assert by_rank[0][0] == expected, args
        assert all((halved > 5) == ("enable_two_batch_overlap" in args) for _, halved in by_rank), (args, by_rank)


def test_fp8_payload_gives_the_tokens_of_torch():
    settings = [{DP: 2, "moe_payload": "fp8", **args} for args in ({}, SHM, {**SHM, **HALVES})]
    plain, shm, halves = (tokens for tokens, _ in run_ranks(tokens_by, 2, str(checkpoint("v32")), settings, timeout=120.0)[0])
    assert plain == shm == halves


# ---- refusals


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"enable_two_batch_overlap": True, "kv_offload": "host"}, "enable_two_batch_overlap does not go with kv_offload host"),
        ({"ep_fault_tolerant": True, TP: 2}, "ep_fault_tolerant needs tensor_parallel_size 1, found 2"),
        ({"two_batch_overlap_min_tokens": 0}, "two_batch_overlap_min_tokens must be at least 1, found 0"),
        ({"moe_a2a_backend": "smoke"}, "moe_a2a_backend must be one of auto, torch,"),
    ],
)
def test_settings_that_do_not_go_together(args, message):
    with pytest.raises(ValueError, match=message):
        check_config(EngineConfig(model="m", **args))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"enable_two_batch_overlap": True}, "hides the way of tokens to experts on other ranks, but all of them are on this rank"),
        ({"ep_fault_tolerant": True}, "the local backend cannot go on without a rank"),
    ],
)
def test_settings_that_mean_nothing_on_one_rank(args, message):
    from rorqual import LLM

    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint("v32")), skip_tokenizer_init=True, disable_log_stats=True, **args)


# ---- a rank that is lost


def lose_rank(folder: str, args: dict[str, Any], how: str) -> None:
    """Rank 1 ends, or stops answering, in the middle of a layer of its tenth step or later."""
    from rorqual import LLM, SamplingParams
    from rorqual.moe.exchange import ExpertExchange

    torch.set_num_threads(1)
    begin, calls = ExpertExchange.begin, 0

    def failing(self: ExpertExchange, *rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 21 and os.environ["RANK"] == "1":
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return begin(self, *rest)

    ExpertExchange.begin = failing  # type: ignore[method-assign]
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "disable_log_stats": True, "max_num_seqs": 8, "dist_timeout": 6.0}
    with LLM(folder, **{**settings, **args}) as llm:
        for chunk in llm.generate_stream([[5, 6, 7]] * 4, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)):
            print("given out", len(chunk.token_ids), flush=True)


@pytest.mark.parametrize(
    ("args", "how"), [({DP: 2, **SHM}, "kill"), ({DP: 2, **SHM, **HALVES}, "kill"), ({DP: 2, **SHM}, "sleep")], ids=str
)
def test_a_lost_rank_ends_the_others_by_name(args, how):
    start = time.monotonic()
    exits = collect_ranks(lose_rank, 2, str(checkpoint("v32")), args, how, timeout=60.0)
    assert time.monotonic() - start < 50.0
    assert exits[0].code not in (0, None), exits[0].stderr[-2000:]
    said = exits[0].stderr + exits[0].error
    assert "rank 1 did not come to" in said and ", layer " in said and "the last that came from it is" in said, said[-2000:]
