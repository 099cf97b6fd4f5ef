"""The ranks that take part, as far as this process has them: its own under torchrun, all of them without."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....comm.dispatcher import Dispatcher, EPSpec
from ....comm.select import explain, make_dispatcher
from ....comm.virtual import VirtualRanks
from ....parallel.grid import Grid
from ....parallel.grid_spec import GridSpec

VIRTUAL = "virtual"


@dataclass(frozen=True, kw_only=True)
class Crew:
    """Ranks ``mine`` of ``size``. All processes make the same calls in the same order."""

    size: int  # ranks
    mine: tuple[int, ...]  # of this process
    device: torch.device  # of tokens
    grid: Grid | None  # None: virtual ranks

    @classmethod
    def gather(cls, virtual_ranks: int, timeout_s: float = 60.0) -> Crew:
        """The job that torchrun started, or ``virtual_ranks`` in this process."""
        size, gpus = int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.device_count()
        if size == 1:
            device = torch.device("cuda", 0) if gpus else torch.device("cpu")
            return cls(size=virtual_ranks, mine=tuple(range(virtual_ranks)), device=device, grid=None)
        device = torch.device("cpu")
        if gpus:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
            torch.cuda.set_device(device)
        grid = Grid.create(GridSpec(dp=size), device, timeout_s)
        return cls(size=size, mine=(grid.ep.index,), device=device, grid=grid)

    @property
    def speaks(self) -> bool:
        """Whether this process prints and writes."""
        return 0 in self.mine

    @property
    def nodes(self) -> int:
        """Hosts."""
        return 1 if self.grid is None else len(set(self.grid.node_of))

    @property
    def gpus(self) -> int:
        """Distinct GPUs that ranks have on this host; 0 on the CPU."""
        if self.device.type != "cuda":
            return 0
        return 1 if self.grid is None else min(torch.cuda.device_count(), self.size)

    def backends(self, asked: Sequence[str], *, skip: bool = False) -> list[str]:
        """``asked``, or all that work here. ValueError for one that cannot; with ``skip`` as long as none of them can."""
        if self.grid is None:
            if any(name != VIRTUAL for name in asked):
                raise ValueError(f"one process has virtual ranks only, --backend {','.join(asked)} needs torchrun --nproc-per-node N")
            return [VIRTUAL]
        reasons = {name: (usable, why) for name, usable, why in explain(self.grid) if name != "local"}
        for name in asked:
            if name not in reasons:
                raise ValueError(f"unknown backend {name!r} in --backend; known: {', '.join(reasons)}")
            if not reasons[name][0] and skip and any(reasons.get(other, (False,))[0] for other in asked):
                self._say(f"{name}: left out: {reasons[name][1]}")
            elif not reasons[name][0]:
                raise ValueError(f"--backend {name} cannot be used here: {reasons[name][1]}")
        usable = [name for name in asked if reasons[name][0]]
        return usable or [name for name, (usable, _) in reasons.items() if usable and (name != "shm" or self.device.type == "cpu")]

    def _say(self, text: str) -> None:
        if self.speaks:
            print(text, flush=True)

    def dispatchers(self, backend: str, spec: EPSpec) -> list[Dispatcher]:
        """Collective: one for every rank of ``mine``."""
        if self.grid is None:
            return list(VirtualRanks.make(spec, device=self.device).ranks)
        return [make_dispatcher(backend, self.grid, spec)]

    def worst(self, values: Sequence[float]) -> list[float]:
        """The largest of each over all ranks (microseconds). Collective; also a barrier."""
        if self.grid is None:
            return list(values)
        return [n / 1000 for n in self.grid.ep.gather_ints([round(1000 * v) for v in values]).max(axis=0).tolist()]

    def meet(self) -> None:
        """Wait for all ranks and for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.worst([0.0])

    def close(self) -> None:
        """Leave the job."""
        if self.grid is not None:
            self.grid.close()
