"""Attention in the latent space (the absorbed form of MLA): one shared key and value row per cached token."""

from __future__ import annotations

import torch


def absorb_queries(q_nope: torch.Tensor, q_rope: torch.Tensor, w_uk: torch.Tensor, scale: float) -> torch.Tensor:
    """Queries against latent rows: fp32 [T, H, C + rope], multiplied by the softmax scale.

    ``q_nope`` [T, H, nope], ``q_rope`` [T, H, rope] rotated, ``w_uk`` [H, nope, C] the key half of ``kv_b_proj``.
    Source: ``q_nope . (W_UK c) == (W_UK^T q_nope) . c`` (arXiv:2405.04434, section 2.1.2).
    """
    latent = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)
    return torch.cat((latent.float(), q_rope.float()), -1).mul_(scale)


def expand_values(latent: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """Attended latents [T, H, C] -> head outputs [T, H, v]; ``w_uv`` [H, v, C] is the value half of ``kv_b_proj``."""
    return torch.bmm(latent.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)


def finite(values: torch.Tensor) -> torch.Tensor:
    """``values`` with 0 for NaN and infinities, so that a weight of 0 shuts them out (0 times NaN is NaN)."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def attend(queries: torch.Tensor, rows: torch.Tensor, hidden: torch.Tensor | None, latent: int) -> torch.Tensor:
    """Softmax attention in fp32: queries [n, b, H, W], rows [n, L, W], hidden [n, b, L] bool (None hides
    nothing) -> [n * b, H, latent].

    ``hidden`` keys have no influence on a query, whatever they hold; with b = 1 they must be finite, which repeating a
    visible row ensures at no cost.
    """
    n, b, heads, width = queries.shape
    scores = torch.bmm(queries.reshape(n, b * heads, width), rows.transpose(1, 2)).view(n, b, heads, -1)
    if hidden is not None:
        scores.masked_fill_(hidden[:, :, None], float("-inf"))
    weights = torch.softmax(scores, -1).view(n, b * heads, -1)
    values = rows[:, :, :latent] if b == 1 else finite(rows[:, :, :latent])
    return torch.bmm(weights, values).view(n * b, heads, latent)
