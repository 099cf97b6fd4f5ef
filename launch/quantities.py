"""Sizes and layouts as people type them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, **{f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}}
_UNITS |= {f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", 1)} | {prefix: 1024**i for i, prefix in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_DEGREE = re.compile(r"(pp|dp|tp|ep)=?(\d+)")


def parse_bytes(text: str) -> int:
    """``141GB``, ``131.4GiB``, ``100G`` (GiB) or a number of bytes.

    Raises:
        ValueError: not such a text; with examples of what is.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = None if found is None else _UNITS.get(found[2].upper())
    amount = float("inf") if found is None or unit is None else float(found[1]) * unit
    if amount == float("inf"):
        raise ValueError(f"{text!r} is no amount of memory; write for example 141GB (10^9 bytes), 128GiB (2^30 bytes) or a number of bytes")
    return int(amount)


def parse_layout(text: str) -> dict[str, int]:
    """``dp8``, ``pp2,tp4`` or ``pp2 x dp2 x tp4 x ep1`` -> degrees by name; what is not named is left out.

    Raises:
        ValueError: something else in it, a degree named twice, or one of 0.
    """
    found: dict[str, int] = {}
    for word in re.split(r"[\s,x]+", text.strip().lower()):
        match = _DEGREE.fullmatch(word)
        if match is None or match[1] in found or int(match[2]) < 1:
            raise ValueError(
                f"layout {text!r}: cannot use {word or text!r}; write degrees of pp, dp, tp and ep once each, for example dp8 or pp2,tp4"
            )
        found[match[1]] = int(match[2])
    return found
