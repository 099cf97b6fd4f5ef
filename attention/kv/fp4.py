"""FP4 index keys: e2m1 values, two a byte, and four bytes of scales a key; 68 bytes for 128 values.

A value is ``sign * magnitude * multiplier * scale``: a magnitude of e2m1 (0, 1/2, 1, 3/2, 2, 3, 4, 6), a multiplier for a quarter of the
key (32 values of 128) and a bf16 scale for the key. Products of magnitudes and multipliers are exact in e4m3, so that one FP8
product and one scale a key give the scores.

The values of a key lie in the order in which the lanes of a matrix product hold them. Of ``width`` values, ``j`` counts the groups
of 32: word ``q * (width / 32) + j`` (little endian) has values ``32 j + 4 q + i`` at bits ``4 i`` (magnitude) and ``8 i + 7``
(sign), and values ``32 j + 16 + 4 q + i`` at bits ``16 + 4 i`` and ``8 i + 3``, for ``q`` and ``i`` from 0 to 3. All words of one
``q`` are a block and share a multiplier. The word of scales has the key's bf16 scale in its upper half, and the number of block
``q``'s multiplier at bits ``4 q``. In a page all the values come first, then all the words of scales.

Block scales of other kinds were tried (``rorqual bench kv keys``): powers of two (MXFP4) find fewer of the best keys in the same
bytes, e4m3 scales under an fp32 one (like NVFP4) find no more in 72 bytes, and their products are not exact in e4m3.
"""

from __future__ import annotations

import torch

#: of a block, by number: 1.5, 1.25 or 1 times a power of two, what keeps products with e2m1 within the three bits of e4m3
MULTIPLIERS = (48.0, 40.0, 32.0, 24.0, 20.0, 16.0, 12.0, 10.0, 8.0, 6.0, 5.0, 4.0, 3.0, 2.5, 2.0, 1.5)
#: magnitudes by code, and how much each is above the one before
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: a key's largest value in units of its scale: 5 1/3 times the largest multiplier, so that a search may go up or down from there
FULL = 256.0
_LEAST = 1e-12  # a key whose values are all smaller counts as this large
_BLOCKS = 4
_TRIED = (-1, 0, 1, 2)  # multipliers tried for a block, from the smallest that clips nothing


def key_bytes(width: int) -> int:
    """Bytes of a key of ``width`` values: two values a byte, and the word of scales."""
    return width // 2 + 4


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes uint8 [T, W / 2] and words of scales int32 [T] of ``values`` [T, W] in any float dtype; W a power of two, 32 or more.

    Of four multipliers a block gets the one with the least sum of squared errors, the first of equals. A key that is not finite gets
    the scale NaN.
    """
    tokens, width = values.shape
    blocks = values.float().view(tokens, width // 32, 2, _BLOCKS, 4).permute(0, 3, 1, 2, 4).reshape(tokens, _BLOCKS, width // _BLOCKS)
    largest = blocks.abs().amax((1, 2)).clamp_min(_LEAST)
    scale = _rounded_up(largest / FULL)
    units = blocks.abs() / scale[:, None, None]
    numbers = _multipliers(units)
    codes = _codes(units, _table(units)[numbers][:, :, None])
    words = (scale.view(torch.int32) & -65536) | sum(numbers[:, b].int() << 4 * b for b in range(_BLOCKS))
    words = torch.where(blocks.abs().amax((1, 2)) < float("inf"), words, -1)
    return _packed(codes, blocks < 0), words


def decode(codes: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 values [N, W] without their scales, exact in e4m3, and scales [N], of bytes uint8 [N, W / 2] and words int32 [N]."""
    magnitude, negative = _unpacked(codes)
    numbers = torch.stack([words >> 4 * b & 15 for b in range(_BLOCKS)], 1).long()
    values = torch.tensor(LEVELS, device=codes.device)[magnitude.long()]
    values = values * _table(values)[numbers][:, :, None, None, None]
    values = torch.where(negative, -values, values)  # key, block, j, half, i
    return values.permute(0, 2, 3, 1, 4).reshape(len(codes), 2 * codes.shape[1]), (words & -65536).view(torch.float32)


def _rounded_up(scale: torch.Tensor) -> torch.Tensor:
    """The least bf16 values that are not below ``scale`` fp32, as fp32."""
    return (scale.view(torch.int32) + 65535 & -65536).view(torch.float32)


def _table(like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(MULTIPLIERS, device=like.device)


def _multipliers(units: torch.Tensor) -> torch.Tensor:
    """Number of each block's multiplier, int64 [T, B], of magnitudes [T, B, values] in units of the scale."""
    table = _table(units)
    fits = 6.0 * table >= units.amax(2, keepdim=True)
    smallest = (fits.sum(2) - 1).clamp_min(0)
    best = least = torch.empty(0)
    for step in _TRIED:
        number = (smallest + step).clamp(0, len(MULTIPLIERS) - 1)
        factor = table[number][:, :, None]
        error = (units - torch.tensor(LEVELS, device=units.device)[_codes(units, factor).long()] * factor).square().sum(2)
        if step == _TRIED[0]:
            best, least = number, error
        best, least = torch.where(error < least, number, best), torch.minimum(error, least)
    return best


def _codes(units: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Codes uint8 of the magnitudes nearest to ``units / factor``, ties to even codes; 6 for all that is larger."""
    codes = torch.zeros_like(units, dtype=torch.uint8)
    for code, (low, high) in enumerate(zip(LEVELS, LEVELS[1:], strict=False)):
        middle = (low + high) / 2 * factor
        codes += units >= middle if code % 2 else units > middle
    return codes


def _packed(codes: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """Bytes [T, W / 2] of codes and signs [T, blocks, W / 4]."""
    tokens, width = len(codes), _BLOCKS * codes.shape[2]
    magnitude, sign = (part.view(tokens, _BLOCKS, width // 32, 2, 4) for part in (codes, negative.to(torch.uint8)))
    pairs = magnitude[..., 0::2] | magnitude[..., 1::2] << 4
    return (pairs.flatten(-2) | sign[..., 0, :] << 7 | sign[..., 1, :] << 3).view(tokens, width // 2)


def _unpacked(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 and signs bool [N, blocks, W / 32, 2, 4] of bytes [N, W / 2]."""
    keys, width = codes.shape[0], 2 * codes.shape[1]
    words = codes.reshape(keys, _BLOCKS, width // 32, 4)
    magnitude = torch.stack((words & 7, words >> 4 & 7), -1).view(keys, _BLOCKS, width // 32, 2, 4)
    return magnitude, torch.stack((words >> 7, words >> 3 & 1), -2).bool()
