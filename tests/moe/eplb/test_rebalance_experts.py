"""The drop-in: EPLB's signature, shapes and dtypes, with a better plan."""

import pytest
import torch

from rorqual.moe.eplb.rebalance_experts import rebalance_experts
from tests.moe.eplb.reference_eplb import README


def test_shapes_types_and_content() -> None:
    weight = torch.from_numpy(README).float()
    slots, where, counts = rebalance_experts(weight, 16, 4, 2, 8)
    assert slots.shape == (2, 16) and counts.shape == (2, 12) and where.shape == (2, 12, int(counts.max()))
    assert slots.dtype == where.dtype == counts.dtype == torch.int64
    for layer in range(2):
        for expert in range(12):
            held = [slot for slot in where[layer, expert].tolist() if slot >= 0]
            assert held == (slots[layer] == expert).nonzero().flatten().tolist()
            assert len(held) == counts[layer, expert]
            assert where[layer, expert, len(held) :].eq(-1).all()


def test_any_number_of_slots_and_types_of_load() -> None:
    slots, _, counts = rebalance_experts(torch.tensor([[5, 1, 1]]), 5, 1, 1, 3)
    assert slots.shape == (1, 5) and counts.sum() == 5
    slots, where, counts = rebalance_experts(torch.tensor([[5, 1]]), 8, 1, 1, 2)
    assert slots.min() == 0 and counts.sum() == 8 and (where >= 0).sum() == 8  # every slot holds an expert, if only once more
    with pytest.raises(ValueError, match="give at least 3"):
        rebalance_experts(torch.ones(1, 3, dtype=torch.bfloat16), 2, 1, 1, 2)
