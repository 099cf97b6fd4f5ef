"""A process group of the expert ranks for moving experts, apart from those that steps wait in."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ....parallel.grid import Grid
from ....parallel.grid_spec import rank_sets
from ....parallel.group import Group
from ....parallel.progress import Progress


def side_group(grid: Grid, timeout_s: float, *, max_ctas: int = 4) -> Group:
    """The expert ranks of this rank's stage as a group of its own. Collective over the world.

    Its waits are in another thread, so it has its own record of progress, which the watchdog does not read.

    Args:
        grid: of this rank.
        timeout_s: deadline of every wait, in seconds.
        max_ctas: most thread blocks that NCCL takes for a transfer, on CUDA.
    """
    if grid.ep.size == 1:
        return Group.solo("experts move", grid.rank)
    backend = "cpu:gloo,cuda:nccl" if grid.device.type == "cuda" else "gloo"
    options = None
    if grid.device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = max_ctas
        options.config.min_ctas = 1
    # NCCL ends a process whose transfer is late; waits here end earlier, and then only balancing does
    late_s = timeout_s + (60.0 if grid.device.type == "cuda" else 0.0)
    made = None
    for name, ranks in rank_sets(grid.spec):
        if name == "ep":
            group = dist.new_group(ranks, timeout=timedelta(seconds=late_s), backend=backend, pg_options=options)
            made = group if grid.rank in ranks else made
    return Group(
        "experts move", grid.ep.ranks, grid.ep.index, process_group=made, deadline_s=timeout_s, progress=Progress(rank=grid.rank)
    )  # fmt: skip
