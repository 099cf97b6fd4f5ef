"""Formats of index keys, those of the engine and others that were weighed against its FP4, as roundings of whole keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ....attention.hadamard import hadamard
from ....attention.kv import fp4
from ....attention.kv.layout import E4M3_MAX, quantise

_BLOCK = 32  # values that share a scale
_LARGEST = 6.0  # of e2m1
_E4M3_LEAST = 2.0**-9
_EDGES = tuple((low + high) / 2 for low, high in zip(fp4.LEVELS, fp4.LEVELS[1:], strict=False))
_AT_ONCE = 1 << 26  # products held at a time


@dataclass(frozen=True, kw_only=True)
class KeyFormat:
    """How a key is kept, and its queries with it."""

    name: str
    bytes: float  # of a key of 128 values
    keys: Callable[[torch.Tensor], torch.Tensor]  # fp32 [L, D] -> the values that are read back
    queries: Callable[[torch.Tensor], torch.Tensor]  # the same of queries fp32 [n, H, D]
    transform: bool  # Hadamard's, before both


def _same(values: torch.Tensor) -> torch.Tensor:
    return values


def _bf16(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def _fp8(values: torch.Tensor) -> torch.Tensor:
    """One e4m3 scale for the last dimension."""
    codes, scales = quantise(values.flatten(0, -2), values.shape[-1])
    return (codes.view(torch.float8_e4m3fn).float() * scales).view(values.shape)


def _fp4(values: torch.Tensor) -> torch.Tensor:
    numbers, scales = fp4.decode(*fp4.quantise(values))
    return numbers * scales[:, None]


def _e2m1(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``values`` rounded to the magnitudes of e2m1 times ``scales``."""
    units = (values / scales).abs()
    return torch.tensor(fp4.LEVELS)[torch.bucketize(units, torch.tensor(_EDGES))].copysign(values) * scales


def _blocks(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [L, B, 32] and the largest magnitude of each block [L, B, 1]."""
    blocks = values.view(len(values), -1, _BLOCK)
    return blocks, blocks.abs().amax(2, keepdim=True).clamp_min(1e-12)


def _power_of_two(values: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that keeps the largest value within 7, which rounds to 6: better than 6 and than 8."""
    blocks, largest = _blocks(values)
    return _e2m1(blocks, torch.exp2(torch.ceil(torch.log2(largest / 7.0)))).view_as(values)


def _under_one(values: torch.Tensor) -> torch.Tensor:
    """e4m3 scales of blocks, times one fp32 scale of the key."""
    blocks, largest = _blocks(values)
    whole = largest.amax(1, keepdim=True) / (_LARGEST * E4M3_MAX)
    scales = (largest / _LARGEST / whole).clamp_min(_E4M3_LEAST).to(torch.float8_e4m3fn).float() * whole
    return _e2m1(blocks, scales).view_as(values)


def _one(values: torch.Tensor) -> torch.Tensor:
    """One fp32 scale for the key."""
    return _e2m1(values, values.abs().amax(1, keepdim=True).clamp_min(1e-12) / 6.25)


def _coded(name: str, n_bytes: float, keys: Callable[[torch.Tensor], torch.Tensor]) -> KeyFormat:
    return KeyFormat(name=name, bytes=n_bytes, keys=keys, queries=_fp8, transform=True)


#: what ``--index-cache-dtype`` takes
SERVED = (
    KeyFormat(name="float32", bytes=512, keys=_same, queries=_same, transform=False),
    KeyFormat(name="bfloat16", bytes=256, keys=_bf16, queries=_bf16, transform=False),
    _coded("fp8", 132, _fp8),
    _coded("fp4", 68, _fp4),
)
#: other scales of e2m1 values
WEIGHED = (
    _coded("e2m1, scales are powers of two (MXFP4)", 68, _power_of_two),
    _coded("e2m1, e4m3 scales under an fp32 one (as NVFP4)", 72, _under_one),
    _coded("e2m1, one fp32 scale a key", 68, _one),
)


def scores(form: KeyFormat, queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Index scores fp32 [n, L] of queries fp32 [n, H, D] with head weights [n, H] over keys fp32 [L, D], both after RoPE."""
    if form.transform:
        queries, keys = hadamard(queries), hadamard(keys)
    queries, keys = form.queries(queries), form.keys(keys)
    step = max(1, _AT_ONCE // (queries.shape[1] * len(keys)))
    parts = []
    for first in range(0, len(queries), step):
        some = slice(first, first + step)
        each = (queries[some] @ keys.T).relu_()
        parts.append(torch.bmm(weights[some, None], each)[:, 0])
    return torch.cat(parts)


def kept(true: torch.Tensor, found: torch.Tensor, k: int) -> float:
    """Percent of the ``k`` highest of each row of ``true`` [n, L] that are among the ``k`` highest of ``found`` [n, L]."""
    marks = torch.zeros_like(true, dtype=torch.bool).scatter_(1, true.topk(k, 1).indices, True)
    return 100.0 * float(marks.gather(1, found.topk(k, 1).indices).float().mean())


def shares(forms: Sequence[KeyFormat], queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, k: int) -> list[float]:
    """``kept`` of each format against fp32 keys."""
    true = scores(SERVED[0], queries, weights, keys)
    return [kept(true, scores(form, queries, weights, keys), k) for form in forms]
