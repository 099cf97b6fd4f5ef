"""Whether this process can use NVSHMEM, from what is installed; loads and starts nothing."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from ...parallel.grid import Grid
from .library import bindings_version, find, text_of


def explain(grid: Grid) -> tuple[bool, str]:
    """(usable on this grid, why). Never raises."""
    if grid.device.type != "cuda":
        return False, f"it needs CUDA devices, and tokens are on the {grid.device.type}"
    if find_spec("triton") is None:
        return False, "its kernels need the package triton"
    try:
        library = find(cuda=torch.version.cuda)
        bindings = bindings_version()
    except ValueError as error:
        return False, str(error)
    alone = "; one expert rank: nothing to send, local is used in its place" if grid.ep.size == 1 else ""
    return True, f"NVSHMEM {text_of(library.version)}, nvshmem4py {bindings}: stores where ranks are mapped, puts where not{alone}"
