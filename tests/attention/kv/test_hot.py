"""Memory of hot buffers and page tables: planned bytes are allocated bytes, and what a shape refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rorqual.attention.kernels.resolve_rows_sizes import scratch_words
from rorqual.attention.kv.hot import HotShape, allocate_hot_state, allocate_tables, hot_state_bytes, table_bytes, table_tensors
from rorqual.attention.kv.tier import TierCounter

SHAPE = HotShape(
    n_slots=5, n_layers=3, lease_pages=4, page_size=16, n_logical_pages=20, max_requests=6, max_context=100, chosen_rows=48
)  # fmt: skip


@pytest.mark.parametrize(
    "change", [{}, {"n_layers": 1}, {"lease_pages": 9, "page_size": 64}, {"max_context": 96, "n_slots": 1}, {"max_context": 300_000}]
)
def test_planned_bytes_are_allocated_bytes(change):
    shape = replace(SHAPE, **change)
    state, tables = allocate_hot_state(shape, "cpu"), allocate_tables(shape, "cpu", dummy_device_page=7)
    tensors = table_tensors(tables)
    assert state.n_bytes == hot_state_bytes(shape)
    assert sum(t.nbytes for t in tensors) == table_bytes(shape)
    assert {id(t) for t in tensors} >= {id(t) for t in vars(tables).values() if isinstance(t, torch.Tensor)}


def test_what_memory_says_at_first():
    state, tables = allocate_hot_state(SHAPE, "cpu"), allocate_tables(SHAPE, "cpu", dummy_device_page=7)
    assert state.positions.shape == state.stamps.shape == (3, 6, 64)
    assert (state.positions == -1).all() and (state.stamps == 0).all()
    assert state.counters.shape == (3, len(TierCounter)) and (state.counters == 0).all()
    assert tables.device_page.tolist() == [-1] * 20 + [7]
    assert (tables.host_page == -1).all() and (tables.hot_pages == -1).all() and (tables.moving == 0).all()
    assert tables.scratch.shape == (1, 112)  # whole pages
    layer = state.layer(2)
    layer.positions[0, 0] = 9
    assert state.positions[2, 0, 0] == 9 and state.positions[1, 0, 0] == -1


def test_a_lease_must_hold_what_a_step_chooses():
    replace(SHAPE, chosen_rows=64)
    with pytest.raises(ValueError, match=r"64 rows \(4 pages of 16\) cannot hold the 65 rows .* at least 5 pages"):
        replace(SHAPE, chosen_rows=65)


def test_what_most_leases_have_must_do():
    shape = replace(SHAPE, usual_pages=3)
    tables = allocate_tables(shape, "cpu", dummy_device_page=7)
    assert (shape.usual_rows, SHAPE.usual_rows, tables.usual_rows, tables.hot_pages.shape[1]) == (48, 64, 48, 4)
    with pytest.raises(ValueError, match=r"48 rows \(3 pages of 16\) cannot hold the 49 rows"):
        replace(shape, chosen_rows=49)
    with pytest.raises(ValueError, match="hot buffers of 4 pages cannot usually have 5; use 0 to 4"):
        replace(SHAPE, usual_pages=5)


def test_no_more_rows_than_the_kernels_count():
    """``resolve_rows`` packs two counts of hot rows into an int32."""
    replace(SHAPE, lease_pages=511, page_size=64)
    with pytest.raises(ValueError, match=r"kv_hot_slots: .* at most 32767 rows, got 32768 \(512 pages of 64\); use at most 32704"):
        replace(SHAPE, lease_pages=512, page_size=64)


def test_no_more_requests_than_a_fetch_serves():
    replace(SHAPE, max_requests=1024)
    with pytest.raises(ValueError, match="max_num_seqs: .* at most 1024 requests in a step, got 1025"):
        replace(SHAPE, max_requests=1025)


@pytest.mark.parametrize("name", ["n_slots", "n_layers", "lease_pages", "max_context"])
def test_nothing_is_empty(name):
    with pytest.raises(ValueError, match=f"{name} of at least 1, got 0"):
        replace(SHAPE, **{name: 0})


def test_scratch_for_contexts_whose_tables_do_not_fit_shared_memory():
    """128k positions of 256 requests take one row of scratch; a million take what ``resolve_rows`` asks for."""
    large = replace(SHAPE, lease_pages=64, page_size=64, chosen_rows=2048, max_requests=256, max_context=131_072)
    assert large.scratch_rows == 1
    longer = replace(large, max_context=1_000_000)
    assert longer.scratch_rows * longer.context_rows >= scratch_words(256, longer.context_rows, 2048, 4096) > 0
