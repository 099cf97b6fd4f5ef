"""The rank grid: pipeline stages x data-parallel replicas x tensor-parallel ranks, and the groups made of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .attempts import earlier_prefixes, met_nobody, next_prefix
from .failure import CollectiveError
from .grid_spec import GridSpec
from .group import Group
from .join import join, meet
from .muster import Roll, decline, decline_attempts
from .progress import Progress
from .store import Rendezvous
from .watchdog import Watchdog

__all__ = ["Grid", "GridSpec"]


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
    hosts: tuple[str, ...] = ("",)  # label of every global rank's host
    node_ranks: range = range(1)  # global ranks of this rank's host
    watchdog: Watchdog | None = None  # None when alone
    before_close: list[Callable[[], None]] = field(default_factory=list, repr=False)  # what has to let go of the groups first
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
        with ExitStack() as ends:  # the last one first, each even if another fails
            ends.callback(self._leave_groups)
            for let_go in self.before_close:
                ends.callback(let_go)
            self.before_close.clear()
            if watchdog is not None:
                ends.callback(watchdog.stop)
                if not failed:
                    self._leave_together(watchdog)

    def _leave_groups(self) -> None:
        for group in (self.tp, self.ep, self.replica, self.leaders, self.world):
            if group is not None:
                group.close()
        if self._owns_dist:
            self._owns_dist = False
            dist.destroy_process_group()

    def _leave_together(self, watchdog: Watchdog) -> None:
        """Wait for all ranks. The first that is through closes its connections, which another may notice before the last bytes in them."""
        watchdog.leave()
        try:
            self.world.barrier("close")
        except CollectiveError:
            if not watchdog.all_leave():
                raise

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
    def create(
        cls,
        spec: GridSpec,
        device: torch.device,
        timeout_s: float,
        *,
        facts: Mapping[str, Any] | None = None,
        max_skew_s: float = float("inf"),
    ) -> Grid:
        """Join the job that torchrun's environment describes. Collective over all ranks when there are several.

        Args:
            spec: degrees, whose product is the number of ranks of the job.
            device: where tensors of this rank live.
            timeout_s: deadline of every collective, seconds.
            facts: what has to be the same on all ranks, by name; values that JSON has.
            max_skew_s: how far the clocks of hosts may be apart, seconds.

        Raises:
            ValueError: the job has another number of ranks than the grid, ranks differ, or the store cannot be reached.
            CollectiveError: ranks do not show up.
        """
        prefix = next_prefix()
        try:
            spec.validate(int(os.environ.get("WORLD_SIZE", "1")))
            if timeout_s <= 0:
                raise ValueError(f"the deadline of collectives must be more than 0 seconds, found {timeout_s}")
        except ValueError as error:
            decline(prefix, error)
            raise
        if spec.world == 1:
            return cls.single(device)
        meeting = Rendezvous.from_env(timeout_s)
        decline_attempts(meeting, earlier_prefixes(meeting.attempt))
        progress = Progress(rank=meeting.rank)
        watchdog = Watchdog(meeting, prefix, progress, deadline_s=timeout_s)
        watchdog.start()
        owns = not dist.is_initialized()
        try:
            roll = meet(meeting, prefix, facts or {}, timeout_s, max_skew_s, progress)
            watchdog.know_hosts(roll.hosts)
            groups = join(meeting, prefix, spec, device, timeout_s, progress, roll=roll, watchdog=watchdog)
        except BaseException:
            watchdog.stop()
            raise
        grid = cls(
            spec=spec, rank=meeting.rank, device=device, progress=progress, watchdog=watchdog, _owns_dist=owns, hosts=roll.hosts,
            tp=groups["tp"], ep=groups["ep"], replica=groups["replica"], leaders=groups.get("leaders"), world=groups["world"],
            node_of=_nodes_of_stage(spec, meeting.rank, roll), node_ranks=roll.node_ranks[meeting.rank],
        )  # fmt: skip
        grid.world.barrier("create")
        return grid

    @staticmethod
    @contextmanager
    def declining() -> Iterator[None]:
        """Around what a rank does before ``create``: a user's error inside reaches the ranks that wait there, and goes on."""
        try:
            yield
        except (ValueError, OSError) as error:
            decline(next_prefix(), error)
            raise

    @staticmethod
    def decline_unmet(error: Exception) -> None:
        """This process ends with ``error``: if it has met nobody yet, tell the ranks that wait for it. Never raises."""
        if met_nobody():
            decline(next_prefix(), error)


def _nodes_of_stage(spec: GridSpec, rank: int, roll: Roll) -> tuple[int, ...]:
    """Node of every EP rank of the stage of ``rank``, numbered from 0."""
    size = spec.dp * spec.tp
    first = rank // size * size
    if spec.ranks_per_node:
        nodes = [other // spec.ranks_per_node for other in range(first, first + size)]
    else:
        nodes = [here.start for here in roll.node_ranks[first : first + size]]
    return tuple(sorted(set(nodes)).index(node) for node in nodes)
