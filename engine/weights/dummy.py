"""Random weights of the right scale, the same on every layout and device.

Each value is a function of (seed, tensor name, place in the full tensor): a 64-bit mix (SplitMix64's finaliser; Steele,
Lea, Flood 2014) of its linear index gives four 16-bit numbers, whose sum is near normal. The sum is an integer, so that
CPU and GPU agree to the bit, and any slice is made on its own, where it is needed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

import torch

from .target import Target

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # step, and the two of the finaliser
_STORED_NARROW = ("mlp.gate.weight", "weights_proj.weight")  # kept in fp32, but bf16 in published checkpoints
_CHUNK = 1 << 22  # values made at once
_STD = (4 * (65536**2 - 1) / 12) ** 0.5  # of the sum of four numbers uniform on 0..65535
_FP8_STD = 64.0  # of FP8 values before scaling: near the middle of e4m3's range, and never past its end
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    """A 64-bit pattern as torch's int64."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def noise(index: torch.Tensor, key: int) -> torch.Tensor:
    """Near-normal float32 of mean 0 and deviation 1, one for each int64 in ``index``; streams differ by ``key``."""
    golden, mixer, final = map(_signed, _MULTIPLIERS)
    x = index * golden + _signed(key)
    x = (x ^ _shift(x, 30)) * mixer
    x = (x ^ _shift(x, 27)) * final
    x = x ^ _shift(x, 31)
    total = (x & 0xFFFF) + (_shift(x, 16) & 0xFFFF) + (_shift(x, 32) & 0xFFFF) + _shift(x, 48)
    return (total - 2 * 65535).float() * (1.0 / _STD)


def mean_and_std(name: str, full_shape: tuple[int, ...]) -> tuple[float, float]:
    """Of a tensor's values: norms about 1, biases small, linear weights ``fan_in ** -0.5``, embeddings 1."""
    if name.endswith("e_score_correction_bias"):
        return 0.0, 0.02
    if name.endswith("bias"):
        return 0.0, 0.02
    if name.endswith("_scale_inv"):
        mean = (full_shape[-1] * 128.0) ** -0.5 / _FP8_STD
        return mean, 0.1 * mean
    if "norm" in name:
        return 1.0, 0.1
    if "embed_tokens" in name:
        return 0.0, 1.0
    return 0.0, float(full_shape[-1]) ** -0.5


def _chunks(bounds: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
    """Cut the first dimension into pieces of about ``_CHUNK`` values."""
    inner = 1
    for start, stop in bounds[1:]:
        inner *= stop - start
    step = max(_CHUNK // max(inner, 1), 1)
    start, stop = bounds[0]
    for at in range(start, stop, step):
        yield at, min(at + step, stop)


def _linear_index(bounds: tuple[tuple[int, int], ...], full_shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Row-major index in the full tensor of every element within ``bounds``."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for (start, stop), size in zip(bounds, full_shape, strict=True):
        index = index.unsqueeze(-1) * size + torch.arange(start, stop, device=device)
    return index


def _fill_fast(place: Target, key: int, mean: float, std: float) -> bool:
    """Fill a matrix on a GPU in one pass, to the same bits; False where it is no matrix on a GPU, or Triton is missing."""
    if not place.tensor.is_cuda or place.tensor.dim() != 2 or place.tensor.stride(1) != 1 or find_spec("triton") is None:
        return False
    from .dummy_kernel import fill_matrix

    (r, c) = place.bounds
    golden, mixer, final = map(_signed, _MULTIPLIERS)
    fill_matrix(place.tensor, (r, c), place.full_shape[1], (_signed(key), golden, mixer, final), scale=1.0 / _STD, mean=mean, std=std)
    return True


def fill_dummy(targets: Mapping[str, list[Target]], seed: int) -> None:
    """Fill every target in place with random weights; equal (name, seed, full shape) give equal values everywhere."""
    for name, places in targets.items():
        key = (zlib.crc32(name.encode()) << 32) ^ (seed * 0x9E3779B1)
        for place in places:
            mean, std = mean_and_std(name, place.full_shape)
            if place.tensor.dtype == torch.float8_e4m3fn:
                mean, std = 0.0, _FP8_STD
            if not _fill_fast(place, key, mean, std):
                _fill(place, key, mean, std)
            if name.endswith(_STORED_NARROW):
                place.tensor.copy_(place.tensor.bfloat16())


def _fill(place: Target, key: int, mean: float, std: float) -> None:
    """Fill one target by tensor operations, in pieces."""
    first = place.bounds[0][0]
    for start, stop in _chunks(place.bounds):
        index = _linear_index(((start, stop), *place.bounds[1:]), place.full_shape, place.tensor.device)
        place.tensor[start - first : stop - first].copy_(noise(index, key) * std + mean)
