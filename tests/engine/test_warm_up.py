"""Steps on padding before the first request: which there are, and that they change nothing but what is compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.engine.warm_up import warm_up, warm_up_shapes
from tests.checkpoints import checkpoint
from tests.engine.parity import greedy_tokens, ragged_prompts
from tests.kernels.offline import ROOT
from tests.ranks import run_ranks

TP, DP, PP = "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"


def test_shapes_reach_all_sizes_and_begin_with_the_most_tokens():
    found = warm_up_shapes(4096, 131072)
    assert found[0] == (4096, 131072) and found == sorted(found, reverse=True) and len(set(found)) == len(found)
    assert {t for t, c in found if t == c} == {2**i for i in range(13)} | {3, 5, 6, 7}
    assert {c for t, c in found if t == 64} == {64, 16384, 32768, 65536, 131072}
    assert {t for t, c in found if c == 131072} == {2**i for i in range(9)} | {4096}
    assert (4096, 100_000) in warm_up_shapes(4096, 100_000) and (64, 100_000) in warm_up_shapes(4096, 100_000)
    assert all(t <= c for t, c in found)


@pytest.mark.parametrize(("most", "longest"), [(1, 1), (7, 100), (8192, 10), (64, 64), (8192, 5000)])
def test_shapes_of_small_engines(most, longest):
    found = warm_up_shapes(most, longest)
    assert (min(most, longest), min(most, longest)) in found and (min(most, longest), longest) in found
    assert all(1 <= t <= min(most, c) and c <= longest for t, c in found)


SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "disable_log_stats": True,
    "max_num_seqs": 4,
    "max_model_len": 160,
}
PROMPTS, N = ragged_prompts(6), 12


def warmed(folder: str, engine_args: dict[str, Any]) -> tuple[list[list[int]], int, int]:
    """(tokens after steps on padding, number of these steps, choices of experts that they left counted), with the debug mode's checks."""
    torch.set_num_threads(1)
    with LLM(folder, **{**SETTINGS, **engine_args}) as llm:
        load = llm.engine.stage.load
        assert load is not None
        steps = warm_up(llm.engine.runner, most_tokens=64, max_len=160)
        left = int(load.counts.sum())
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=N, ignore_eos=True), use_tqdm=False)
        return [o.outputs[0].token_ids for o in outputs], steps, left


LAYOUTS = [
    {}, {TP: 2}, {DP: 2}, {PP: 2}, {"kv_offload": "host", "kv_host_memory": 0.2}, {"kv_offload": "hybrid", "kv_host_memory": 0.2},
    {DP: 2, "enable_two_batch_overlap": True, "two_batch_overlap_min_tokens": 2, "moe_a2a_backend": "torch_static"},
]  # fmt: skip


@pytest.mark.parametrize("args", LAYOUTS, ids=str)
def test_steps_on_padding_change_no_token_and_count_no_expert(args, monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    folder, world = str(checkpoint("v32")), args.get(TP, 1) * args.get(DP, 1) * args.get(PP, 1)
    right = greedy_tokens(folder, prompts=PROMPTS, n=N, **SETTINGS)
    found = run_ranks(warmed, world, folder, args, timeout=120.0) if world > 1 else [warmed(folder, args)]
    assert found[0][0] == right
    assert {steps for _, steps, _ in found} == {len(warm_up_shapes(64, 160))} and {left for _, _, left in found} == {0}


def test_too_little_memory_is_said_with_the_step_that_found_it(monkeypatch):
    def rehearse(plan: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with LLM(str(checkpoint("v32")), **SETTINGS) as llm:
        monkeypatch.setattr(llm.engine.runner, "rehearse", rehearse)
        with pytest.raises(RuntimeError, match="a step of 64 tokens that end at 160 does not fit .* lower --max-num-batched-tokens"):
            warm_up(llm.engine.runner, most_tokens=64, max_len=160)


def test_nothing_is_run_where_nothing_is_compiled(monkeypatch):
    with LLM(str(checkpoint("v32")), **SETTINGS) as llm:
        monkeypatch.setattr(llm.engine.runner, "rehearse", lambda plan: pytest.fail("a step was run"))
        assert llm.engine.warm_up() >= 0.0
        stream = llm.generate_stream([[5] * 8], SamplingParams(max_tokens=4, ignore_eos=True))
        next(stream)
        with pytest.raises(ValueError, match="another call has not ended"):
            llm.engine.warm_up()
        assert list(stream)
    with pytest.raises(ValueError, match="closed"):
        llm.engine.warm_up()


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["bfloat16", "fp8"])
def test_no_prompt_would_compile_a_kernel(rows):
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.kinds", rows], capture_output=True, text=True, cwd=ROOT, timeout=300.0,
        env={**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["new"] == {} and found["kernels"] > 10 and found["warm"] > 30


def test_a_step_is_waited_for_under_the_deadline_and_a_failed_exchange_in_it_is_told(monkeypatch):
    """Else a server would say that it is ready, and its first request find out."""
    found: list[Any] = []
    with LLM(str(checkpoint("v32")), **SETTINGS) as llm:
        runner, progress = llm.engine.runner, llm.engine.grid.progress
        monkeypatch.setattr(runner.streams, "settle", lambda: found.append((progress.op, progress.since > 0.0, progress.record()["batch"])))
        monkeypatch.setattr(runner.watch, "ended", lambda step: found.append(step))
        warm_up(runner, most_tokens=2, max_len=160)
        assert found[0] == ("end of a step on padding", True, "0 decode rows, 1 prefill rows of 2 tokens; tokens of all replicas [2]")
        assert found[1] == -1 and not progress.since
