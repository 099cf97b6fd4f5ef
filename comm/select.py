"""Which backend a grid gets, and why not another."""

from __future__ import annotations

from ..parallel.grid import Grid
from .dispatcher import Dispatcher, EPSpec
from .local import LocalDispatcher
from .torch_flat import TorchDispatcher
from .torch_node import TorchNodeDispatcher, rails
from .torch_static import TorchStaticDispatcher

BACKENDS = ("auto", "local", "torch", "torch_node", "torch_static")


def explain(grid: Grid) -> list[tuple[str, bool, str]]:
    """(backend, usable on this grid, why) for every backend."""
    size = grid.ep.size
    several = f"{size} expert ranks" if size > 1 else "one expert rank: nothing to send, local is used in its place"
    return [
        ("local", size == 1, "all experts on one rank" if size == 1 else f"experts are spread over {size} ranks"),
        ("torch", True, several),
        ("torch_node", *_node_reason(grid)),
        ("torch_static", True, several),
    ]


def _node_reason(grid: Grid) -> tuple[bool, str]:
    if grid.ep.size == 1:
        return True, "one expert rank: nothing to send, local is used in its place"
    try:
        nodes = rails(grid.node_of)
    except ValueError as error:
        return False, str(error)
    if len(nodes) == 1:
        return True, "one node: every token takes one hop more than with torch"
    return True, f"{len(nodes)} nodes of {len(nodes[0])} ranks"


def choose(backend: str, grid: Grid) -> str:
    """The name of the backend that ``backend`` means on this grid. ValueError if it is unknown or cannot work here."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown all-to-all backend {backend!r}; known: {', '.join(BACKENDS)}")
    several_nodes = len(set(grid.node_of)) > 1
    if backend == "auto":
        backend = "torch_node" if several_nodes and _node_reason(grid)[0] else "torch"
    for name, usable, reason in explain(grid):
        if name == backend and not usable:
            raise ValueError(f"all-to-all backend {backend!r} cannot be used here: {reason}")
    return "local" if grid.ep.size == 1 else backend


def make_dispatcher(backend: str, grid: Grid, spec: EPSpec) -> Dispatcher:
    """The dispatcher of this rank. Collective over the expert group, unless the experts are all on this rank.

    A spec of one rank on a grid of several (experts not spread) takes the local backend. Raises ValueError for an
    unknown or unusable backend, for a spec that does not fit the group, and if the ranks' specs differ.
    """
    if spec.n_ranks == 1 and backend in ("local", "auto"):
        return LocalDispatcher(spec)
    name = choose(backend, grid)
    if name == "local":
        return LocalDispatcher(spec)
    if name == "torch_node":
        return TorchNodeDispatcher(grid.ep, spec, grid.node_of, grid.device)
    return TorchStaticDispatcher(grid.ep, spec) if name == "torch_static" else TorchDispatcher(grid.ep, spec)
