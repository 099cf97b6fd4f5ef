"""Orders and sums, by property."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.comm.order import ordered_sum, positions, sort_choices


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-1, 4), max_size=30))
def test_positions_are_a_stable_counting_sort(keys: list[int]) -> None:
    order, place, counts = positions(torch.tensor(keys, dtype=torch.int64), 5)
    want = sorted((i for i, key in enumerate(keys) if key >= 0), key=lambda i: keys[i])
    assert order.tolist() == want
    assert counts.tolist() == [keys.count(key) for key in range(5)]
    assert place.tolist() == [want.index(i) if key >= 0 else -1 for i, key in enumerate(keys)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 6), st.integers(1, 5), st.integers(0, 9), st.integers(1, 40), st.booleans(), st.integers(0, 10**6))
def test_ordered_sum_is_the_sum_of_each_token_alone(n: int, width: int, rows: int, hidden: int, weighted: bool, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    y = torch.randn(rows, hidden, generator=gen)
    index = torch.randint(-1, rows, (n, width), generator=gen) if rows else torch.full((n, width), -1)
    weights = torch.rand(n, width, generator=gen) if weighted else None
    out = ordered_sum(y, index, weights)
    assert out.shape == (n, hidden) and out.dtype == torch.float32
    for t in range(n):
        want = torch.zeros(hidden, dtype=torch.float64)
        for c in range(width):
            if index[t, c] >= 0:
                want += y[index[t, c]].double() * (1.0 if weights is None else weights[t, c].double())
        assert (out[t].double() - want).abs().max().item() < 1e-5
        alone = ordered_sum(y, index[t : t + 1], None if weights is None else weights[t : t + 1])
        assert torch.equal(alone[0], out[t])
        packed = index[t][index[t] >= 0]  # leaving out the -1 changes no bit
        kept = None if weights is None else weights[t][index[t] >= 0].unsqueeze(0)
        assert torch.equal(ordered_sum(y, packed.unsqueeze(0), kept)[0], out[t]) or len(packed) == 0


def test_choices_are_sorted_and_none_comes_last() -> None:
    ids = torch.tensor([[5, -1, 2, 2], [-1, -1, -1, -1], [3, 2, 1, 0]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 9.0, 0.25, 0.125], [1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.3, 0.4]])
    slots, sorted_weights = sort_choices(ids, weights)
    assert slots.tolist() == [[2, 2, 5, -1], [-1] * 4, [0, 1, 2, 3]] and slots.dtype == torch.int64
    assert torch.equal(sorted_weights[0, :3], torch.tensor([0.25, 0.125, 0.5]))
    assert torch.equal(sorted_weights[2], torch.tensor([0.4, 0.3, 0.2, 0.1]))
