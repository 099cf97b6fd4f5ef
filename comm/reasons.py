"""Whether each backend can work on a grid, and why or why not; looks at this process and the grid, and asks nobody."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch

from ..parallel.grid import Grid
from .heap import shm, symm
from .torch_node import rails

Verdict = tuple[bool, str]
_ALONE = "one expert rank: nothing to send, local is used in its place"


def n_nodes(grid: Grid) -> int:
    """Hosts that the ranks of the expert group are on."""
    return len(set(grid.node_of))


def local(grid: Grid) -> Verdict:
    """All experts on one rank."""
    return grid.ep.size == 1, "all experts on one rank" if grid.ep.size == 1 else f"experts are spread over {grid.ep.size} ranks"


def anywhere(grid: Grid) -> Verdict:
    """Collectives of torch.distributed work wherever a grid does."""
    return True, f"{grid.ep.size} expert ranks" if grid.ep.size > 1 else _ALONE


def torch_node(grid: Grid) -> Verdict:
    """Two hops need as many ranks on every node."""
    if grid.ep.size == 1:
        return True, _ALONE
    try:
        nodes = rails(grid.node_of)
    except ValueError as error:
        return False, str(error)
    if len(nodes) == 1:
        return True, "one node: every token takes one hop more than with torch"
    return True, f"{len(nodes)} nodes of {len(nodes[0])} ranks"


def symm_memory(grid: Grid) -> Verdict:
    """Plain stores need memory that is mapped, and the kernels Triton."""
    reason = symm.why_not(grid.device)
    if reason is None and find_spec("triton") is None:
        reason = "its kernels need the package triton"
    if reason is None and n_nodes(grid) > 1:
        reason = f"the ranks are on {n_nodes(grid)} hosts, and memory is mapped within one; use nvshmem or torch_node"
    shared = os.environ.get(symm.ONE_GPU, "0") == "1"  # several ranks on one GPU, by choice
    if reason is None and not shared and grid.ep.size > torch.cuda.device_count() > 1:
        reason = f"{grid.ep.size} ranks, but this process sees {torch.cuda.device_count()} GPUs; show all of them to every rank"
    if reason is not None:
        return False, reason
    return True, f"stores into the memory of {grid.ep.size} GPUs of one host" if grid.ep.size > 1 else _ALONE


def shm_memory(grid: Grid) -> Verdict:
    """CPU ranks of one host."""
    reason = shm.why_not()
    if reason is None and grid.device.type != "cpu":
        reason = f"it is for ranks on the CPU, and tokens are on {grid.device.type}; use symm"
    if reason is None and n_nodes(grid) > 1:
        reason = f"the ranks are on {n_nodes(grid)} hosts, and memory is mapped within one; use torch_node"
    if reason is not None:
        return False, reason
    return True, f"stores into the memory of {grid.ep.size} processes of one host" if grid.ep.size > 1 else _ALONE


def elsewhere(package: str, module: str) -> Callable[[Grid], Verdict]:
    """The verdict of a backend that needs ``package``: its ``module`` has ``explain(grid) -> (usable, why)``."""

    def verdict(grid: Grid) -> Verdict:
        found: Verdict = import_module(module, __package__).explain(grid)
        return found

    verdict.__doc__ = f"Needs the package {package}."
    return verdict


#: in the order of reports
VERDICTS: dict[str, Callable[[Grid], Verdict]] = {
    "local": local,
    "torch": anywhere,
    "torch_node": torch_node,
    "torch_static": anywhere,
    "symm": symm_memory,
    "nvshmem": elsewhere("nvshmem4py", ".nvshmem.preflight"),
    "nvshmem_node": elsewhere("nvshmem4py", ".nvshmem.preflight_node"),
    "deep_ep": elsewhere("deep_ep", ".deep_ep.preflight"),
    "deep_ep_ll": elsewhere("deep_ep", ".deep_ep.preflight_low_latency"),
    "shm": shm_memory,
}
