"""FP4 index keys on the GPU: ``indexer_logits`` against its fp64 evaluation, ``write_index`` against its twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.attention.kernels.indexer_problem import Problem, problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
TOLERANCE = 1e-3  # FP8 products on tensor cores keep about 14 bits of a sum of 128


def fp4(requests: list[tuple[int, int]], **more: Any) -> Problem:
    return problem(requests, fp4=True, device="cuda", **more)


def run(case: Problem, **more: Any) -> torch.Tensor:
    from rorqual.attention.kernels.indexer_logits import indexer_logits

    out = torch.full((len(case.q), -(-case.max_context // 64) * 64 + 64), float("nan"), device="cuda")
    return case.call(indexer_logits, out=out, **more)


@pytest.mark.parametrize("heads", [32, 64])
def test_decode_at_edge_lengths(heads: int) -> None:
    case = fp4([(n, 1) for n in (1, 63, 64, 65, 127, 128, 2047, 2048, 2049, 8191, 8192, 8193)], heads=heads)
    assert case.error(run(case)) < TOLERANCE


def test_every_multiplier_and_magnitude_is_exact() -> None:
    """One query of one value picks one value of each key: products and sums are exact, so results equal the twin's to the last bit."""
    case = fp4([(1024, 128)], heads=64)
    q = torch.zeros(128, 64, 128, device="cuda")
    weights = torch.zeros(128, 64, device="cuda")
    place = torch.arange(128, device="cuda")
    q[place, 0, place], q[place, 1, place] = 1.0, -1.0
    weights[:, 0], weights[:, 1] = 1.0, -1.0
    case = replace(case, q=q.to(torch.float8_e4m3fn), weights=weights, limit=torch.full_like(case.limit, 1024))
    assert torch.equal(run(case)[:, :1024].double(), case.reference())


@pytest.mark.parametrize("new", [2, 6])
def test_several_tokens_a_request(new: int) -> None:
    case = fp4([(n, new) for n in (new, 64, 66, 1000, 4096)])
    assert case.error(run(case)) < TOLERANCE


@pytest.mark.parametrize("heads", [32, 64])
def test_prefill_of_mixed_requests(heads: int) -> None:
    case = fp4([(1500, 1), (700, 700), (4100, 333), (64, 1), (65, 2), (3000, 9)], heads=heads, row_type=torch.int64)
    assert case.error(run(case)) < TOLERANCE


def test_prefill_and_decode_agree_to_the_bit_and_with_a_request_alone() -> None:
    case = fp4([(900, 9), (1300, 1), (5000, 19), (77, 3)])
    mask = case.defined(case.max_context)
    whole = run(case)[:, : case.max_context]
    for token in (0, 8, 9, 10, 28, 31):
        alone = case.rows(slice(token, token + 1))
        for most in (1, 2, 64):
            result = run(replace(alone, max_query=most))[:, : case.max_context]
            assert torch.equal(result[mask[token : token + 1]], whole[token][mask[token]])


def test_nothing_but_the_defined_entries_is_needed_or_written_elsewhere() -> None:
    case = fp4([(300, 2), (5, 1), (640, 1)], max_context=4096)
    out = run(case)
    assert bool(out[:, case.max_context :].isnan().all())
    beyond = torch.arange(case.max_context, device="cuda") >= (case.limit[:, None] + 63) // 64 * 64
    assert bool(out[:, : case.max_context][beyond].isnan().all()), "work past the limits"


def test_tokens_without_keys_and_ranges_with_a_start() -> None:
    case = fp4([(300, 4), (200, 1)])
    case.limit[1] = 0
    case.token_row[4] = -1
    assert case.error(run(case)) < TOLERANCE
    case = fp4([(2000, 3), (900, 3), (64, 3)])
    start = torch.tensor([0, 0, 100, 899, 640, 63, 64, 0, 61], dtype=torch.int32, device="cuda")
    assert case.error(run(replace(case, start=start, max_query=64))) < TOLERANCE


def test_25_equal_replays_of_a_graph_with_other_limits() -> None:
    from rorqual.attention.kernels.indexer_logits import indexer_logits

    case = fp4([(3000 + 17 * n, 1) for n in range(40)], max_context=131072)
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


def test_pool_of_more_than_two_to_the_31_bytes() -> None:
    n_pages = 2**31 // 4352 + 500
    case = fp4([(2000, 1), (5000, 12)], n_pages=n_pages, first_page=n_pages - 400)
    assert case.error(run(case)) < TOLERANCE
    alone = replace(case.rows(slice(0, 1)), max_query=1)
    assert alone.error(run(alone)) < TOLERANCE


@pytest.mark.parametrize(("page_size", "heads", "width"), [(1, 64, 128), (16, 32, 64), (64, 4, 32), (64, 4, 256)])
def test_portable_kernel(page_size: int, heads: int, width: int) -> None:
    case = fp4([(1500, 1), (130, 130), (1, 1), (1025, 2)], heads=heads, width=width, page_size=page_size)
    assert case.error(run(case)) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize(("width", "page_size"), [(128, 64), (64, 16)])
def test_written_keys_are_those_of_the_twin(tokens: int, width: int, page_size: int) -> None:
    from rorqual.attention.kernels import index_write, index_write_torch
    from rorqual.attention.kv import fp4 as format
    from tests.attention.kernels.fused import gains, noise, places, turns

    n_pages = -(-tokens // page_size) + 2
    k, turn = noise(tokens, width, dtype=torch.bfloat16), turns(tokens, width // 2)
    rows = places(tokens, n_pages * page_size, skip=7 if tokens > 1 else 0)
    weight, bias = gains(width), gains(width, seed=3) - 1
    pools = [
        torch.full((n_pages, page_size * format.key_bytes(width)), 0xFF, dtype=torch.uint8, device=device) for device in ("cuda", "cpu")
    ]
    options: dict[str, Any] = {"page_size": page_size, "interleaved": False, "rotate": True}
    index_write.write_index(*(x.cuda() for x in (k, weight, bias)), 1e-6, turn.cuda(), rows.cuda(), pools[0], **options)
    index_write_torch.write_index(k, weight, bias, 1e-6, turn, rows, pools[1], **options)
    half = page_size * width // 2
    words = [pool.cpu()[:, half:].view(torch.int32).flatten() for pool in pools]
    kept = words[1] != -1
    assert torch.equal(words[0] == -1, ~kept) and int(kept.sum()) == int((rows >= 0).sum())
    # sums are rounded in another order: a block may find another multiplier as good, a value may fall to the other side of a tie
    assert int((words[0] != words[1]).sum()) <= tokens // 50
    equal = (words[0] == words[1]) & kept
    codes = [pool.cpu()[:, :half].reshape(-1, width // 2)[equal] for pool in pools]
    assert float((codes[0] != codes[1]).float().mean()) < 0.01
    values = [format.decode(code, words[1][equal])[0] for code in codes]
    assert float((values[0] - values[1]).norm() / values[1].norm()) < 0.02
