"""Inputs for the fused writes and queries, and how close two results of theirs must be."""

from __future__ import annotations

import torch

from rorqual.attention.config import RopeConfig
from rorqual.attention.rope import rotation

CPU = torch.device("cpu")


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device = CPU, gap: int = 0) -> torch.Tensor:
    """Normal values with row scales from 1e-3 to 1e3, the same on every device; ``gap`` unused NaN values after every row."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 10 ** (6 * torch.rand((*shape[:-1], 1), generator=generator) - 3)
    wide = torch.full((*shape[:-1], shape[-1] + gap), float("nan"))
    wide[..., : shape[-1]] = values
    return wide.to(device, dtype)[..., : shape[-1]]


def gains(width: int, seed: int = 1, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> torch.Tensor:
    """Weights of a norm, around 1."""
    return (1 + 0.2 * torch.randn(width, generator=torch.Generator().manual_seed(seed))).to(device, dtype)


def turns(tokens: int, rope: int, device: torch.device = CPU) -> torch.Tensor:
    """YaRN rotations [T, rope / 2, 2] with an amplitude other than 1, at positions far apart."""
    config = RopeConfig(dim=rope, factor=40.0, mscale=0.7, mscale_all_dim=1.0)
    return torch.view_as_real(rotation(config, torch.arange(tokens, device=device) * 977 % 131072)).contiguous()


def places(tokens: int, n_rows: int, skip: int = 0, seed: int = 2, device: torch.device = CPU) -> torch.Tensor:
    """Distinct rows int64 [T], every ``skip``-th one -1."""
    rows = torch.randperm(n_rows, generator=torch.Generator().manual_seed(seed))[:tokens]
    if skip:
        rows[::skip] = -1
    return rows.to(device)


def codes_agree(got: torch.Tensor, expected: torch.Tensor, share: float = 0.004) -> None:
    """e4m3 bytes (uint8) equal but for a ``share`` of them (0 allowed), which may be off by one step: ties of the rounding."""
    got, expected = got.flatten().int(), expected.flatten().int()
    off = got != expected
    assert int(off.sum()) <= share * got.numel(), f"{int(off.sum())} of {got.numel()} bytes differ"
    zero = (got % 128 == 0) & (expected % 128 == 0)
    assert bool((((got - expected).abs() <= 1) | zero)[off].all()), "a byte is off by more than one step"
