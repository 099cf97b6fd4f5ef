"""Payloads: error bounds of FP8, exact values, odd widths."""

from __future__ import annotations

import pytest
import torch

from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.fp8 import dequantise, quantise
from rorqual.comm.rows import RowLayout, payload_bytes


@pytest.mark.parametrize("hidden", [1, 40, 128, 129, 300, 512])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_error_bound(hidden: int, scale: float) -> None:
    x = torch.randn(17, hidden, generator=torch.Generator().manual_seed(hidden)) * scale
    values, scales = quantise(x)
    assert values.dtype == torch.float8_e4m3fn and values.shape == x.shape and values.is_contiguous()
    assert scales.shape == (17, -(-hidden // 128)) and scales.dtype == torch.float32
    back = dequantise(values, scales, torch.float32)
    wide = scales.repeat_interleave(128, dim=1)[:, :hidden]
    bound = torch.maximum(x.abs() / 16, wide / 1024) * (1 + 1e-6)
    assert bool(((back - x).abs() <= bound).all())


def test_largest_value_zeros_and_signs() -> None:
    x = torch.zeros(3, 256)
    x[0, 5], x[1, 200] = 448.0, -3.0
    values, scales = quantise(x)
    back = dequantise(values, scales, torch.float32)
    assert torch.equal(back[0], x[0]) and torch.equal(back[2], x[2])
    assert scales[0].tolist() == [1.0, 1.0] and scales[2].tolist() == [1.0, 1.0]
    assert back[1, 200].item() == pytest.approx(-3.0, rel=1e-6) and back[1].count_nonzero() == 1


def test_no_tokens() -> None:
    values, scales = quantise(torch.empty(0, 300))
    assert values.shape == (0, 300) and scales.shape == (0, 3) and dequantise(values, scales, torch.bfloat16).shape == (0, 300)


@pytest.mark.parametrize(
    ("payload", "dtype", "hidden", "k", "payload_size", "row"),
    [
        ("native", "float32", 40, 3, 160, 192),  # 160 + 24 + 4 = 188
        ("native", "bfloat16", 41, 8, 82, 160),  # 84 + 64 + 4 = 152
        ("bf16", "float32", 41, 8, 82, 160),
        ("fp8", "bfloat16", 7168, 8, 7392, 7472),  # 7168 + 224 + 64 + 4 = 7460
        ("fp8", "float32", 129, 1, 137, 160),  # 132 + 8 + 8 + 4 = 152
    ],
)
def test_row_bytes_and_round_trip(payload: str, dtype: str, hidden: int, k: int, payload_size: int, row: int) -> None:
    spec = EPSpec(n_ranks=1, n_slots=32, hidden=hidden, top_k=k, max_tokens=8, payload=payload, dtype=dtype)
    layout = RowLayout(spec=spec)
    assert payload_bytes(spec) == payload_size and layout.row_bytes == row
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(5, hidden, generator=gen).to(getattr(torch, dtype))
    slots = torch.randint(-1, 32, (5, k), generator=gen)
    weights = torch.rand(5, k, generator=gen)
    rows = layout.pack(x, slots, weights, 3)
    first = 3 * layout.spec.max_tokens
    want = {"fp8": lambda: dequantise(*quantise(x), x.dtype), "bf16": lambda: x.bfloat16().to(x.dtype), "native": lambda: x}[payload]()
    assert torch.equal(layout.values(rows), want) and torch.equal(layout.slots(rows), slots)
    assert torch.equal(layout.weights(rows), weights) and layout.origins(rows).tolist() == list(range(first, first + 5))
    assert bool((layout.slots(layout.empty_rows(4, x.device)) == -1).all())
