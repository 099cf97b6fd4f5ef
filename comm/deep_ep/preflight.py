"""Whether this process can use deep_ep, for the choice of backends."""

from __future__ import annotations

from ...parallel.grid import Grid
from . import package


def explain(grid: Grid) -> tuple[bool, str]:
    """(usable on this grid, why), of its V2 buffers. Never raises."""
    return _explain(grid, package.ELASTIC)


def _explain(grid: Grid, backend: str) -> tuple[bool, str]:
    if grid.device.type != "cuda":
        return False, f"it needs CUDA devices, and tokens are on the {grid.device.type}"
    return package.explain(backend)
