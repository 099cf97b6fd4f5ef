"""The sparse decode kernels on a GPU, against the plain version evaluated in fp64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import sparse_attention_torch as twin
from rorqual.attention.kernels.sparse_decode import DecodeConfig, plan, sparse_attention
from tests.attention.kernels.sparse_problem import error, make

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BF16 = torch.bfloat16


def config(kernel, splits):
    """A launch with a kernel and a number of splits of our choice."""
    keys, heads = 64 if kernel in ("few", "wide") else 32, 64 if kernel == "wide" else 16
    return DecodeConfig(kernel=kernel, heads=heads, keys=keys, splits=splits, warps=4, stages=4)


def agree(problem, launch=None, tolerance=1e-2):
    """Errors of bf16 outputs; ``error`` is relative and per head."""
    out, lse = sparse_attention(*problem.tensors, **problem.options, config=launch)
    wanted, wanted_lse = twin.evaluate(*problem.tensors, **problem.options, compute=torch.float64)
    assert error(out, wanted) <= tolerance
    assert (out[-1] == 0).all() and (lse[-1] == float("-inf")).all()
    assert torch.equal(torch.isinf(lse), torch.isinf(wanted_lse))
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("heads", [1, 4, 8, 16, 20, 32, 64, 128])
def test_fp8_rows_of_every_head_count(heads):
    agree(make(4, heads, 2048, q=BF16, n_rows=6000, device="cuda"))


@pytest.mark.parametrize(("kernel", "splits"), [("few", 1), ("few", 4), ("wide", 1), ("wide", 4), ("fp8", 4)])
def test_fp8_kernels_with_any_scales(kernel, splits):
    problem = make(3, 16, 1024, q=BF16, n_rows=3000, device="cuda", spread=1.0)
    agree(problem, config(kernel, splits), tolerance=4e-3)


@pytest.mark.parametrize("k", [1, 63, 64, 65, 1000])
def test_lengths(k):
    for heads in (16, 64):
        agree(make(3, heads, k, q=BF16, n_rows=3000, device="cuda", counts="all"))


def test_long_lists():
    agree(make(2, 16, 8192, q=BF16, n_rows=20000, device="cuda"))


@pytest.mark.parametrize("heads", [16, 64])
def test_bf16_rows(heads):
    agree(make(3, heads, 1024, q=BF16, pool=BF16, n_rows=3000, device="cuda"))


def test_small_model():
    agree(make(3, 8, 128, latent=128, rope=32, q=BF16, device="cuda"))


@pytest.mark.parametrize("heads", [16, 128])
def test_equal_in_every_replay_and_in_a_graph(heads):
    problem = make(4, heads, 2048, q=BF16, n_rows=6000, device="cuda")
    first = sparse_attention(*problem.tensors, **problem.options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sparse_attention(*problem.tensors, **problem.options)
    for _ in range(25):
        for tensor in found:
            tensor.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(one, two) for one, two in zip(first, found, strict=True))


@pytest.mark.parametrize("heads", [16, 64])
def test_a_token_does_not_depend_on_its_neighbours(heads):
    """With equal splits a token's result is the same bits alone and in a batch, whatever the others select."""
    problem = make(5, heads, 512, q=BF16, n_rows=3000, device="cuda")
    launch = plan(5, heads, 512, 512, 64, BF16, torch.uint8, True)
    out, _ = sparse_attention(*problem.tensors, **problem.options, config=launch)
    problem.q_latent, problem.q_rope, problem.rows = problem.q_latent[2:3], problem.q_rope[2:3], problem.rows[2:3]
    problem.n_keys = problem.n_keys[2:3]
    alone, _ = sparse_attention(*problem.tensors, **problem.options, config=launch)
    assert torch.equal(alone[0], out[2])


@pytest.mark.parametrize("heads", [16, 64])
def test_rows_past_two_gigabytes(heads):
    small = make(2, heads, 256, q=BF16, n_rows=2000, device="cuda", counts="all")
    before, _ = sparse_attention(*small.tensors, **small.options)
    skipped = (1 << 31) // 656 + 1000
    pool = torch.empty((skipped + 2000, 656), dtype=torch.uint8, device="cuda")
    pool[:8].fill_(255)
    pool[skipped:] = small.pool
    valid = (small.rows >= 0) & (small.rows < 2000)
    small.rows = torch.where(valid, small.rows + skipped, -1)
    small.pool = pool
    after, _ = sparse_attention(*small.tensors, **small.options)
    assert torch.equal(before, after)


def test_scales_at_the_ends_of_fp16():
    """Scales over eight orders of magnitude among the rows of a query, scores all alike: the large rows decide, nothing overflows."""
    for heads in (16, 64):
        problem = make(2, heads, 256, q=BF16, n_rows=1000, device="cuda", spread=4.0)
        problem.q_latent *= 1e-4
        agree(problem)
