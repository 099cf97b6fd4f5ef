"""Splitting the tokens of a replica over its tensor-parallel ranks, and bringing them back together."""

from __future__ import annotations

import torch

from .group import Group


def slice_bounds(n: int, size: int, index: int) -> tuple[int, int]:
    """Bounds of part ``index`` of n items cut into ``size`` contiguous parts; the first n % size have one more."""
    each, extra = divmod(n, size)
    start = index * each + min(index, extra)
    return start, start + each + (index < extra)


def slice_tokens(n: int, group: Group) -> tuple[int, int]:
    """(start, stop) of this rank's contiguous part of n tokens; sizes differ by at most one."""
    return slice_bounds(n, group.size, group.index)


def gather_tokens(x_local: torch.Tensor, n: int, group: Group) -> torch.Tensor:
    """The parts x_local [stop - start, ...] of all ranks -> [n, ...] on every rank, in token order."""
    if group.size == 1:
        return x_local
    bounds = [slice_bounds(n, group.size, index) for index in range(group.size)]
    return group.all_gather_uneven(x_local, [stop - start for start, stop in bounds])
