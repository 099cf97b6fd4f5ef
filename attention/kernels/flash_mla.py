"""Sparse attention by FlashMLA's Hopper kernels, for the shapes they take; the Triton kernels run the others.

They take bf16 queries of 64 or 128 heads, 576 values a key, and selections of a multiple of 128 rows: heads are padded, and
what does not fit goes to Triton.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

from . import sparse_attention as triton

_LATENT, _ROPE, _FP8_ROW = 512, 64, 656
_PAGE = 64  # rows of the pages FlashMLA is told of: row numbers are flat, so any divisor of the pool will do


@lru_cache(maxsize=1)
def _legacy() -> dict[str, Any]:
    """The argument that selects Hopper's kernels in the builds that have newer ones beside them."""
    return {"use_legacy": True} if "use_legacy" in inspect.signature(flash_mla_with_kvcache).parameters else {}


def takes(q_latent: torch.Tensor, q_rope: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether FlashMLA can run this call."""
    widths = q_latent.shape[2] == _LATENT and q_rope.shape[2] == _ROPE and q_latent.shape[1] <= 128
    row = pool.shape[1] == (_FP8_ROW if pool.dtype == torch.uint8 else _LATENT + _ROPE)
    kind = pool.dtype in (torch.uint8, torch.bfloat16) and q_latent.dtype == torch.bfloat16
    return widths and row and kind and pool.is_contiguous() and rows.shape[1] % 128 == 0 and len(pool) % _PAGE == 0


def sparse_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    *,
    scale: float,
    sink: torch.Tensor | None = None,
    n_keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``sparse_attention_torch.sparse_attention``. ``rows`` must be -1 or rows of the pool: FlashMLA checks no upper bound."""
    if not takes(q_latent, q_rope, pool, rows):
        return triton.sparse_attention(q_latent, q_rope, pool, rows, scale=scale, sink=sink, n_keys=n_keys)
    tokens, heads = q_latent.shape[:2]
    wide = 64 if heads <= 64 else 128
    q = F.pad(torch.cat((q_latent, q_rope), -1), (0, 0, 0, wide - heads))
    sink = None if sink is None else F.pad(sink, (0, wide - heads))
    if pool.dtype == torch.uint8:
        cache = pool.view(-1, _PAGE, 1, _FP8_ROW)
        out, lse = flash_mla_with_kvcache(
            q[:, None],
            cache,
            None,
            None,
            _LATENT,
            get_mla_metadata()[0],
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=rows[:, None],
            attn_sink=sink,
            topk_length=n_keys,
            **_legacy(),
        )
        out, lse = out[:, 0], lse[:, :, 0]
    else:
        out, _, lse = flash_mla_sparse_fwd(q, pool[:, None], rows[:, None], scale, _LATENT, attn_sink=sink, topk_length=n_keys, **_legacy())
    # A query without keys has +inf there and -inf here.
    return out[:, :heads], torch.where(lse == float("inf"), float("-inf"), lse)[:, :heads].view(tokens, heads)
