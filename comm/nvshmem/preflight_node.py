"""The same as ``preflight``, of two hops."""

from __future__ import annotations

from ...parallel.grid import Grid
from . import preflight


def explain(grid: Grid) -> tuple[bool, str]:
    """(usable on this grid, why). Never raises."""
    usable, why = preflight.explain(grid)
    if not usable or grid.ep.size == 1:
        return usable, why
    sizes = [grid.node_of.count(node) for node in sorted(set(grid.node_of))]
    if len(set(sizes)) > 1:
        return False, f"two hops need the same number of ranks on every node, found {sizes}"
    if list(grid.node_of) != sorted(grid.node_of):
        return False, f"two hops need nodes of neighbouring ranks, found the node map {list(grid.node_of)}"
    if len(sizes) == 1:
        return True, f"{why}; one node: a token takes one hop more than with nvshmem"
    return True, f"{why}; a token crosses to a node once ({len(sizes)} nodes of {sizes[0]} ranks); no CUDA graphs"
