"""The greedy sampler's kernels on a GPU against the plain PyTorch version."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
pytest.importorskip("triton")

from rorqual.engine.sampling.kernels import argmax, argmax_torch  # noqa: E402

DEVICE = torch.device("cuda")
VOCAB = 129_280


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 64, 1500])
def test_equals_the_plain_version(rows, dtype):
    vocab = VOCAB if rows <= 64 else 32_000
    x = torch.randn(rows, vocab + 8, device=DEVICE).to(dtype)[:, :vocab]
    assert torch.equal(argmax.greedy_tokens(x), argmax_torch.greedy_tokens(x.cpu()).to(DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_and_broken_logits(dtype):
    nan, inf = float("nan"), float("inf")
    x = torch.full((7, VOCAB), -inf, device=DEVICE, dtype=dtype)
    x[1, [5, 70_000]] = 1.0
    x[2, [100_000, VOCAB - 1]] = nan
    x[2, 3] = inf
    x[3, 9], x[3, 8] = 0.0, -0.0
    x[4, [VOCAB - 1]] = -3.0
    x[5] = 2.5
    x[6, 50_000:] = -nan
    wanted = [0, 5, 100_000, 8, VOCAB - 1, 0, 50_000]
    assert argmax.greedy_tokens(x).tolist() == wanted


def test_replays_of_a_graph_are_equal():
    x = torch.randn(17, VOCAB, device=DEVICE).to(torch.bfloat16)  # bf16: many ties
    argmax.greedy_tokens(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = argmax.greedy_tokens(x)
    wanted = argmax_torch.greedy_tokens(x.cpu()).to(DEVICE)
    for _ in range(25):
        out.fill_(-1)
        graph.replay()
        assert torch.equal(out, wanted)


def test_rows_past_2_to_the_31_elements():
    stride = 1 << 28
    buffer = torch.empty(9 * stride + 4096, device=DEVICE, dtype=torch.bfloat16)
    x = buffer.as_strided((10, 4096), (stride, 1))
    x.copy_(torch.randn(10, 4096, device=DEVICE))
    assert torch.equal(argmax.greedy_tokens(x), argmax_torch.greedy_tokens(x.cpu()).to(DEVICE))
