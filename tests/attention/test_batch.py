"""Ragged batches, their tiles and chunks, against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.attention import tiles
from rorqual.attention.batch import AttentionBatch
from rorqual.attention.kv.tier import TierTables

CPU = torch.device("cpu")


def build(starts, counts, page_size=4, seed=0):
    need = max([-(-(s + c) // page_size) for s, c in zip(starts, counts, strict=True)], default=0) + 1
    table = torch.randperm(need * len(starts), generator=torch.Generator().manual_seed(seed)).int().view(len(starts), need)
    return AttentionBatch.build(np.array(starts, np.int64), np.array(counts, np.int64), table, page_size, CPU), table.tolist()


REQUESTS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), max_size=6)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.sampled_from([1, 4, 16]), st.sampled_from([64, 1000, 1 << 20]), st.integers(1, 9), st.integers(0, 40))
def test_everything_a_layer_reads_equals_a_loop(requests, page_size, budget, pair_cost, key_cost):
    starts, counts = [r[0] for r in requests], [r[1] for r in requests]
    batch, table = build(starts, counts, page_size)
    tokens = [(r, s + i) for r, (s, c) in enumerate(zip(starts, counts, strict=True)) for i in range(c)]

    def row(r: int, p: int) -> int:
        return table[r][p // page_size] * page_size + p % page_size

    assert batch.token_row.tolist() == [r for r, _ in tokens] and batch.positions.tolist() == [p for _, p in tokens]
    assert batch.write_rows.tolist() == [row(r, p) for r, p in tokens]
    assert batch.query_start.tolist() == [sum(counts[:i]) for i in range(len(counts) + 1)]
    assert batch.context_lens.tolist() == [s + c for s, c in requests]
    assert (batch.max_context, batch.max_query) == (max([s + c for s, c in requests], default=0), max(counts, default=0))
    assert (batch.n_tokens, batch.n_requests) == (len(tokens), len(requests))

    before, tiles.ELEMENT_BUDGET = tiles.ELEMENT_BUDGET, budget
    try:
        seen = check_groups(batch, tokens, row, starts, counts, pair_cost, key_cost, budget)
    finally:
        tiles.ELEMENT_BUDGET = before
    assert sorted(seen) == list(range(len(tokens)))


def check_groups(batch, tokens, row, starts, counts, pair_cost, key_cost, budget):
    seen = []
    for group in batch.groups:
        members = group.members.tolist()
        assert len({counts[tokens[m][0]] == 1 for m in members}) == 1  # single tokens and chunks never share a group
        assert group.whole == (len(members) == len(tokens)) and group.n_tokens == len(members)
        spans = group.spans.request.tolist()
        wanted = [row(r, p) for r in spans for p in range(starts[r] + counts[r])]
        assert group.spans.rows.tolist() == wanted
        for chunk in group.chunks(pair_cost=pair_cost, key_cost=key_cost):
            n, b = chunk.limit.shape
            lone = n == 1 and (b == 1 or chunk.keys * b * pair_cost <= chunk.keys * max(key_cost, budget // chunk.keys))
            assert lone or n * chunk.keys * (b * pair_cost + key_cost) <= budget
            out = torch.full((group.n_tokens,), -1)
            chunk.store(out, torch.arange(n * b))
            for local, place in enumerate(out.tolist()):
                if place < 0:
                    continue
                r, p = tokens[members[local]]
                tile = place // b
                seen.append(members[local])
                assert chunk.limit.view(-1)[place] == p + 1 and chunk.keys > p and int(chunk.request[tile]) == r
                last = int(chunk.context[tile]) - 1
                assert p <= last < starts[r] + counts[r]
                assert chunk.key_rows[tile].tolist() == [row(r, min(k, last)) for k in range(chunk.keys)]
                assert chunk.hidden.view(n * b, -1)[place].tolist() == [k > p for k in range(chunk.keys)]
    return seen


def test_nothing():
    batch, _ = build([], [])
    assert batch.groups == () and batch.n_tokens == 0 and batch.max_context == 0 and batch.write_rows.shape == (0,)
    batch, _ = build([5, 0], [0, 0])
    assert batch.groups == () and batch.context_lens.tolist() == [5, 0] and batch.max_context == 5


@pytest.mark.parametrize("counts", [(1,), (3,), (1, 4, 1), (129, 1, 7, 1)])
def test_arrays_begin_on_16_bytes_whatever_their_lengths(counts):
    """Kernels are compiled by the alignment of their operands: an odd number of tokens is to be no other kind."""
    n, pages = len(counts), torch.arange(8 * len(counts), dtype=torch.int32).view(len(counts), 8)
    batch = AttentionBatch.build(np.arange(n), np.array(counts), pages, 64, torch.device("cpu"))
    arrays = [batch.positions, batch.token_row, batch.query_start, batch.context_lens]
    assert {(array.data_ptr() - batch.positions.data_ptr()) % 16 for array in arrays} == {0}


def test_rows_of_selected_positions_with_and_without_the_table(monkeypatch):
    batch, table = build([9, 3, 0], [1, 4, 0])
    request, positions = torch.tensor([0, 1, 1]), torch.tensor([[0, 9, 4], [6, 0, 5], [1, 1, 3]])
    expected = [[table[r][p // 4] * 4 + p % 4 for p in ps] for r, ps in zip(request.tolist(), positions.tolist(), strict=True)]
    assert batch.rows(request, positions).tolist() == expected
    monkeypatch.setattr("rorqual.attention.batch._ROW_TABLE", 1)
    assert batch.rows(request, positions).tolist() == expected


def test_chunks_and_shared_values_are_made_once():
    batch, _ = build([0], [70])
    group = batch.groups[0]
    assert group.chunks(pair_cost=2, key_cost=3) is group.chunks(pair_cost=2, key_cost=3)
    assert batch.once("x", lambda: [1]) is batch.once("x", lambda: [2])


def test_padding_is_bounded_when_one_long_request_meets_many_short_ones():
    batch, _ = build([0] * 21, [500] + [3] * 20)
    computed = sum(c.limit.numel() for g in batch.groups for c in g.chunks(pair_cost=1, key_cost=1))
    assert computed <= 500 + 63 + 20 * 64


@pytest.mark.parametrize("offloaded", [False, True])
def test_index_rows_are_logical_and_latent_rows_physical(offloaded):
    device_page, host_page = torch.tensor([7, -1, 5, 2, 9], dtype=torch.int32), torch.tensor([-1, 3, 1, -1, -1], dtype=torch.int32)
    tables = TierTables(
        device_page=device_page, host_page=host_page, hot_pages=torch.empty(3, 1, dtype=torch.int32), stamp=torch.zeros(1),
        moving=torch.tensor([0, 1, 0], dtype=torch.int8), scratch=torch.empty(0),
    )  # fmt: skip
    table, slots = torch.tensor([[1, 2, 4], [0, 3, 4]], dtype=torch.int32), torch.tensor([1, 0])
    absent = np.array([True, False])
    tier = tables.step(table, slots, page_size=4, offloaded=offloaded, absent=absent, leased=~absent)
    assert tier.latent_table.tolist() == [[-1, 5, 9], [7, 2, 9]]
    assert (tier.host_table is None) != offloaded and (tier.moving is None) != offloaded
    if offloaded:
        assert tier.host_table.tolist() == [[3, 1, -1], [-1, -1, -1]] and tier.moving.tolist() == [1, 0]
    batch = AttentionBatch.build(np.array([5, 2]), np.array([1, 3]), table, 4, CPU, tier)
    assert batch.write_rows.tolist() == [9, 2, 3, 12] and batch.latent_write_rows.tolist() == [21, 30, 31, 8]
    assert (batch.offloaded, batch.absent) == (offloaded, offloaded)
    assert batch.rows(torch.tensor([1, 1]), torch.tensor([[4, 0], [1, 2]])).tolist() == [[8, 28], [29, 30]]
    (chunk,) = batch.groups[1].chunks(pair_cost=1, key_cost=1)
    assert chunk.key_rows[0].tolist() == [0, 1, 2, 3, 12] and chunk.latent_rows[0].tolist() == [28, 29, 30, 31, 8]
    assert batch.groups[1].spans.rows.tolist() == [28, 29, 30, 31, 8]
    positions = torch.tensor([6, 1])
    one = tables.step(table, slots, page_size=4, offloaded=offloaded, positions=positions)
    for places in (one, tier):
        static = AttentionBatch.static(positions, torch.arange(2), table, 4, max_context=12, tier=places)
        assert static.write_rows.tolist() == [10, 1] and static.latent_write_rows.tolist() == [22, 29]


def test_our_own_mistakes_are_caught():
    table = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(AssertionError):
        AttentionBatch.build(np.array([7]), np.array([2]), table, 4, CPU)  # nine keys do not fit two pages of four
    with pytest.raises(AssertionError):
        AttentionBatch.build(np.array([0]), np.array([2]), table, 3, CPU)
