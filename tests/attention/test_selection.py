"""Planted selections: dense, recent, random; and layers that share one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rorqual.attention.mla import layer_has_indexer
from rorqual.attention.selection import random_keys, recent_keys
from tests.attention.common import DENSE, SPARSE, Paged, make_mla

TYPES = dataclasses.replace(SPARSE, indexer=dataclasses.replace(SPARSE.indexer, layer_types=("full", "shared", "full")))


def test_recent_keys():
    batch = Paged(SPARSE, [6, 3]).batch([0, 1], [6, 2])
    assert recent_keys(batch, 4).tolist() == [
        [0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [0, -1, -1, -1], [0, 1, -1, -1],
    ]  # fmt: skip


def test_random_keys_are_visible_distinct_and_the_same_in_any_batch():
    paged = Paged(SPARSE, [300, 50])
    once = random_keys(paged.batch([0, 1], [300, 50]), 8, layer=2)
    for position, row in enumerate(once[:300].tolist()):
        kept = [p for p in row if p >= 0]
        assert row == sorted(set(kept)) + [-1] * (8 - len(kept)) and len(kept) == min(8, position + 1) and max(kept) <= position
    assert torch.equal(once[:50], once[300:])  # position decides, not the request
    paged.done[:] = [299, 20]
    assert torch.equal(random_keys(paged.batch([1, 0], [1, 1]), 8, layer=2), once[[320, 299]])
    for other in ({"layer": 3}, {"layer": 2, "seed": 1}):
        assert not torch.equal(random_keys(Paged(SPARSE, [300]).batch([0], [300]), 8, **other), once[:300])


def test_random_keys_are_even():
    drawn = torch.cat([random_keys(Paged(SPARSE, [400]).batch([0], [400]), 8, layer=n)[200:] for n in range(10)])
    share = torch.bincount(drawn[drawn < 200] // 20, minlength=10).double()
    share /= share.sum()
    assert drawn.min() >= 0 and (share - 0.1).abs().max() < 0.015


def test_dense_equals_an_mla_without_an_indexer():
    mla, plain = make_mla(SPARSE), make_mla(DENSE)
    plain.load_state_dict(mla.state_dict(), strict=False)
    mla.selection = "dense"
    for got, want in zip(Paged(SPARSE, [30, 9]).run(mla, 7), Paged(DENSE, [30, 9]).run(plain, 7), strict=True):
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("selection", ["recent", "random"])
def test_planted_selections_are_attended_to(selection):
    mla, honest = make_mla(SPARSE), make_mla(SPARSE)
    mla.selection = selection
    paged = Paged(SPARSE, [30])
    out, topk = paged.step(mla, [0], [30])
    keys = recent_keys if selection == "recent" else lambda b, k: random_keys(b, k, layer=0)
    assert torch.equal(topk[0], keys(Paged(SPARSE, [30]).batch([0], [30]), 8))
    expected = Paged(SPARSE, [30]).run(honest, 30)[0]
    torch.testing.assert_close(out[0][:8], expected[:8], atol=2e-6, rtol=1e-5)
    assert (out[0][20:] - expected[20:]).abs().max() > 0.01
    chunked = Paged(SPARSE, [30]).run(mla, 4)[0]
    torch.testing.assert_close(chunked, out[0], atol=2e-6, rtol=1e-5)


def test_which_layers_have_an_indexer():
    assert [layer_has_indexer(TYPES, i) for i in range(3)] == [True, False, True]
    assert layer_has_indexer(SPARSE, 7) and not layer_has_indexer(DENSE, 0)


def test_a_shared_layer_attends_to_what_it_is_given_and_needs_it():
    shared = make_mla(TYPES, layer=1)
    paged = Paged(TYPES, [30], has_indexer=False)
    given = recent_keys(paged.batch([0], [30]), 8)
    out, passed = paged.step(shared, [0], [30], given)
    assert torch.equal(passed[0], given)
    planted = make_mla(TYPES, layer=1)
    planted.selection = "recent"
    torch.testing.assert_close(out[0], Paged(TYPES, [30], has_indexer=False).run(planted, 30)[0], atol=2e-6, rtol=1e-5)
    with pytest.raises(AssertionError, match="layer 1 shares a selection"):
        Paged(TYPES, [30], has_indexer=False).step(shared, [0], [30])
    assert Paged(TYPES, [8], has_indexer=False).step(shared, [0], [8])[1] is None  # nothing to select among 8 keys
