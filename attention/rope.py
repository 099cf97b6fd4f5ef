"""Rotary position embedding: frequencies (plain and YaRN) and the two ways of pairing the rotated values."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from .config import RopeConfig


def _amplitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's amplitude ``0.1 * mscale * ln(factor) + 1`` (1 without a stretch)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def cos_sin_factor(config: RopeConfig) -> float:
    """Amplitude of cos and sin: explicit, else the ratio of the two mscales when both are given, else YaRN's default."""
    if config.factor <= 1.0:
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _amplitude(config.factor, config.mscale) / _amplitude(config.factor, config.mscale_all_dim)
    return _amplitude(config.factor)


def _ramp_bounds(config: RopeConfig) -> tuple[float, float]:
    """Frequency indices where the YaRN ramp starts and ends (arXiv:2309.00071, section 3.2)."""

    def index_of(rotations: float) -> float:
        length = config.original_max_position / (rotations * 2 * math.pi)
        return config.dim * math.log(length) / (2 * math.log(config.theta))

    low, high = index_of(config.beta_fast), index_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    return low, high + 0.001 if low == high else high


@lru_cache(maxsize=64)
def inverse_frequencies(config: RopeConfig, device: torch.device) -> torch.Tensor:
    """Angle per position of every pair: fp32 [dim / 2], radians.

    Under YaRN low frequencies are divided by ``factor``, high ones kept, with a linear ramp between.
    """
    with torch.inference_mode(False):  # the result is cached, and so must be usable outside inference mode too
        periods = config.theta ** (torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim)
        if config.factor <= 1.0:
            return (1.0 / periods).to(device)
        low, high = _ramp_bounds(config)
        ramp = ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        keep = 1 - ramp
        mixed = (1.0 / (config.factor * periods)) * (1 - keep) + (1.0 / periods) * keep
        return mixed.to(device)


def rotation(config: RopeConfig, positions: torch.Tensor) -> torch.Tensor:
    """Rotation of every pair at ``positions`` [T] (any integer dtype): complex64 [T, dim / 2], ``factor * (cos + i sin)``."""
    angles = positions.float()[:, None] * inverse_frequencies(config, positions.device)
    factor = cos_sin_factor(config)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return torch.complex(cos, sin)


def rotate(x: torch.Tensor, turn: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate all of ``x``: [T, dim] or [T, heads, dim] in any float dtype, by ``turn`` [T, dim / 2]; fp32 out.

    ``interleaved`` pairs neighbours (0,1), (2,3)..; otherwise value i pairs with i + dim / 2. The order of values is kept.
    """
    turn = turn if x.dim() == 2 else turn[:, None]
    if interleaved:
        pairs = torch.view_as_complex(x.float().contiguous().view(*x.shape[:-1], x.shape[-1] // 2, 2))
        return torch.view_as_real(pairs * turn).flatten(-2)
    first, second = x.float().chunk(2, -1)
    cos, sin = turn.real, turn.imag
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
