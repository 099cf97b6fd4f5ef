"""Degrees of parallelism, and the sets of ranks that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class GridSpec:
    """Degrees of parallelism. rank = (pp_rank * dp + dp_rank) * tp + tp_rank."""

    pp: int = 1  # pipeline stages
    dp: int = 1  # replicas that own different requests
    tp: int = 1  # ranks that share the attention of one request
    ranks_per_node: int | None = None  # consecutive ranks on one node; LOCAL_WORLD_SIZE by default

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "tp"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, found {value!r}")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be at least 1, found {self.ranks_per_node}")

    @property
    def world(self) -> int:
        """Ranks of the whole grid."""
        return self.pp * self.dp * self.tp

    def validate(self, world_size: int) -> None:
        """Raise ValueError, with the layouts that fit, unless the grid has ``world_size`` ranks."""
        if self.world == world_size:
            return
        fitting = [f"dp={dp} tp={world_size // (self.pp * dp)}" for dp in _divisors(world_size, self.pp)]
        choices = f"with pp={self.pp} these fit {world_size}: {', '.join(fitting)}"
        if not fitting:
            choices = f"pp={self.pp} does not divide {world_size}"
        raise ValueError(
            f"pp={self.pp} x dp={self.dp} x tp={self.tp} makes {self.world} ranks, but the job has {world_size}: "
            f"start {self.world} (torchrun --nproc-per-node {self.world} ...) or change the degrees; {choices}"
        )


def _divisors(world: int, pp: int) -> list[int]:
    return [d for d in range(1, world // pp + 1) if world % (pp * d) == 0] if world % pp == 0 else []


def rank_sets(spec: GridSpec) -> Iterator[tuple[str, list[int]]]:
    """Every group of the grid as (name, global ranks); the same sequence on every rank."""
    cube = torch.arange(spec.world).view(spec.pp, spec.dp, spec.tp)
    yield "world", cube.flatten().tolist()
    for stage in cube:
        yield "ep", stage.flatten().tolist()
        for row in stage:
            yield "tp", row.tolist()
    for replica in range(spec.dp):
        yield "replica", cube[:, replica].flatten().tolist()
    yield "leaders", cube[0, :, 0].tolist()
