"""Tensors and messages as the bytes that travel."""

from __future__ import annotations

import math

import torch

INLINE_MIN = 2048  # bytes of a message that travel together with its length
INLINE_MAX = 1 << 20


def rows_as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View of a contiguous x [n, ...] as uint8 [n, bytes per row]: backends need to know no other dtype."""
    return x.view(x.shape[0], math.prod(x.shape[1:])).view(torch.uint8)


def pack_message(data: bytes, inline: int) -> torch.Tensor:
    """uint8 [8 + inline]: the length of ``data``, then its first ``inline`` bytes."""
    head = torch.zeros(8 + inline, dtype=torch.uint8)
    head[:8].view(torch.int64)[0] = len(data)
    first = data[:inline]
    if first:
        head[8 : 8 + len(first)] = as_tensor(first)
    return head


def message_length(head: torch.Tensor) -> int:
    """The length that ``pack_message`` wrote."""
    return int(head[:8].view(torch.int64).item())


def as_tensor(data: bytes) -> torch.Tensor:
    """uint8 tensor with a copy of ``data``."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def inline_for(length: int) -> int:
    """Inline capacity after a message of ``length`` bytes: the next power of two, within bounds."""
    return min(max(INLINE_MIN, 1 << (length - 1).bit_length() if length else 0), INLINE_MAX)
