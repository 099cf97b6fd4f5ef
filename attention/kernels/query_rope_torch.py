"""Plain PyTorch twin of ``query_rope``."""

from __future__ import annotations

import torch

from ..rope import rotate


def query_rope(q: torch.Tensor, turn: torch.Tensor, *, interleaved: bool, dtype: torch.dtype) -> torch.Tensor:
    """Rotated last values of every query: see ``query_rope.query_rope``, which does the same in one launch."""
    return rotate(q[..., q.shape[-1] - 2 * turn.shape[1] :], torch.view_as_complex(turn), interleaved=interleaved).to(dtype)
