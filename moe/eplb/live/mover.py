"""One rank's means of moving: its slots, buffers and thread, and the two phases of a batch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..topology import Ints, Topology
from ..validate import validate
from .changes import Batch
from .commit import Commit, copy_steps
from .config import LiveConfig
from .pace import Pace
from .points import Probe
from .prepare import LoadExpert, Prepared, Preparer
from .program import local_program
from .report import LiveStats
from .staging import Staging
from .state import ExpertState, agree_layouts
from .tables import Tables
from .transport import Transport
from .worker import Gate, Job, Worker


@dataclass(kw_only=True)
class Moving:
    """A batch in its first phase."""

    batch: Batch
    after: Ints  # [layers, slots] once it is committed
    gate: Gate
    job: Job  # of a ``Prepared``
    writes: bool  # whether tables are written at the commit


class Mover:
    """Starts and commits batches; decides nothing."""

    def __init__(
        self,
        *,
        config: LiveConfig,
        rank: int,
        topology: Topology,
        n_experts: int,
        slot_to_expert: Ints,
        states: Sequence[ExpertState],
        transport: Transport,
        tables: Tables,
        probe: Probe,
    ) -> None:
        """Collective over the ranks of ``transport``, which compare what they were given. All memory is made here.

        Raises:
            ValueError: the placement, the states or the budget cannot be, or ranks differ.
        """
        _check(rank, topology, n_experts, slot_to_expert, states, transport)
        self.layout = agree_layouts(states)
        self.pace = Pace.of(self.layout.buffer_bytes, config.bytes_per_step)
        self.config, self.rank, self.topology, self.n_experts = config, rank, topology, n_experts
        self.slots: Ints = slot_to_expert.copy()  # replaced by a new array at every commit
        self.states, self.transport, self.tables, self.probe = states, transport, tables, probe
        self.first, self.stop = (int(slot) for slot in topology.first_slot[rank : rank + 2])
        self.stats = LiveStats()
        self.worker = Worker(f"rorqual-experts-{rank}")
        self.lost: frozenset[int] = frozenset()  # ranks not to talk to
        _compare(self, config, slot_to_expert)
        self.staging = Staging(self.layout, config.staging, states[0].device, digests=config.compute_digests)
        self.preparer = Preparer(
            rank=rank, first_slot=self.first, states=states, staging=self.staging, pace=self.pace, transport=transport,
            tables=tables, probe=lambda point: self.probe(point),
        )  # fmt: skip

    @property
    def members(self) -> list[int]:
        """Ranks that take part, ascending."""
        return [rank for rank in range(self.topology.n_ranks) if rank not in self.lost]

    def start(self, batch: Batch, *, load_expert: LoadExpert | None = None, writes: bool = True) -> Moving:
        """Begin the first phase; nothing passes its gate yet. Waits for nobody. ``writes``: tables go with the commit."""
        after = self.slots.copy()
        for change in batch.changes:
            after[change.layer, change.slot] = change.expert
        gate = Gate()
        self.preparer.load_expert = load_expert
        job = self.worker.start(partial(self.preparer.run, batch, after if writes else None, gate, self.lost))
        return Moving(batch=batch, after=after, gate=gate, job=job, writes=writes)

    def commit(self, moving: Moving, step: int) -> None:
        """Second phase, on the current stream.

        Raises:
            CommitError: the rank must end.
        """
        found: Prepared = moving.job.result
        layers = moving.batch.layers

        def place() -> None:
            self.slots = moving.after

        program = local_program(moving.batch, self.slots, self.rank, self.first, self.stop, self.staging.spare)
        steps = [("commit-before", _nothing), *copy_steps(program, self.states, self.staging)]
        if moving.writes:
            steps.append(("commit-tables", partial(self.tables.write, layers, found.dealt)))
        steps.append(("commit-placed", place))
        Commit(steps=steps).run(self.probe)
        self.transport.committed()
        stats = self.stats
        stats.batches += 1
        stats.received += found.n_received
        stats.received_bytes += found.n_received * self.layout.expert_bytes
        stats.loaded += found.n_loaded
        stats.last_commit = step

    def close(self) -> None:
        """End the thread."""
        self.worker.close(1.0)
        self.transport.close()


def _nothing() -> None:
    """Before a commit nothing is to be done."""


def _check(rank: int, topology: Topology, n_experts: int, slots: Ints, states: Sequence[ExpertState], transport: Transport) -> None:
    problems = validate(slots, n_experts, topology, duplicates=False)
    if problems:
        raise ValueError(f"experts cannot be moved from this placement: {'; '.join(problems)}")
    if (rank, topology.n_ranks) != (transport.rank, transport.size):
        raise ValueError(
            f"rank {rank} of a topology of {topology.n_ranks} ranks was given the transport of rank {transport.rank} of {transport.size}"
        )
    if len(states) != len(slots):
        raise ValueError(f"{len(states)} layers have declared experts, the placement has {len(slots)}; give one state for each MoE layer")
    for state in states:
        if state.n_slots != topology.slots[rank]:
            raise ValueError(f"{state.where} has {state.n_slots} slots on rank {rank}, the topology {topology.slots[rank]}")


def _compare(mover: Mover, config: LiveConfig, slots: Ints) -> None:
    """ValueError, on every rank, if one has other settings, another placement or another layout of experts."""
    placement = f"checksum {zlib.crc32(slots.tobytes()):x}"
    texts = {
        "settings of expert balancing": repr(config),
        "placements of experts": placement,
        "declared tensors of experts": f"{mover.layout.describe()}, {len(mover.states)} layers",
    }
    mine = torch.tensor([zlib.crc32(text.encode()) for text in texts.values()], dtype=torch.int64)
    size, rank = mover.transport.size, mover.rank
    odd: dict[str, list[int]] = {name: [] for name in texts}
    for offset in range(1, size):  # to the end, so that no rank waits for one that has found a difference
        theirs, peer = torch.zeros_like(mine), (rank - offset) % size
        mover.transport.exchange((mine, (rank + offset) % size), (theirs, peer))
        for name, here, there in zip(texts, mine.tolist(), theirs.tolist(), strict=True):
            if here != there:
                odd[name].append(peer)
    found = [f"different {name} than ranks {sorted(peers)}: {texts[name]} here" for name, peers in odd.items() if peers]
    if found:
        raise ValueError(f"rank {rank} of the expert group has {'; '.join(found)}")
