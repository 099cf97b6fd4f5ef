"""Sparse attention by the kernel that was fastest for the shape; the twin says what is computed."""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

import torch

from ...parallel.kernels.tuned import config_for
from . import sparse_decode, sparse_prefill

_log = logging.getLogger("rorqual")
#: queries from which the prefill kernel is taken on a GPU nobody measured
_PREFILL_FROM = 512


@lru_cache(maxsize=1)
def _has_flash_mla() -> bool:
    """Whether FlashMLA can be imported: one built for another torch is installed, but does not load."""
    try:
        import_module(".flash_mla", __package__)
    except (ImportError, OSError) as error:
        if find_spec("flash_mla") is not None:
            _log.warning("flash_mla is installed but does not load (%s); attention runs without it", error)
        return False
    return True


@lru_cache(maxsize=1024)
def pick(heads: int, tokens: int, fp8: bool, *, flash_mla: bool) -> str:
    """``decode``, ``prefill`` or ``flash_mla``: the fastest measured at the nearest shape of those that are allowed."""
    usual = "prefill" if tokens >= _PREFILL_FROM else "decode"
    found = config_for("sparse_attention", {"kernel": usual, "triton": None}, heads=heads, tokens=tokens, fp8=fp8)
    best: str = found["kernel"]
    return found.get("triton") or usual if best == "flash_mla" and not flash_mla else best


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
    """Every query attends the pool rows it names: (out [T, H, C] in q's dtype, lse fp32 [T, H]).

    Arguments, results and errors are those of ``sparse_attention_torch.sparse_attention``; only kernels of this package.
    """
    kind = pick(q_latent.shape[1], _bucket(q_latent.shape[0]), pool.dtype == torch.uint8, flash_mla=False)
    if kind == "prefill":
        return sparse_prefill.sparse_attention(q_latent, q_rope, pool, rows, scale=scale, sink=sink, n_keys=n_keys)
    return sparse_decode.sparse_attention(q_latent, q_rope, pool, rows, scale=scale, sink=sink, n_keys=n_keys)


def fastest(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    *,
    scale: float,
    sink: torch.Tensor | None = None,
    n_keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sparse_attention``, by FlashMLA where it is installed, takes the shape, and was measured to be faster."""
    if _has_flash_mla() and pick(q_latent.shape[1], _bucket(len(q_latent)), pool.dtype == torch.uint8, flash_mla=True) == "flash_mla":
        from .flash_mla import sparse_attention as theirs

        return theirs(q_latent, q_rope, pool, rows, scale=scale, sink=sink, n_keys=n_keys)
    return sparse_attention(q_latent, q_rope, pool, rows, scale=scale, sink=sink, n_keys=n_keys)


def _bucket(tokens: int) -> int:
    """The next power of two, so that few shapes are looked up."""
    return 1 << max(tokens - 1, 0).bit_length()
