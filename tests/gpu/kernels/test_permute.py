"""Permutation of choices on the GPU: exact against plain PyTorch, in a graph, the same every time."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.moe.kernels import permute as kernels
from rorqual.moe.kernels import permute_rows as moves
from rorqual.moe.kernels import permute_torch as plain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def random_slots(tokens: int, k: int, n_slots: int) -> torch.Tensor:
    """Half of all choices go to one slot, some to none."""
    slots = torch.randint(-1, n_slots, (tokens, k), dtype=torch.int32, device="cuda")
    return torch.where(torch.rand(tokens, k, device="cuda") < 0.5, n_slots // 2, slots)


@pytest.mark.parametrize(("tokens", "k", "n_slots", "block"), [(1, 8, 256, 64), (64, 8, 256, 64), (8192, 8, 256, 128)])
def test_layout_equals_plain_version(tokens: int, k: int, n_slots: int, block: int) -> None:
    slots = random_slots(tokens, k, n_slots)
    layout, expected = kernels.permute(slots, n_slots, block=block), plain.permute(slots, n_slots, block=block)
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(layout, name), value), name
    for _ in range(25):
        again = kernels.permute(slots, n_slots, block=block)
        assert torch.equal(again.sorted_index, layout.sorted_index) and torch.equal(again.place, layout.place)


def test_a_captured_layout_follows_its_slots() -> None:
    slots = random_slots(32, 8, 64)
    kernels.permute(slots, 64, block=64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layout = kernels.permute(slots, 64, block=64)
    for _ in range(3):
        slots.copy_(random_slots(32, 8, 64))
        for name in ("sorted_index", "place", "block_slot", "block_row", "block_rows", "n_blocks", "offsets", "counts"):
            getattr(layout, name).fill_(-77)
        graph.replay()
        expected = plain.permute(slots, 64, block=64)
        for name, value in vars(expected).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(layout, name), value), name


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("tokens", [200])
def test_rows_equal_plain_version(tokens: int, quantise: bool) -> None:
    slots = random_slots(tokens, 8, 16)
    x = (
        torch.randn(tokens, 1000, device="cuda", dtype=torch.bfloat16)
        * torch.logspace(-3, 3, tokens, device="cuda", dtype=torch.bfloat16)[:, None]
    )
    layout = kernels.permute(slots, 16, block=64)
    real = layout.sorted_index >= 0
    rows, scales = moves.permute_rows(x, layout, quantise=quantise)
    expected, steps = plain.permute_rows(
        x.cpu(), plain.permute(slots.cpu(), 16, block=64), quantise=quantise
    )  # torch divides otherwise on CUDA
    real = real.cpu()
    assert torch.equal(rows.cpu()[real].float(), expected[real].float())
    assert (scales is None) == (steps is None)
    if scales is not None and steps is not None:
        assert torch.equal(scales.cpu()[real], steps[real])


def test_sum_reads_no_padding_and_writes_every_row() -> None:
    slots, weights = random_slots(100, 8, 16), torch.rand(100, 8, device="cuda")
    slots[5] = -1
    layout = kernels.permute(slots, 16, block=128)
    y = torch.randn(len(layout.sorted_index), 7168, device="cuda", dtype=torch.bfloat16)
    y[layout.sorted_index < 0] = float("nan")
    expected = plain.unpermute(y.double(), layout.place, weights, out_dtype=torch.float64)
    out = moves.unpermute(y, layout.place, weights, out_dtype=torch.float32)
    assert bool((out[5] == 0).all())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for _ in range(25):
        assert torch.equal(moves.unpermute(y, layout.place, weights, out_dtype=torch.float32), out)
