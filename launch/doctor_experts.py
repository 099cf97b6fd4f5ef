"""The doctor's rows on the exchange between expert ranks: each backend, and which one "auto" means where."""

from __future__ import annotations

import torch

from ..comm.select import choose, explain
from ..parallel.grid import Grid
from ..parallel.group import Group
from ..parallel.progress import Progress

Row = tuple[str, str, bool, str]  # kind, name, usable, reason


def planned(device: torch.device, nodes: tuple[int, ...]) -> Grid:
    """The first rank of a grid that is connected to nobody: one expert rank for each of ``nodes``, on the host it names."""
    grid = Grid.single(device)
    grid.ep = Group("ep", range(len(nodes)), 0, process_group=None, deadline_s=1.0, progress=Progress(rank=0))
    grid.node_of = nodes
    return grid


def expert_backends() -> list[Row]:
    """Each backend for expert ranks on all GPUs of this host, or on its CPUs where it has none, and what "auto" chooses."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    ranks = max(2, gpus)
    here = planned(device, (0,) * ranks)
    rows = [("comm", name, usable, reason) for name, usable, reason in explain(here) if name != "local"]
    kind = "GPUs" if gpus else "CPU ranks"
    said = {f"{kind} of this host": here, f"{kind} of 2 hosts": planned(device, (0, 0, 1, 1))}
    if gpus:
        said["CPU ranks of this host"] = planned(torch.device("cpu"), (0, 0))
    choices = ", ".join(f"{choose('auto', grid)} for {where}" for where, grid in said.items())
    return [("comm", "local", True, "all experts on one rank"), ("comm", "auto", True, choices), *rows]
