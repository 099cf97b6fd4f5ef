"""What the wrappers of the kernels work out on the host before a launch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_MOST = 32  # tokens that a program handles at once
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
#: Triton's names of what rows consist of
TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int32: tl.int32,
    torch.int16: tl.int16,
    torch.uint8: tl.uint8,
}


def unit_of(x: torch.Tensor) -> int:
    """Bytes, at most 16, that address and pitch of the rows of ``x`` [n, width] are multiples of."""
    return math.gcd(16, x.data_ptr(), x.stride(0) * x.element_size())


def as_words(x: torch.Tensor) -> torch.Tensor:
    """``x`` [n, width] as integers of the largest size up to 4 bytes that its rows consist of."""
    size = math.gcd(4, unit_of(x), x.shape[1] * x.element_size())
    return x.view(_WORDS[max(size, 1)]) if size >= x.element_size() or x.element_size() == 8 else x.view(_WORDS[x.element_size()])


def pitch_units(x: torch.Tensor) -> tuple[int, int]:
    """(pitch of the rows of ``x`` in units, values of a unit): the kernel sees from the second how wide it may load."""
    unit = max(unit_of(x) // x.element_size(), 1)
    return x.stride(0) // unit, unit


def check_rows(name: str, x: torch.Tensor, width: int, most: int) -> None:
    """Refuse what is not a matrix of at most ``most`` rows of ``width`` contiguous values."""
    if x.dim() != 2 or x.shape[1] != width or (x.stride(1) != 1 and width > 1):
        found = f"shape {tuple(x.shape)} and strides {x.stride()}"
        raise ValueError(f"{name} must be rows of {width} contiguous values, found {found}; reshape or copy")
    if x.shape[0] > most:
        raise ValueError(f"{name} has {x.shape[0]} rows, the layout has room for {most} (max_tokens); split the batch or set up for more")


def check_choices(name: str, x: torch.Tensor, n_rows: int, top_k: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse what is not a contiguous [n_rows, top_k] of one of ``dtypes``."""
    if tuple(x.shape) != (n_rows, top_k) or x.dtype not in dtypes or not x.is_contiguous():
        found = f"{x.dtype} of shape {tuple(x.shape)} and strides {x.stride()}"
        raise ValueError(f"{name} must be contiguous [{n_rows}, {top_k}] of {' or '.join(map(str, dtypes))}, found {found}; cast or copy")


def grid_of(programs: int, items: int) -> int:
    """Programs of a launch over ``items``: at least one, at most ``programs``. ValueError if ``programs`` is less than one."""
    if programs < 1:
        raise ValueError(f"programs must be at least 1, found {programs}")
    return max(1, min(programs, items))


def limit_of(timeout_ms: int, on_gpu: bool) -> int:
    """A deadline for ``wait_flags``: nanoseconds on a GPU; in the interpreter turns, of which one is some 50 us."""
    return timeout_ms * 1_000_000 if on_gpu else max(timeout_ms, 1)


def lanes_of(n: int) -> int:
    """``n`` rounded up to a power of two."""
    return int(triton.next_power_of_2(n))


def registers_of(warps: int) -> int:
    """Registers of a thread that a program of ``warps`` has to itself: the compiler need not leave room for a second one."""
    return min(255, 65536 // (32 * warps) // 8 * 8)


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """How a kernel that works on ``tokens`` x ``piece`` tiles is launched; a program has as much in registers and as much on the way."""

    tokens: int  # that a program handles at once; a power of two
    piece: int  # values, or words, of each; a power of two
    warps: int  # of a program

    @classmethod
    def to_sum(cls, n_tokens: int, width: int, programs: int, *, rows: int) -> TileConfig:
        """For sums of ``rows`` rows: up to two are read ahead, so pieces are short for few tokens and tiles large for many."""
        tokens = _at_once(n_tokens, programs, _MOST if rows <= 2 else 16)
        values = _values(tokens, few=4096) if rows <= 2 else 8192
        return cls._of(tokens, max(16, min(values // tokens, lanes_of(width))))

    @classmethod
    def to_quantise(cls, n_tokens: int, width: int, programs: int) -> TileConfig:
        """For what is rounded to FP8 on the way: whole blocks of 128."""
        tokens = _at_once(n_tokens, programs, _MOST)
        return cls._of(tokens, max(128, min(_values(tokens, few=8192) // tokens, lanes_of(width))))

    @classmethod
    def to_move(cls, n_tokens: int, width: int, programs: int, *, piece: int) -> TileConfig:
        """For words that go as they are: pieces of about ``piece``, so that the first are under way soon."""
        tokens = _at_once(n_tokens, programs, _MOST)
        piece = max(16, min(piece if tokens >= 4 else 2048 // tokens, lanes_of(width)))
        return cls(tokens=tokens, piece=piece, warps=max(4, min(16, tokens)))

    @classmethod
    def _of(cls, tokens: int, piece: int) -> TileConfig:
        """16 values a thread, or more where there are more than 16 warps can have."""
        return cls(tokens=tokens, piece=piece, warps=max(1, min(16, tokens * piece // 512)))


def _at_once(n_tokens: int, programs: int, most: int) -> int:
    """Tokens that a program handles at once, at most ``most``, if all programs are to have some; a power of two."""
    return lanes_of(max(1, min(most, n_tokens // max(1, programs))))


def _values(tokens: int, *, few: int) -> int:
    """Values of a tile: ``few`` for up to 4 tokens, 32 a thread of 16 warps for many, which share the work on a row."""
    return few if tokens <= 4 else 8192 if tokens <= 8 else 16384
