"""How the ranks of a grid meet: torch.distributed and one process group per set of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .failure import CollectiveError, collective_error
from .grid_spec import GridSpec, rank_sets
from .group import Group
from .interface import choose_gloo_interface
from .muster import Roll, muster
from .progress import Progress
from .roll_call import AbsentError
from .store import Rendezvous
from .watchdog import Watchdog


def meet(meeting: Rendezvous, prefix: str, facts: Mapping[str, Any], timeout_s: float, max_skew_s: float, progress: Progress) -> Roll:
    """``muster``, with absent ranks as a CollectiveError."""
    ranks = range(meeting.world_size)
    progress.resume("world", "create", ranks)
    try:
        return muster(meeting, prefix, facts, timeout_s, max_skew_s)
    except AbsentError as error:
        cause = "not all ranks met within the deadline"
        made = collective_error(
            cause, op="create", group="world", ranks=ranks, peers=error.missing, deadline_s=timeout_s, progress=progress
        )
        raise made from error
    finally:
        progress.leave()


def join(
    meeting: Rendezvous, prefix: str, spec: GridSpec, device: torch.device, timeout_s: float, progress: Progress, *, roll: Roll,
    watchdog: Watchdog,
) -> dict[str, Group]:  # fmt: skip
    """Connect all ranks, which have met; CollectiveError naming those that did not come.

    A rank that cannot reach another tells all of it: they would wait until their deadline.
    """
    if not dist.is_initialized():
        choose_gloo_interface(roll.meeting_host(meeting.host, meeting.port), meeting.port, single_host=roll.single_host)
    try:
        return _connect(meeting, prefix, spec, device, timeout_s, progress)
    except CollectiveError as error:
        watchdog.report_failure(error)
        raise


def _connect(
    meeting: Rendezvous, prefix: str, spec: GridSpec, device: torch.device, timeout_s: float, progress: Progress
) -> dict[str, Group]:
    ranks = range(spec.world)
    progress.resume("world", "create", ranks)
    try:
        if not dist.is_initialized():
            _init_torch(meeting, prefix, device, timeout_s)
        return _make_groups(spec, meeting.rank, timeout_s, progress)
    except RuntimeError as error:
        cause = f"not all ranks met within the deadline ({str(error).splitlines()[0]})"
        raise collective_error(
            cause, op="create", group="world", ranks=ranks, peers=ranks, deadline_s=timeout_s, progress=progress
        ) from error
    finally:
        progress.leave()


def _init_torch(meeting: Rendezvous, prefix: str, device: torch.device, timeout_s: float) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = meeting.under(f"{prefix}/torch")
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=meeting.rank, world_size=meeting.world_size, timeout=timeout)


def _make_groups(spec: GridSpec, rank: int, timeout_s: float, progress: Progress) -> dict[str, Group]:
    """This rank's groups by name. Sets of ranks that coincide share one process group."""
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(spec.world)): dist.group.WORLD}
    groups: dict[str, Group] = {}
    for name, ranks in rank_sets(spec):
        key = tuple(ranks)
        if len(key) > 1 and key not in made:
            made[key] = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
        if rank in key:
            groups[name] = _group(name, key, rank, made.get(key), timeout_s, progress)
    return groups


def _group(name: str, ranks: Sequence[int], rank: int, pg: dist.ProcessGroup | None, timeout_s: float, progress: Progress) -> Group:
    if len(ranks) == 1:
        return Group.solo(name, rank, progress)
    return Group(name, ranks, list(ranks).index(rank), process_group=pg, deadline_s=timeout_s, progress=progress)
