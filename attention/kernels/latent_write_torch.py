"""Plain PyTorch twin of ``latent_write``."""

from __future__ import annotations

import torch

from ..kv.layout import encode_latent
from ..rope import rotate
from .norm_torch import rms_norm


def write_latent(
    kv: torch.Tensor, weight: torch.Tensor, eps: float, turn: torch.Tensor, rows: torch.Tensor, pool: torch.Tensor, *, interleaved: bool
) -> None:
    """Norm the latents, rotate the keys and store both: see ``latent_write.write_latent``, which does the same in one launch."""
    width, kept = weight.shape[0], rows >= 0
    key = rotate(kv[:, width:], torch.view_as_complex(turn), interleaved=interleaved).to(kv.dtype)
    values = torch.cat((rms_norm(kv[:, :width], weight, eps), key), -1)[kept]
    pool.index_copy_(0, rows[kept], encode_latent(values, width) if pool.dtype == torch.uint8 else values.to(pool.dtype))
