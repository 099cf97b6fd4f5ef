"""Rows sorted by slot without the host knowing how many, by property."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.layouts import contiguous, count_slots, masked, most_rows


def some_slots(rows: int, k: int, n_slots: int, seed: int) -> torch.Tensor:
    return torch.randint(-1, n_slots, (rows, k), generator=torch.Generator().manual_seed(seed)).int()


def make_spec(n_slots: int, k: int, alignment: int = 1) -> EPSpec:
    return EPSpec(n_ranks=1, n_slots=n_slots, hidden=8, top_k=k, max_tokens=16, alignment=alignment)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 6), st.sampled_from([1, 128]), st.integers(0, 10**6))
def test_contiguous_is_a_stable_sort_with_aligned_starts(rows: int, k: int, n_slots: int, alignment: int, seed: int) -> None:
    spec, slots = make_spec(n_slots, k, alignment), some_slots(rows, k, n_slots, seed)
    by = contiguous(spec, slots)
    choices = [(int(s), r, c) for r, row in enumerate(slots.tolist()) for c, s in enumerate(row) if s >= 0]
    assert by.counts.tolist() == [sum(s == slot for s, _, _ in choices) for slot in range(n_slots)]
    assert all(start % alignment == 0 for start in by.offsets.tolist()) and len(by.row) == most_rows(spec, rows)
    want = {}
    for slot in range(n_slots):
        for place, (_, row, column) in enumerate((c for c in sorted(choices) if c[0] == slot), int(by.offsets[slot])):
            want[place] = (row, column)
    for place, (row, choice) in enumerate(zip(by.row.tolist(), by.choice.tolist(), strict=True)):
        assert (row, choice) == ((want[place][0], want[place][0] * k + want[place][1]) if place in want else (-1, -1))
    assert {int(p): (r, c) for r, line in enumerate(by.index.tolist()) for c, p in enumerate(line) if p >= 0} == want
    x = torch.arange(rows * 8.0).view(rows, 8) + 1
    taken = by.take(x)
    assert all(torch.equal(taken[p], x[want[p][0]]) if p in want else not taken[p].any() for p in range(len(taken)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 6), st.integers(0, 10**6))
def test_masked_has_a_row_once_a_slot(rows: int, k: int, n_slots: int, seed: int) -> None:
    slots = some_slots(rows, k, n_slots, seed)
    by = masked(make_spec(n_slots, k), slots)
    for slot in range(n_slots):
        want = [r for r, row in enumerate(slots.tolist()) if slot in row]
        block = by.row[slot * rows : (slot + 1) * rows].tolist()
        assert int(by.counts[slot]) == len(want) and block == want + [-1] * (rows - len(want))
    for row, line in enumerate(by.index.tolist()):
        for column, place in enumerate(line):
            slot = int(slots[row, column])
            assert (place == -1) if slot < 0 else (int(by.row[place]) == row and place // rows == slot)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 8), st.sampled_from([1, 128]), st.integers(0, 10**6))
def test_an_order_of_rows_can_be_put_back(rows: int, alignment: int, seed: int) -> None:
    spec, slots = make_spec(4, 3, alignment), some_slots(rows, 3, 4, seed)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    by = contiguous(spec, slots[order])
    back = by.before(order)
    x = torch.arange(rows * 2.0).view(rows, 2)
    assert torch.equal(back.take(x), by.take(x[order])) and torch.equal(back.index[order], by.index)
    weights = torch.rand(rows, 3)
    assert torch.equal(back.take_choices(weights), by.take_choices(weights[order]))


def test_counts_need_no_rows() -> None:
    assert count_slots(torch.empty(0, 3, dtype=torch.int32), 2).tolist() == [0, 0]
    assert count_slots(torch.tensor([[1, -1], [1, 0]]), 3).tolist() == [1, 2, 0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.bfloat16])
def test_any_dtype_is_taken(dtype: torch.dtype) -> None:
    by = contiguous(make_spec(2, 1, 128), torch.tensor([[1], [-1], [0]]))
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).to(dtype)
    taken = by.take(x)
    assert taken.dtype == dtype and taken[0].float().tolist() == [5.0, 6.0] and taken[128].float().tolist() == [1.0, 2.0]
    assert not taken.float()[1:128].any()
