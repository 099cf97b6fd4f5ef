"""A checksum of an expert's bytes that a device can compute without waiting for the host."""

from __future__ import annotations

import torch

_BLOCK = 1 << 16  # words that are weighed at a time
_ODD = -7046029254386353131  # 0x9e3779b97f4a7c15 as int64: 2**64 over the golden ratio, odd
_STEP = 6364136223846793005  # odd: of one block to the next


class Digest:
    """Sum over all words of mixed(word) times an odd number of its place, modulo 2**64; ``mixed`` maps no two words to one.

    A single changed word always changes it, as odd numbers have inverses. It is the same on every device.
    """

    def __init__(self, device: torch.device) -> None:
        places = torch.arange(_BLOCK, dtype=torch.int64, device=device)
        self._room = torch.empty(2, _BLOCK, dtype=torch.int64, device=device)
        self._weights = self._mixed(places).clone() | 1  # [_BLOCK] odd

    def of(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Write the digest of the uint8 ``data``, a multiple of 8 bytes that begins at one, to the int64 scalar ``out``; no host sync."""
        words = data.view(torch.int64)
        out.zero_()
        factor = 1
        for start in range(0, len(words), _BLOCK):
            mixed = self._mixed(words[start : start + _BLOCK])
            mixed.mul_(self._weights[: len(mixed)])
            out.add_(mixed.sum() * factor)
            factor = _wrap(factor * _STEP)

    def _mixed(self, words: torch.Tensor) -> torch.Tensor:
        """Every bit of a word in its low bits too, so that equal changes of high bits in two words do not cancel; in ``_room``."""
        mixed, shifted = self._room[0, : len(words)], self._room[1, : len(words)]
        mixed.copy_(words)
        for bits in (32, 29):
            torch.bitwise_right_shift(mixed, bits, out=shifted)
            shifted.bitwise_and_((1 << (64 - bits)) - 1)  # without copies of the sign
            mixed.bitwise_xor_(shifted).mul_(_ODD)
        return mixed


def _wrap(value: int) -> int:
    """``value`` modulo 2**64, as int64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
