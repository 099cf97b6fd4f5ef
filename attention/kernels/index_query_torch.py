"""Plain PyTorch twin of ``index_query``."""

from __future__ import annotations

import torch

from ..kv.layout import E4M3_MAX
from .index_write_torch import turned

TINY = 1e-30  # a query whose values are all smaller counts as zero: 448 divided by it might overflow


def index_query(
    q: torch.Tensor, weights: torch.Tensor, turn: torch.Tensor, *, interleaved: bool, rotate: bool, fp8: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and head weights of the indexer: see ``index_query.index_query``, which does the same in one launch."""
    values = turned(q, turn, interleaved=interleaved, transform=rotate)
    if not fp8:
        return values.to(q.dtype), weights * scale
    largest = values.abs().amax(-1)
    full = largest > TINY
    factor = torch.where(full, E4M3_MAX / largest, 1.0)
    q_scale = torch.where(full, largest / E4M3_MAX, 1.0)
    codes = (values * factor[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, weights * scale * q_scale
