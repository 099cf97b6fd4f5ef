"""FP8 checkpoints whose weights stay FP8, through the whole engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.engine.weights.convert import convert_fp8
from tests.checkpoints import TINY
from tests.engine.parity import greedy_tokens
from tests.ranks import run_ranks

TEXT = ["The capital of France is", "One day a whale", "def main():"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("fp8") / "tiny-fp8"
    convert_fp8(TINY, out)
    return out


@pytest.fixture(scope="module")
def prompts(folder) -> list[list[int]]:
    from rorqual.engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(TINY)
    return [tokenizer.encode(text) for text in TEXT]


@pytest.fixture(scope="module")
def kept(folder, prompts) -> list[list[int]]:
    def check(llm: LLM) -> None:
        model = llm.engine.stage.model
        narrow = [name for name, p in model.named_parameters() if p.dtype == torch.float8_e4m3fn]
        assert len(narrow) == 5 * 6 + 3 + 4 * (2 + 3), len(narrow)  # per layer attention, one dense MLP, experts and shared ones
        assert not any("kv_b_proj" in name for name in narrow)

    return greedy_tokens(folder, prompts=prompts, n=12, fp8_gemm_backend="torch", check=check)


def logprobs(folder: Path, texts: list[list[int]], **settings) -> torch.Tensor:
    """Log-probabilities of all tokens but the first of every text, laid end to end."""
    args = {"skip_tokenizer_init": True, "dtype": "float32", "disable_log_stats": True, **settings}
    with LLM(str(folder), **args) as llm:
        outputs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    found = []
    if not outputs:  # not rank 0
        return torch.zeros(0)
    for output, text in zip(outputs, texts, strict=True):
        found += [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], text[1:], strict=True)]
    return torch.tensor(found)


def test_probabilities_are_those_of_the_widened_weights(folder, prompts, kept):
    """Activations are rounded to e4m3 besides: single tokens move a little, the mean hardly."""
    texts = [prompt + tokens for prompt, tokens in zip(prompts, kept, strict=True)]
    narrow, wide = logprobs(folder, texts, fp8_gemm_backend="torch"), logprobs(folder, texts)
    assert abs(float((narrow - wide).mean())) < 0.05 and float((narrow - wide).abs().mean()) < 0.2


def rank_logprobs(folder: str, texts: list[list[int]]) -> list[float]:
    torch.set_num_threads(1)
    return logprobs(Path(folder), texts, fp8_gemm_backend="torch", tensor_parallel_size=2).tolist()


def test_tensor_parallel_ranks_give_the_same_probabilities(folder, prompts, kept):
    """Not the same bits: a sum over ranks that differs in its last bit may round an activation to the next e4m3 value."""
    texts = [prompt + tokens for prompt, tokens in zip(prompts, kept, strict=True)]
    split = torch.tensor(run_ranks(rank_logprobs, 2, str(folder), texts)[0])
    whole = logprobs(folder, texts, fp8_gemm_backend="torch")
    assert abs(float((split - whole).mean())) < 0.05 and float((split - whole).abs().mean()) < 0.2


def test_an_unquantised_checkpoint_is_not_taken_for_fp8():
    with LLM("tiny", fp8_gemm_backend="torch", disable_log_stats=True) as llm:
        assert all(p.dtype != torch.float8_e4m3fn for p in llm.engine.stage.model.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp8_gemm_backend": "triton"}, "fp8 backend 'triton' needs a CUDA device, this rank runs on cpu"),
        ({"attention_backend": "triton"}, "the triton backend needs a CUDA device, this rank runs on cpu"),
        ({"moe_runner_backend": "triton"}, "the triton backend needs a CUDA device, this rank runs on cpu"),
    ],
)
def test_gpu_backends_are_refused_on_the_cpu(folder, settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), device="cpu", skip_tokenizer_init=True, disable_log_stats=True, **settings)


def test_a_configuration_without_weights_asks_for_dummy_ones():
    with pytest.raises(ValueError, match="'v3.2-slice' is a configuration without weights; add --load-format dummy"):
        LLM("v3.2-slice", device="cpu")


def test_weights_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr("rorqual.engine.memory.host_available", lambda: 10**9)
    with pytest.raises(ValueError, match=r"the weights of this rank take 74\.0 GB, 1\.0 GB are free in host memory for each of 1 ranks"):
        LLM("v3.2-slice", device="cpu", load_format="dummy", disable_log_stats=True)
