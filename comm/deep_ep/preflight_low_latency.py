"""The same as ``preflight``, of the low-latency mode of V1 buffers."""

from __future__ import annotations

from ...parallel.grid import Grid
from . import package
from .preflight import _explain


def explain(grid: Grid) -> tuple[bool, str]:
    """(usable on this grid, why). Never raises."""
    return _explain(grid, package.LOW_LATENCY)
