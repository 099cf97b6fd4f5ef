"""Ranges of steps and parts, whatever makes them; taken away, the model is as it was."""

from contextlib import contextmanager

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.engine.step_ranges import StepRanges, nvtx_mark


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", load_format="dummy", dtype="float32", skip_tokenizer_init=True, max_total_tokens=1024, disable_log_stats=True) as llm:
        yield llm


def run(llm):
    return llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0))[0].outputs[0].token_ids


def test_every_step_and_part_has_a_range_and_tokens_are_the_same(llm):
    seen, depth, steps = [], [], []

    @contextmanager
    def mark(name):
        seen.append((len(depth), name))
        depth.append(name)
        yield
        assert depth.pop() == name

    plain, runner = run(llm), llm.engine.runner
    runner.trace = StepRanges(llm.engine.stage.model, mark, lambda: steps.append(1))
    try:
        assert run(llm) == plain
    finally:
        runner.trace.close()
        runner.trace = None
    outer = [name for level, name in seen if level == 0]
    assert len(outer) == len(steps) >= 4 and all(name.startswith("step ") and name.endswith(", eager") for name in outer)
    assert "1 prefill rows of 3 tokens" in outer[0], outer[0]
    parts = {name.rsplit(".", 1)[-1] for level, name in seen if level}
    assert {"attention", "MoE", "linear"} <= parts
    seen.clear()
    assert run(llm) == plain and seen == []


def test_nvtx_is_for_cuda():
    with pytest.raises(ValueError, match="NVTX ranges are for CUDA devices, found device cpu; leave out --enable-layerwise-nvtx-tracing"):
        nvtx_mark(torch.device("cpu"))
    with pytest.raises(ValueError, match="NVTX ranges are for CUDA"):
        LLM("tiny", load_format="dummy", device="cpu", enable_layerwise_nvtx_tracing=True, skip_tokenizer_init=True)
