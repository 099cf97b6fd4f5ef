"""The exact top-k against a stable sort, row by row."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.attention.topk import select_topk


def brute(scores: list[float], limit: int, k: int) -> list[int]:
    known = [float("-inf") if s != s else s for s in scores]
    best = sorted(range(limit), key=lambda p: (-known[p], p))[:k]  # a stable order: equal scores by position
    return sorted(best) + [-1] * (k - len(best))


FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, float("-inf"), float("inf"), float("nan")])  # heavy ties
MANY = st.floats(-(2.0**100), 2.0**100, width=32)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 40), st.integers(1, 50), st.booleans())
def test_equals_a_stable_sort(data, rows, length, k, ties):
    values = FEW if ties else st.one_of(FEW, MANY)
    scores = [data.draw(st.lists(values, min_size=length, max_size=length)) for _ in range(rows)]
    limits = [data.draw(st.integers(0, length)) for _ in range(rows)]
    out = select_topk(torch.tensor(scores), torch.tensor(limits), k)
    assert out.dtype == torch.int64
    assert out.tolist() == [brute(s, n, k) for s, n in zip(scores, limits, strict=True)]


def test_scores_past_the_limit_may_hold_anything():
    scores = torch.tensor([[1.0, 2.0, float("nan"), float("inf"), 9.0], [3.0, 1.0, 2.0, 0.0, float("nan")]])
    assert select_topk(scores, torch.tensor([2, 4]), 3).tolist() == [[0, 1, -1], [0, 1, 2]]
    assert select_topk(scores, torch.tensor([2, 4]), 7).tolist() == [[0, 1, -1, -1, -1, -1, -1], [0, 1, 2, 3, -1, -1, -1]]


def test_all_equal_keeps_the_first_and_the_input():
    scores = torch.zeros(2, 1000)
    assert select_topk(scores, torch.tensor([1000, 700]), 64).tolist() == [list(range(64))] * 2
    assert not scores.any()
    assert select_topk(torch.full((1, 9), float("-inf")), torch.tensor([9]), 4).tolist() == [[0, 1, 2, 3]]


def test_no_rows():
    assert select_topk(torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64), 4).shape == (0, 4)
