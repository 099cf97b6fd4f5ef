"""The greedy sampler's kernels in the interpreter against the plain PyTorch version, and what they compile to."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.engine.sampling.kernels import argmax, argmax_torch  # noqa: E402
from tests.kernels.interpreter import repair  # noqa: E402
from tests.kernels.offline import Spec, compile_reports  # noqa: E402

repair()
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "vocab", "programs"), [(1, 1, 8), (1, 1000, 8), (3, 129, 8), (5, 300, 1), (2, 64, 4), (4, 257, 64)])
def test_equals_the_plain_version(rows, vocab, programs, dtype):
    torch.manual_seed(vocab)
    config = {"programs": programs, "block": 64, "warps": 1}
    x = torch.randn(rows, vocab + 3).to(dtype)[:, :vocab]
    assert torch.equal(argmax.greedy_tokens(x, config=config), argmax_torch.greedy_tokens(x))


@interpreted
@pytest.mark.parametrize("programs", [1, 16])
def test_ties_zeros_and_broken_logits(programs):
    config = {"programs": programs, "block": 32, "warps": 1}
    torch.manual_seed(0)
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([0.0, -0.0, -1.0, 2.0, -inf, inf, nan, -nan])
    for count in range(1, len(values) + 1):
        x = values[torch.randint(count, (4, 200))]
        assert torch.equal(argmax.greedy_tokens(x, config=config), argmax_torch.greedy_tokens(x))
    x = torch.full((2, 200), -inf)
    x[1, 150] = -3.0
    assert argmax.greedy_tokens(x, config=config).tolist() == [0, 150]


def test_no_rows_and_strides_it_cannot_read():
    assert argmax.greedy_tokens(torch.zeros(0, 9)).shape == (0,)
    with pytest.raises(ValueError, match="adjacent"):
        argmax.greedy_tokens(torch.zeros(9, 4).T)


def test_compiles_without_spills():
    signature = {"stride": "i32", "vocab": "i32", "part_size": "i32", "n_parts": "i32", "best": "*i64", "tokens": "*i64"}
    aligned = ("logits", "stride", "vocab", "part_size", "best", "tokens")
    specs = [
        Spec(
            fn="rorqual.engine.sampling.kernels.argmax:argmax_part_kernel",
            signature={"logits": pointer, **signature},
            constexprs={"BLOCK": 2048, "WHOLE": False},
            aligned=aligned,
            options={"num_warps": 4},
        )
        for pointer in ("*fp32", "*bf16")
    ]
    for report in compile_reports(specs):
        assert report.spill_bytes == 0
        assert report.registers <= 128
