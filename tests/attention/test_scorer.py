"""How many tokens are scored at a time, and that it changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rorqual.attention import scorer
from rorqual.attention.scorer import tokens_at_a_time
from tests.attention.common import SPARSE, Paged
from tests.attention.test_fused import fused


@given(st.integers(1, 20_000), st.integers(1, 1 << 21))
def test_parts_are_equal_and_fit(tokens, max_context):
    step, most = tokens_at_a_time(tokens, max_context), (1 << 30) // (4 * max_context)
    parts = -(-tokens // step)
    assert step == tokens if tokens <= most else step <= most
    if most < tokens and most >= 64:
        assert step % 64 == 0 and parts <= -(-tokens // (most - most % 64))
        assert parts * step - tokens < 64 * parts, "no part is smaller than others by more than what rounding took"


def test_long_contexts_have_few_kinds_of_parts():
    assert {tokens_at_a_time(4096, c) for c in (65537, 80_000, 100_000, 131072)} == {2048}
    assert tokens_at_a_time(4096, 65536) == 4096 and tokens_at_a_time(4096, 163_840) == 1408 and tokens_at_a_time(4096, 1 << 28) == 1


@pytest.mark.parametrize("n_bytes", [1, 5000, 100_000, 200_000])
def test_parts_choose_as_the_whole(monkeypatch, n_bytes):
    """300 tokens over as many keys: one at a time, four, 64 in five parts, 128 in three."""
    (right,), (rows,) = Paged(SPARSE, [300]).step(fused(SPARSE), [0], [300])
    monkeypatch.setattr(scorer, "_LOGIT_BYTES", n_bytes)
    (found,), (chosen,) = Paged(SPARSE, [300]).step(fused(SPARSE), [0], [300])
    assert torch.equal(chosen, rows) and torch.equal(found, right)
