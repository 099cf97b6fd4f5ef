"""Masks on logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.engine.sampling import guided
from rorqual.engine.sampling.guided import Guided, allow
from rorqual.engine.sampling.sampler import sample
from rorqual.engine.sampling.sampler_table import SamplerTable, param_floats, param_ints
from rorqual.engine.sampling_params import SamplingParams

VOCAB = 77


def packed(bits: np.ndarray) -> torch.Tensor:
    """[G, V] booleans as int32 words."""
    words = np.zeros((len(bits), -(-bits.shape[1] // 32) * 32), dtype=np.uint8)
    words[:, : bits.shape[1]] = bits
    return torch.from_numpy(np.packbits(words, axis=1, bitorder="little").view(np.int32).copy())


@pytest.mark.parametrize("block", [1, 100, 1 << 23])
def test_allow_is_the_plain_definition(block, monkeypatch):
    monkeypatch.setattr(guided, "_BLOCK_ELEMENTS", block)
    draw = np.random.default_rng(0)
    logits, bits, rows = torch.randn(9, VOCAB), draw.random((4, VOCAB)) < 0.3, [0, 3, 4, 8]
    before = logits.clone()
    found = allow(logits, Guided(torch.tensor(rows), packed(bits)))
    assert torch.equal(logits, before)
    expected = before.clone()
    for place, row in enumerate(rows):
        expected[row][torch.from_numpy(~bits[place])] = -torch.inf
    assert torch.equal(found, expected)


PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 5.0, "top_k": 3},
    {"temperature": 2.0, "top_p": 0.4},
    {"temperature": 1.0, "min_p": 0.3, "repetition_penalty": 1.8},
    {"frequency_penalty": 2.0},
]


@pytest.mark.parametrize("params", PARAMS)
def test_a_row_samples_within_its_mask_and_the_other_rows_sample_as_before(params):
    draw, n = np.random.default_rng(3), 16
    table = SamplerTable(n, "cpu", debug=True)
    one = SamplingParams(**params)
    table.set(np.array([param_ints(one, slot=i, length=2, prompt_len=1, seed=i) for i in range(n)]), np.array([param_floats(one)] * n))
    tokens = torch.from_numpy(draw.integers(0, VOCAB, (n, 8)).astype(np.int32))
    logits, slots, lengths = torch.randn(n, VOCAB) * 4, torch.arange(n), torch.full((n,), 2)
    rows = torch.arange(0, n, 3)
    bits = draw.random((len(rows), VOCAB)) < 0.05
    bits[:, 5] = True
    free = sample(logits, slots, lengths, table, tokens, lengths).tokens
    held = sample(logits, slots, lengths, table, tokens, lengths, guided=Guided(rows, packed(bits))).tokens
    assert all(bits[place, int(held[row])] for place, row in enumerate(rows.tolist()))
    others = [i for i in range(n) if i % 3]
    assert torch.equal(held[others], free[others])


def test_log_probabilities_are_those_of_the_model():
    """As vLLM's: of the raw logits, whatever the grammar leaves."""
    table = SamplerTable(1, "cpu")
    one = SamplingParams(temperature=0.0, logprobs=2)
    table.set(np.array([param_ints(one, slot=0, length=1, prompt_len=1, seed=0)]), np.array([param_floats(one)]))
    logits, at = torch.arange(VOCAB, dtype=torch.float32)[None], torch.ones(1, dtype=torch.int64)
    bits = np.zeros((1, VOCAB), dtype=bool)
    bits[0, 7] = True
    found = sample(logits, torch.zeros(1, dtype=torch.int64), at, table, torch.zeros(1, 4, dtype=torch.int32), at,
                   guided=Guided(torch.zeros(1, dtype=torch.int64), packed(bits)))  # fmt: skip
    assert found.tokens.tolist() == [7] and found.logprobs.rank.tolist() == [VOCAB - 7]
    assert torch.allclose(found.logprobs.logprob, torch.log_softmax(logits, 1)[:, 7])
