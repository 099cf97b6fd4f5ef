"""``indexer_logits`` on the GPU against its fp64 evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.attention.kernels.indexer_problem import Problem, problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
TOLERANCE = 1e-3  # FP8 products on tensor cores keep about 14 bits of a sum of 128


def run(case: Problem, **more: Any) -> torch.Tensor:
    from rorqual.attention.kernels.indexer_logits import indexer_logits

    out = torch.full((len(case.q), -(-case.max_context // 64) * 64 + 64), float("nan"), device="cuda")
    return case.call(indexer_logits, out=out, **more)


@pytest.mark.parametrize("heads", [32, 64])
def test_decode_at_edge_lengths(heads: int) -> None:
    case = problem([(n, 1) for n in (1, 63, 64, 65, 127, 128, 2047, 2048, 2049, 8191, 8192, 8193)], heads=heads, device="cuda")
    assert case.error(run(case)) < TOLERANCE


@pytest.mark.parametrize("new", [2, 6])
def test_several_tokens_a_request(new: int) -> None:
    case = problem([(n, new) for n in (new, 64, 66, 1000, 4096)], device="cuda")
    assert case.error(run(case)) < TOLERANCE


@pytest.mark.parametrize("heads", [32, 64])
def test_prefill_of_mixed_requests(heads: int) -> None:
    case = problem([(1500, 1), (700, 700), (4100, 333), (64, 1), (65, 2), (3000, 9)], heads=heads, row_type=torch.int64, device="cuda")
    assert case.error(run(case)) < TOLERANCE


def test_prefill_and_decode_agree_to_the_bit_and_with_a_request_alone() -> None:
    case = problem([(900, 9), (1300, 1), (5000, 19), (77, 3)], device="cuda")
    mask = case.defined(case.max_context)
    whole = run(case)[:, : case.max_context]
    for token in (0, 8, 9, 10, 28, 31):
        alone = case.rows(slice(token, token + 1))
        for most in (1, 2, 64):
            result = run(replace(alone, max_query=most))[:, : case.max_context]
            assert torch.equal(result[mask[token : token + 1]], whole[token][mask[token]])


def test_nothing_but_the_defined_entries_is_needed_or_written_elsewhere() -> None:
    case = problem([(300, 2), (5, 1), (640, 1)], max_context=4096, device="cuda")
    out = run(case)
    assert bool(out[:, case.max_context :].isnan().all())
    beyond = torch.arange(case.max_context, device="cuda") >= (case.limit[:, None] + 63) // 64 * 64
    assert bool(out[:, : case.max_context][beyond].isnan().all()), "work past the limits"


def test_tokens_without_keys() -> None:
    case = problem([(300, 4), (200, 1)], device="cuda")
    case.limit[1] = 0
    case.token_row[4] = -1
    for most in (1, 2, 32):
        assert case.error(run(replace(case, max_query=most))) < TOLERANCE


def test_ranges_with_a_start() -> None:
    case = problem([(2000, 3), (900, 3), (64, 3)], device="cuda")
    start = torch.tensor([0, 0, 100, 899, 640, 63, 64, 0, 61], dtype=torch.int32, device="cuda")
    case = replace(case, start=start, max_query=64)
    assert case.error(run(case)) < TOLERANCE


def test_25_equal_replays_of_a_graph_with_other_limits() -> None:
    from rorqual.attention.kernels.indexer_logits import indexer_logits

    case = problem([(3000 + 17 * n, 1) for n in range(40)], max_context=131072, device="cuda")
    out = run(case)
    true = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.call(indexer_logits, out=out)
    for _ in range(25):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out.nan_to_num(7.0), true.nan_to_num(7.0))
    case.limit.copy_(torch.arange(0, 40, device="cuda") * 70)
    graph.replay()
    assert case.error(out) < TOLERANCE


def test_inputs_written_just_before_are_seen() -> None:
    """The launch may overlap the end of the kernel before it."""
    from rorqual.attention.kernels.indexer_logits import indexer_logits

    case = problem([(4096 + n, 1) for n in range(16)], device="cuda")
    out, big = torch.full((16, case.max_context), float("nan"), device="cuda"), torch.zeros(2**26, device="cuda")
    weights, q = case.weights.clone(), case.q.clone()

    def step() -> None:
        case.weights.zero_()
        case.limit.zero_()
        big.add_(1)
        case.q.copy_(q)
        case.weights.copy_(weights)
        case.limit.copy_(torch.arange(16, device="cuda", dtype=torch.int32) + 4096)
        case.call(indexer_logits, out=out)
        torch.mul(out, 2, out=case_copy)
        out.fill_(float("nan"))

    case_copy = torch.empty_like(out)
    step()
    true = case_copy.clone()
    assert case.error(true / 2) < TOLERANCE
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(25):
        graph.replay()
        assert torch.equal(case_copy.nan_to_num(7.0), true.nan_to_num(7.0))


def test_pool_of_more_than_two_to_the_31_bytes() -> None:
    n_pages = 2**31 // 8448 + 500
    case = problem([(2000, 1), (5000, 12)], n_pages=n_pages, first_page=n_pages - 400, device="cuda")
    assert case.error(run(case)) < TOLERANCE
    alone = replace(case.rows(slice(0, 1)), max_query=1)
    assert alone.error(run(alone)) < TOLERANCE


@pytest.mark.parametrize(("page_size", "heads", "width"), [(1, 64, 128), (16, 32, 64), (64, 4, 32)])
def test_portable_kernel_over_fp8(page_size: int, heads: int, width: int) -> None:
    case = problem([(1500, 1), (130, 130), (1, 1), (1025, 2)], heads=heads, width=width, page_size=page_size, device="cuda")
    assert case.error(run(case)) < TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]
)
def test_portable_kernel_over_floats(dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    case = problem([(1500, 1), (130, 130), (1, 1)], heads=4, width=64, page_size=16, dtype=dtype, pool_dtype=pool_dtype, device="cuda")
    assert case.error(run(case)) < 1e-5
