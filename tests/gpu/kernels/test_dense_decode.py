"""Dense decode on a GPU, against the plain version evaluated in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels.dense_decode import dense_decode
from rorqual.attention.kernels.dense_decode_torch import evaluate_dense
from rorqual.attention.kv.layout import encode_latent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BF16 = torch.bfloat16
LATENT, ROPE = 512, 64
ONE = [(1, 3000), (1, 1), (1, 64), (1, 0), (1, 700), (1, 65), (1, 2048)]
TWO = [(2, 3000), (2, 2), (2, 64), (1, 0), (2, 129), (1, 65), (2, 5000)]
KINDS = [(16, False), (16, True), (64, False), (128, True)]


def problem(requests: list[tuple[int, int]], page: int, heads: int, fp8: bool) -> dict[str, Any]:
    """Pages in a shuffled order; rows that no token sees hold NaN, pages past a request's keys are -1."""
    torch.manual_seed(page + heads)
    width = -(-max(keys for _, keys in requests) // page) + 2
    table = torch.randperm(len(requests) * width).int().view(len(requests), width)
    unused = torch.ones(table.numel() * page, dtype=torch.bool)
    for r, (_, keys) in enumerate(requests):
        place = torch.arange(keys)
        unused[table[r].long()[place // page] * page + place % page] = False
        table[r, -1] = -1
    values = torch.randn(len(unused), LATENT + ROPE, device="cuda")
    pool = encode_latent(values, LATENT) if fp8 else values.to(BF16)
    pool[unused.cuda()] = 255 if fp8 else float("nan")
    token_row = torch.tensor([r for r, (n, _) in enumerate(requests) for _ in range(n)], device="cuda")
    limit = torch.tensor([max(0, keys - n + 1 + i) for n, keys in requests for i in range(n)], dtype=torch.int32, device="cuda")
    return {
        "q_latent": torch.randn(heads, len(limit), LATENT, device="cuda", dtype=BF16).transpose(0, 1) * 0.5,
        "q_rope": torch.randn(len(limit), heads, ROPE, device="cuda", dtype=BF16) * 0.5,
        "pool": pool,
        "page_table": table.cuda(),
        "token_row": token_row,
        "limit": limit,
        "page_size": page,
        "scale": 0.1352,
        "max_context": 100_000,
        "max_query": max(n for n, _ in requests),
    }


def agree(given: dict[str, Any]) -> None:
    out, lse = dense_decode(**given)
    names = ("q_latent", "q_rope", "pool", "page_table", "token_row", "limit", "page_size", "scale", "max_context")
    wanted, wanted_lse = evaluate_dense(*(given[name] for name in names), torch.float64)
    error = (out - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)
    assert torch.isfinite(out).all() and error.max() <= 1e-2, f"relative error {error.max():.1e}"
    assert torch.equal(torch.isinf(lse), torch.isinf(wanted_lse))
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("heads", "fp8"), KINDS)
def test_one_token_a_request(heads, fp8):
    agree(problem(ONE, 64, heads, fp8))


@pytest.mark.parametrize(("heads", "fp8"), [(16, False), (64, False)])
def test_several_tokens_a_request(heads, fp8):
    agree(problem(TWO, 64, heads, fp8))


def test_pages_of_odd_size():
    agree(problem(ONE, 53, 16, False))


def test_long_and_short_together():
    agree(problem([(1, 60_000), *[(1, 1 + i) for i in range(200)]], 64, 16, False))


@pytest.mark.parametrize(("heads", "fp8"), KINDS)
def test_one_graph_serves_every_length_and_every_replay_is_equal(heads, fp8):
    given = problem(ONE, 64, heads, fp8)
    graph = torch.cuda.CUDAGraph()
    dense_decode(**given)
    with torch.cuda.graph(graph):
        found = dense_decode(**given)
    full = given["limit"].clone()
    for share in (1, 2, 7):
        given["limit"].copy_(full // share)
        first = dense_decode(**given)
        for _ in range(9):
            for tensor in found:
                tensor.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(one, two) for one, two in zip(first, found, strict=True))


@pytest.mark.parametrize(("heads", "fp8"), [(16, True), (64, False)])
def test_rows_past_two_gigabytes(heads, fp8):
    small = problem([(1, 200), (1, 130)], 64, heads, fp8)
    near = len(small["pool"]) // 64
    pages = 61_000
    pool = torch.zeros((pages * 64, small["pool"].shape[1]), dtype=small["pool"].dtype, device="cuda")
    pool[-near * 64 :] = small["pool"]
    far = {**small, "pool": pool, "page_table": torch.where(small["page_table"] >= 0, small["page_table"] + pages - near, -1)}
    for one, two in zip(dense_decode(**small), dense_decode(**far), strict=True):
        assert torch.equal(one, two)
