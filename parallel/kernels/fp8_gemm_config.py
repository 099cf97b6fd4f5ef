"""Which launch a block-FP8 product gets: measured ones (``tuned``) over the estimates here."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from .tuned import config_for

OP = "fp8_gemm"
_BUCKETS = (16, 32, 64, 128)
_SMS = 132
_START = 3.0  # us of a launch and its first copies
_SHARING = 10.0, 0.45  # us that leaving and adding parts take, and us a block of K (neighbours lose step, and the L2 with it)
_WIDE = 0.83  # us a block of K takes in a tile of 256 x 128
# us a block of K takes in a narrow tile of (rows, columns) on an H200
_NARROW = {(64, 64): 0.19, (64, 32): 0.17, (64, 16): 0.134, (64, 128): 0.30, (128, 64): 0.33, (128, 128): 0.52, (128, 32): 0.25}


def bucket(n_rows: int) -> int:
    """The number of rows a launch is chosen for: 16, 32, 64, 128, or a multiple of 256."""
    return next((top for top in _BUCKETS if n_rows <= top), -(-n_rows // 256) * 256)


def split_config(rows: int, n_features: int, width: int) -> dict[str, Any]:
    """Portable launch: for few rows as many ranges of K, of four blocks or more, as give every SM a program."""
    if rows > _BUCKETS[-1]:
        return {"kind": "split", "rows": 128, "features": 128, "splits": 1, "stages": 3, "warps": 8}
    splits = max(min(round(_SMS / -(-n_features // 64)), -(-width // 512), 16), 1)
    return {"kind": "split", "rows": rows, "features": 64, "splits": splits, "stages": 6, "warps": 4}


def _estimates(rows: int, n_features: int, width: int) -> list[tuple[float, dict[str, Any]]]:
    """(us, launch) of every launch for more than 16 rows."""
    n_blocks = -(-width // 128)
    found = []
    for (tall, columns), each in _NARROW.items():
        rounds = math.ceil(-(-rows // tall) * -(-n_features // columns) / _SMS)
        us = max(rounds * n_blocks * each, n_features * width / 4.2e6)
        found.append((us + _START, {"kind": "narrow", "rows": tall, "columns": columns, "stages": 10}))
    fill = -(-rows // 256) * -(-n_features // 128) / _SMS
    wide = {"kind": "tiles", "rows": 256, "stages": 4, "group": 4}
    found.append((math.ceil(fill) * n_blocks * _WIDE + _START, {**wide, "share": False}))
    found.append((fill * n_blocks * _WIDE + _SHARING[0] + n_blocks * _SHARING[1] + _START, {**wide, "share": True}))
    return found


def default_config(rows: int, n_features: int, width: int) -> dict[str, Any]:
    """Launch of a bucket of ``rows`` rows on Hopper where nothing was measured: the one with the least estimated time.

    Up to 16 rows the portable launch is the fastest one: its loads need no descriptors, and programs are small.
    """
    if rows <= _BUCKETS[0]:
        return split_config(rows, n_features, width)
    return min(_estimates(rows, n_features, width), key=lambda estimate: estimate[0])[1]


@lru_cache(maxsize=8192)
def config(n_rows: int, n_features: int, width: int) -> dict[str, Any]:
    """Launch of a product with M = ``n_rows``, N = ``n_features``, K = ``width``. Cached; do not change the result."""
    rows = bucket(n_rows)
    return config_for(OP, default_config(rows, n_features, width), rows=rows, n=n_features, k=width)
