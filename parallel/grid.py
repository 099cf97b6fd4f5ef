"""The rank grid: pipeline stages x data-parallel replicas x tensor-parallel ranks, and the groups made of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from .failure import CollectiveError, collective_error
from .group import Group
from .progress import Progress
from .store import Rendezvous
from .watchdog import Watchdog

_generation = itertools.count()  # grids made by this process: keeps the store keys of one apart from those of the next


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


@dataclass(kw_only=True)
class Grid:
    """This rank's place in the grid and the groups it belongs to. Made by ``create`` or ``single``."""

    spec: GridSpec  # degrees
    rank: int  # global rank
    device: torch.device  # where tensors live
    tp: Group  # ranks that share this rank's requests within its stage
    ep: Group  # all dp x tp ranks of this stage: the experts are spread over them
    replica: Group  # pp x tp ranks of this dp rank; index 0 is its leader
    leaders: Group | None  # the leaders of all replicas; None on other ranks
    world: Group  # everybody
    node_of: tuple[int, ...]  # node number of every EP rank, from 0
    progress: Progress  # what this rank is doing, for heartbeats; the engine sets progress.step
    watchdog: Watchdog | None = None  # None when alone
    _owns_dist: bool = field(default=False, repr=False)

    @property
    def pp_rank(self) -> int:
        """Pipeline stage."""
        return self.rank // (self.spec.dp * self.spec.tp)

    @property
    def dp_rank(self) -> int:
        """Replica."""
        return self.rank // self.spec.tp % self.spec.dp

    @property
    def tp_rank(self) -> int:
        """Place among the ranks that share requests."""
        return self.rank % self.spec.tp

    @property
    def is_leader(self) -> bool:
        """Whether this rank owns the scheduler of its replica."""
        return self.pp_rank == 0 and self.tp_rank == 0

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank makes logits."""
        return self.pp_rank == self.spec.pp - 1

    def peer(self, pp_rank: int) -> int:
        """Global rank of the same dp and tp rank in stage ``pp_rank``."""
        return (pp_rank * self.spec.dp + self.dp_rank) * self.spec.tp + self.tp_rank

    @property
    def prev_rank(self) -> int | None:
        """Global rank that sends hidden states here; None on the first stage."""
        return None if self.is_first_stage else self.peer(self.pp_rank - 1)

    @property
    def next_rank(self) -> int | None:
        """Global rank that takes hidden states from here; None on the last stage."""
        return None if self.is_last_stage else self.peer(self.pp_rank + 1)

    @property
    def first_stage_peer(self) -> int:
        """Global rank of the same dp and tp rank in the first stage."""
        return self.peer(0)

    @property
    def last_stage_peer(self) -> int:
        """Global rank of the same dp and tp rank in the last stage."""
        return self.peer(self.spec.pp - 1)

    def summary(self) -> str:
        """The layout in a few lines."""
        spec = self.spec
        degrees = f"grid pp={spec.pp} x dp={spec.dp} x tp={spec.tp} = {spec.world} ranks"
        lines = [f"{degrees}, {max(self.node_of) + 1} node(s) per stage, {self.device.type}"]
        for stage, replica in itertools.product(range(spec.pp), range(spec.dp)):
            first = (stage * spec.dp + replica) * spec.tp
            leads = f", rank {first} leads" if stage == 0 else ""
            lines.append(f"  stage {stage} replica {replica}: ranks {list(range(first, first + spec.tp))}{leads}")
        place = f"stage {self.pp_rank}, replica {self.dp_rank}, tp {self.tp_rank}, expert rank {self.ep.index} of {self.ep.size}"
        lines.append(f"  this is rank {self.rank}: {place}")
        return "\n".join(lines)

    def close(self, *, failed: bool = False) -> None:
        """Leave the job: all ranks together, or alone and at once if ``failed``. A second call does nothing."""
        watchdog, self.watchdog = self.watchdog, None
        try:
            if watchdog is not None and not failed:
                watchdog.closing = True
                self.world.barrier("close")
        finally:
            if watchdog is not None:
                watchdog.stop()
            for group in (self.tp, self.ep, self.replica, self.leaders, self.world):
                if group is not None:
                    group.close()
            if self._owns_dist:
                self._owns_dist = False
                dist.destroy_process_group()

    @classmethod
    def single(cls, device: torch.device) -> Grid:
        """One rank alone, without torch.distributed."""
        progress = Progress(rank=0)
        tp, ep, replica, leaders, world = (Group.solo(name, 0, progress) for name in ("tp", "ep", "replica", "leaders", "world"))
        return cls(
            spec=GridSpec(), rank=0, device=device, node_of=(0,), progress=progress,
            tp=tp, ep=ep, replica=replica, leaders=leaders, world=world,
        )  # fmt: skip

    @classmethod
    def create(cls, spec: GridSpec, device: torch.device, timeout_s: float) -> Grid:
        """Join the job that torchrun's environment describes. Collective over all ranks when there are several.

        ``timeout_s`` is the deadline of every collective, in seconds. Raises ValueError if the job has another number
        of ranks than the grid, CollectiveError if ranks do not show up.
        """
        spec.validate(int(os.environ.get("WORLD_SIZE", "1")))
        if spec.world == 1:
            return cls.single(device)
        if timeout_s <= 0:
            raise ValueError(f"the deadline of collectives must be more than 0 seconds, found {timeout_s}")
        meeting = Rendezvous.from_env(timeout_s)
        progress = Progress(rank=meeting.rank)
        prefix = f"rorqual/{meeting.attempt}/{next(_generation)}"
        watchdog = Watchdog(meeting, prefix, progress, deadline_s=timeout_s)
        watchdog.start()
        owns = not dist.is_initialized()
        try:
            groups = _join(meeting, prefix, spec, device, timeout_s, progress)
        except CollectiveError:
            watchdog.stop()
            raise
        first = meeting.rank // (spec.dp * spec.tp) * spec.dp * spec.tp
        nodes = [r // (spec.ranks_per_node or meeting.local_world_size) for r in range(first, first + spec.dp * spec.tp)]
        grid = cls(
            spec=spec, rank=meeting.rank, device=device, progress=progress, watchdog=watchdog, _owns_dist=owns,
            tp=groups["tp"], ep=groups["ep"], replica=groups["replica"], leaders=groups.get("leaders"), world=groups["world"],
            node_of=tuple(sorted(set(nodes)).index(node) for node in nodes),
        )  # fmt: skip
        grid.world.barrier("create")
        return grid


def _join(
    meeting: Rendezvous, prefix: str, spec: GridSpec, device: torch.device, timeout_s: float, progress: Progress
) -> dict[str, Group]:
    """Connect all ranks; CollectiveError naming those that did not come."""
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


def _rank_sets(spec: GridSpec) -> Iterator[tuple[str, list[int]]]:
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


def _make_groups(spec: GridSpec, rank: int, timeout_s: float, progress: Progress) -> dict[str, Group]:
    """This rank's groups by name. Sets of ranks that coincide share one process group."""
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(spec.world)): dist.group.WORLD}
    groups: dict[str, Group] = {}
    for name, ranks in _rank_sets(spec):
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
