"""Counter-based noise: one uniform number as a pure function of (seed, position).

The generator is SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), used as a
hash instead of a stream: the seed is mixed once, so that neighbouring seeds do not give shifted copies of one sequence,
and the position steps the mixed state by the golden-ratio increment. Nothing depends on the row of the batch, the step,
the rank or the device.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def _signed(word: int) -> int:
    """The 64-bit pattern ``word`` as torch's signed int64."""
    return word - (1 << 64) if word >> 63 else word


def _shift_xor(x: torch.Tensor, shift: int) -> torch.Tensor:
    """``x ^ (x >> shift)`` with a logical shift; torch's shift of int64 copies the sign."""
    return x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))


def mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64 tensors (products wrap modulo 2^64)."""
    x = _shift_xor(x, _SHIFTS[0]) * _signed(_MULTIPLIERS[0])
    x = _shift_xor(x, _SHIFTS[1]) * _signed(_MULTIPLIERS[1])
    return _shift_xor(x, _SHIFTS[2])


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One float64 in the open interval (0, 1) per row.

    ``seeds`` and ``positions`` are int64 [n]. The top 52 bits are centred in their interval, so 0 and 1 never come out.
    """
    state = mix(seeds.to(torch.int64) + _signed(_GAMMA))
    word = mix(state + (positions.to(torch.int64) + 1) * _signed(_GAMMA))
    bits = (word >> 12) & ((1 << 52) - 1)
    return (bits.to(torch.float64) + 0.5) * 2.0**-52


def _mix_int(x: int) -> int:
    """``mix`` on a Python integer."""
    x = ((x ^ (x >> _SHIFTS[0])) * _MULTIPLIERS[0]) & _MASK
    x = ((x ^ (x >> _SHIFTS[1])) * _MULTIPLIERS[1]) & _MASK
    return x ^ (x >> _SHIFTS[2])


def derive_seed(base: int, *path: int) -> int:
    """A 63-bit seed from ``base`` and numbers that say whose it is, such as (request index, completion).

    With no path it is ``base`` itself, so that a request's own seed is used as given for its first completion.
    """
    if not path:
        return base
    state = base & _MASK
    for number in path:
        state = _mix_int((_mix_int((state + _GAMMA) & _MASK) + (number + 1) * _GAMMA) & _MASK)
    return state >> 1


def request_seed(seed: int | None, engine_seed: int, index: int, completion: int) -> int:
    """The value of the plan's seed column: the request's own seed if it brings one, else one of the engine's.

    ``index`` is the arrival number of the request, ``completion`` which of its ``n`` completions.
    """
    if seed is None:
        return derive_seed(engine_seed, index, completion)
    return derive_seed(seed, completion) if completion else derive_seed(seed)
