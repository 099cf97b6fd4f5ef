"""Plain PyTorch twin of ``index_write``."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..hadamard import hadamard
from ..kv import fp4
from ..kv.layout import quantise
from ..rope import rotate
from .indexer_logits_torch import is_fp4


def write_index(
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    turn: torch.Tensor,
    rows: torch.Tensor,
    pool: torch.Tensor,
    *,
    page_size: int,
    interleaved: bool,
    rotate: bool,
) -> None:
    """Norm, rotate, transform and store index keys: see ``index_write.write_index``, which does the same in one launch."""
    width, kept = k.shape[1], rows >= 0
    values = functional.layer_norm(k.float(), (width,), weight.float(), bias.float(), eps)
    values, rows = turned(values, turn, interleaved=interleaved, transform=rotate)[kept], rows[kept]
    if pool.dtype != torch.uint8:
        pool.index_copy_(0, rows, values.to(pool.dtype))
        return
    page, offset = rows // page_size, rows % page_size
    if is_fp4(pool, page_size, width):
        half = page_size * width // 2
        codes, words = fp4.quantise(values)
        pool[:, :half].unflatten(1, (page_size, width // 2))[page, offset] = codes
        pool[:, half:].view(torch.int32)[page, offset] = words
        return
    codes, scales = quantise(values, width)
    pool[:, : page_size * width].unflatten(1, (page_size, width))[page, offset] = codes
    pool[:, page_size * width :].view(torch.float32)[page, offset] = scales[:, 0]


def turned(values: torch.Tensor, turn: torch.Tensor, *, interleaved: bool, transform: bool) -> torch.Tensor:
    """fp32 ``values`` [T, D] or [T, H, D] after RoPE on their first values and, if ``transform``, Hadamard's transform."""
    dim = 2 * turn.shape[1]
    head = rotate(values[..., :dim], torch.view_as_complex(turn), interleaved=interleaved)
    values = torch.cat((head, values[..., dim:].float()), -1)
    return hadamard(values) if transform else values
