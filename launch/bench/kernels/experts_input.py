"""Inputs that the cases of grouped products and fused experts share: one set of weights, skewed choices, equal data for peers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

HIDDEN, INNER, TOP_K, N_SLOTS = 7168, 2048, 8, 256
SKEW = 1.05  # sigma of the lognormal popularity of experts


def _bytes(*shape: int) -> torch.Tensor:
    """Random e4m3 of magnitudes below 2, made slot by slot."""
    values = torch.empty(shape, dtype=torch.uint8, device="cuda")
    for slot in values:
        slot.copy_(torch.randint(0, 256, slot.shape, dtype=torch.uint8, device="cuda").bitwise_and_(0xBF))
    return values.view(torch.float8_e4m3fn)


@lru_cache(maxsize=1)
def _all_weights() -> Any:
    from ....moe.kernels.fused_experts_torch import ExpertWeights

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device="cuda") * 0.02 + 0.01

    return ExpertWeights(
        gate_up=_bytes(N_SLOTS, 2 * INNER, HIDDEN),
        down=_bytes(N_SLOTS, HIDDEN, INNER),
        gate_up_scales=scales(N_SLOTS, 2 * INNER // 128, HIDDEN // 128),
        down_scales=scales(N_SLOTS, HIDDEN // 128, INNER // 128),
    )


def expert_weights(n_slots: int) -> Any:
    """The first of 256 FP8 experts of DeepSeek-V3's size: 11 GB, made once."""
    every = _all_weights()
    return type(every)(**{name: value[:n_slots] for name, value in vars(every).items()})


def skewed_slots(tokens: int, n_slots: int, *, seed: int = 0) -> torch.Tensor:
    """int32 [tokens, 8] on the CPU: different slots a token, drawn by lognormal popularity."""
    generator = torch.Generator().manual_seed(seed)
    popularity = SKEW * torch.randn(n_slots, generator=generator)
    noise = torch.rand(tokens, n_slots, generator=generator)
    return (popularity - torch.log(-torch.log(noise))).topk(TOP_K, dim=1).indices.int()


def used_slots(tokens: int, n_slots: int) -> int:
    """Slots that ``skewed_slots`` names at least once."""
    return len(set(skewed_slots(tokens, n_slots).reshape(-1).tolist()))
