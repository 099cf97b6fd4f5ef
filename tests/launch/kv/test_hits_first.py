"""Attention in two parts: the small kernels against plain torch, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from rorqual.launch.bench.kv import hits_first

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no CUDA device")


def test_fetched_rows_are_left_out():
    from rorqual.launch.bench.kv.hits_first_kernels import found_rows

    rows = torch.tensor([[5, 2, -1, 40, 7], [9, 11, 8, 41, -1]], dtype=torch.int32)
    target = torch.tensor([[2, 7, 99, 99, 99], [8, 99, 99, 99, 99]], dtype=torch.int32)
    count, stamp = torch.tensor([2, 1], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    expected = torch.tensor([[5, -1, -1, 40, -1], [9, 11, -1, 41, -1]], dtype=torch.int32)
    for function in (found_rows, hits_first.found_rows):
        mark = torch.zeros(16, dtype=torch.int32)
        assert torch.equal(function(rows, target, count, mark, stamp), expected)


def test_two_attentions_join_to_one():
    from rorqual.launch.bench.kv.hits_first_kernels import join

    scores, values = torch.randn(3, 4, 10), torch.randn(10, 24)
    scores[1, 2, :6] = float("-inf")
    scores[2, 3] = float("-inf")

    def attend(some: slice) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.logsumexp(scores[..., some], -1)
        return scores[..., some].softmax(-1).nan_to_num(0.0) @ values[some], lse

    whole, _ = attend(slice(None))
    first, second = attend(slice(0, 6)), attend(slice(6, None))
    for function in (join, hits_first.join):
        torch.testing.assert_close(function(*first, *second), whole)
