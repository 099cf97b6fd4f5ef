"""Linears with block-FP8 weights: alone, stacked, and split over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rorqual.engine.weights.fp8 import quantise_block_fp8
from rorqual.parallel.group import Group
from rorqual.parallel.linear import Fp8Linear, Stacked, WideWeight, gated_product, product, stack, use_fp8_backend
from rorqual.parallel.shard import ColumnLinear, RowLinear, narrow_weights


def fp8_linear(n: int, k: int, seed: int) -> Fp8Linear:
    generator = torch.Generator().manual_seed(seed)
    layer = Fp8Linear(nn.Linear(k, n, bias=False))
    values, scale = quantise_block_fp8(torch.randn(n, k, generator=generator))
    layer.weight.data, layer.weight_scale_inv.data = values, scale
    return layer


def wide(layer: Fp8Linear) -> torch.Tensor:
    n, k = layer.weight.shape
    scale = layer.weight_scale_inv.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return layer.weight.float() * scale


@pytest.mark.parametrize(("n", "k"), [(256, 384), (576, 256), (128, 64)])
def test_fp8_product_is_near_the_dequantised_one(n, k):
    layer = fp8_linear(n, k, 0)
    x = torch.randn(5, k)
    expected = x @ wide(layer).T
    assert float((layer(x) - expected).norm() / expected.norm()) < 0.04  # the activations' rounding to e4m3
    assert layer(x).dtype == x.dtype and layer(x[:0]).shape == (0, n)


def test_stacked_equals_its_parts_and_shares_memory():
    parts = [fp8_linear(256, 128, 1), fp8_linear(128, 128, 2), fp8_linear(192, 128, 3)]
    x = torch.randn(7, 128)
    expected = [part(x) for part in parts]
    stacked = Stacked(parts)
    for a, b, part in zip(stacked(x).split([256, 128, 192], -1), expected, parts, strict=True):
        assert torch.equal(a, b) and torch.equal(part(x), b)
    parts[1].weight.data.view(torch.uint8).zero_()
    assert not stacked(x)[:, 256:384].any()


def test_parts_that_straddle_a_block_are_not_stacked():
    assert stack([fp8_linear(192, 128, 1), fp8_linear(128, 128, 2)]) is None
    assert stack([nn.Linear(8, 8), nn.Linear(8, 8)]) is None  # biases
    assert stack([nn.Linear(8, 24, bias=False), nn.Linear(8, 5, bias=False)]) is not None


def test_gated_product_is_silu_times_up():
    both, weight = torch.randn(6, 64), torch.randn(16, 32)
    expected = (torch.nn.functional.silu(both[:, :32]) * both[:, 32:]) @ weight.T
    torch.testing.assert_close(gated_product(both, weight, None), expected)
    layer = fp8_linear(128, 256, 4)
    both = torch.randn(3, 512)
    hidden = torch.nn.functional.silu(both[:, :256]) * both[:, 256:]
    assert torch.equal(layer.gated(both), product(hidden, layer.weight, layer.weight_scale_inv))


class _Two(Group):
    """One of two ranks, without a process group: the sum over ranks is left to the test."""

    def __init__(self, index: int) -> None:
        self.index, self.size = index, 2  # type: ignore[misc]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("kind", [ColumnLinear, RowLinear])
def test_split_fp8_weights_are_blocks_of_the_whole(kind):
    whole = fp8_linear(512, 512, 5)
    x = torch.randn(4, 512)
    parts = []
    for index in range(2):
        part = kind(nn.Linear(512, 512, bias=False), _Two(index))
        assert part.narrow()
        for name in ("weight", "weight_scale_inv"):
            shard = getattr(part, name).shard
            getattr(part, name).data = getattr(whole, name).narrow(shard.dim, shard.start, shard.stop - shard.start)
        parts.append(part(x if kind is ColumnLinear else x[:, index * 256 : (index + 1) * 256]))
    got = torch.cat(parts, -1) if kind is ColumnLinear else parts[0] + parts[1]
    torch.testing.assert_close(got, whole(x), atol=1e-4, rtol=1e-5)


def test_a_part_that_cuts_a_block_stays_wide():
    part = ColumnLinear(nn.Linear(128, 192, bias=False), _Two(0))
    assert not part.narrow() and part.weight_scale_inv is None and part.weight.dtype == torch.float32


def test_narrow_weights_takes_what_is_named():
    net = nn.ModuleDict({"a": nn.ModuleDict({"up": nn.Linear(8, 8, bias=False)}), "cup": nn.Linear(8, 8, bias=False)})
    narrow_weights(net, ("up",))
    assert isinstance(net["a"]["up"], Fp8Linear) and isinstance(net["cup"], nn.Linear)


def test_wide_weight_is_the_fp32_product():
    weight, x = torch.randn(8, 64), torch.randn(3, 64)
    holder = WideWeight()
    holder.settle(weight)
    assert torch.equal(holder.product(x, weight), torch.nn.functional.linear(x, weight))
    assert holder.product(x.bfloat16(), weight).dtype == torch.float32


@pytest.mark.parametrize("name", ["triton", "deep_gemm"])
def test_gpu_backends_are_refused_on_the_cpu(name):
    with pytest.raises(ValueError, match=f"fp8 backend '{name}' needs a CUDA device, this rank runs on cpu"):
        use_fp8_backend(name, torch.device("cpu"))


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="fp8 backend must be one of auto, torch, triton, deep_gemm, found 'cutlass'"):
        use_fp8_backend("cutlass", torch.device("cpu"))


def test_what_the_checkpoint_left_wide_stays_wide():
    net = nn.ModuleDict({"a": nn.ModuleDict({"up": nn.Linear(8, 8, bias=False)}), "b": nn.ModuleDict({"up": nn.Linear(8, 8, bias=False)})})
    narrow_weights(net, ("up",), ("a.",))
    assert isinstance(net["a"]["up"], nn.Linear) and isinstance(net["b"]["up"], Fp8Linear)
