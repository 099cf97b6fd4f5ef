"""After ranks are lost: the survivors settle what was under way, plan without them, and load what nobody has."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..plan import replica_counts
from ..topology import Ints, Topology
from .agreement import Table
from .balancer import LiveBalancer
from .decision import Decision, Verdict
from .planned import Planned
from .prepare import LoadExpert, Prepared
from .worker import Job

log = logging.getLogger("rorqual")

#: (slots now, with those of lost ranks empty, topology without them) -> slots [MoE layers, slots] with every expert
Replan = Callable[[Ints, Topology], Ints]


class RecoveryError(RuntimeError):
    """The survivors could not make every expert available again. The placement is whole, but lacks experts: the rank must end."""


@dataclass(frozen=True, kw_only=True)
class RecoveryReport:
    """What was done; the same on all survivors but for ``loaded_here``."""

    lost_ranks: tuple[int, ...]
    lost_experts: tuple[tuple[int, int], ...]  # (MoE layer, expert) that no survivor held
    loaded: tuple[tuple[int, int, int], ...]  # (MoE layer, expert, rank) that loaded it
    loaded_here: int  # experts that this rank loaded
    sent: int  # experts that survivors sent to each other
    batches: int
    seconds: float

    def line(self) -> str:
        """In one line."""
        what = f"{len(self.lost_experts)} experts were nowhere else and were loaded, {self.sent} were sent, in {self.batches} batches"
        return f"ranks {list(self.lost_ranks)} are lost: {what}, {self.seconds:.2f} s"


@dataclass(frozen=True, kw_only=True)
class _Fill:
    """A ``Plan`` as far as planning needs one."""

    slot_to_expert: Ints
    reason: str = "without lost ranks"


def keep_and_fill(slots: Ints, topology: Topology, n_experts: int) -> Ints:
    """The least change that makes every expert available: lost ones take empty slots, then slots of experts with most replicas.

    A pure function of its arguments, so it can be replayed. Ranks that hold least real experts are filled first.

    Raises:
        ValueError: fewer usable slots than experts.
    """
    usable = np.flatnonzero(topology.usable)
    if len(usable) < n_experts:
        raise ValueError(f"the {len(usable)} slots of the ranks that are left cannot hold {n_experts} experts")
    new = np.where(topology.usable, slots, -1)
    counts = replica_counts(new, n_experts)
    for layer, row in enumerate(new):
        for expert in np.flatnonzero(counts[layer] == 0):
            spare = np.where(row[usable] < 0, n_experts, counts[layer][row[usable]])  # an empty slot before any replica
            most = usable[spare == spare.max()]
            filled = [int((row[topology.rank_of_slot == topology.rank_of_slot[slot]] >= 0).sum()) for slot in most]
            slot = int(most[int(np.argmin(filled))])
            if row[slot] >= 0:
                counts[layer][row[slot]] -= 1
            row[slot] = expert
            counts[layer][expert] = 1
    return new


@dataclass(kw_only=True)
class Recovery:
    """One recovery on one rank. Steps stand still meanwhile."""

    balancer: LiveBalancer
    exchange: Callable[[Sequence[int]], Table]  # collective over the survivors, from the main thread: ``Members.exchange``
    replan: Replan
    load_expert: LoadExpert
    step: int  # before which it happens
    deadline_s: float = 120.0  # of every wait for this rank's thread

    def run(self, lost: Sequence[int]) -> RecoveryReport:
        """Collective over the survivors.

        Raises:
            RecoveryError: an expert could not be made available, on any rank.
            CommitError: as of ``LiveBalancer.boundary``.
        """
        start, mover = time.monotonic(), self.balancer.mover
        self._settle()
        mover.lost |= frozenset(lost)
        mover.topology = mover.topology.without(lost)
        mover.slots = np.where(mover.topology.usable, mover.slots, -1)
        counts = replica_counts(mover.slots, mover.n_experts)
        gone = tuple((int(layer), int(expert)) for layer, expert in np.argwhere(counts == 0))
        loaded_before = mover.stats.loaded
        planned = self._plan()
        for number, batch in enumerate(planned.batches):
            moving = mover.start(batch, load_expert=self.load_expert, writes=False)
            moving.gate.release(len(batch.rounds) * mover.pace.pieces)
            self._wait(moving.job)
            found: Prepared | None = moving.job.result
            bad = [str(moving.job.error)] if found is None else found.problems
            self._agree(bad, number, f"batch {number + 1} of {len(planned.batches)}")
            mover.commit(moving, self.step)
        mover.preparer.load_expert = None
        self._write_tables()
        moves = [move for batch in planned.batches for move in batch.transfers]
        loads = tuple((m.layer, m.expert, m.target) for batch in planned.batches for m in batch.loads)
        report = RecoveryReport(
            lost_ranks=tuple(sorted(lost)), lost_experts=gone, loaded=loads, loaded_here=mover.stats.loaded - loaded_before,
            sent=len(moves) - len(loads), batches=len(planned.batches), seconds=time.monotonic() - start,
        )  # fmt: skip
        log.warning("rank %d: %s", mover.rank, report.line())
        return report

    def _settle(self) -> None:
        """Make what survivors decided before the loss the decision of all, then give up the cycle under way.

        A lost rank may have told its vote to some only: these have committed, and the others, who are ready, must too. Pieces that
        some have released are released by all, so that no thread waits for bytes that do not come.
        """
        balancer = self.balancer
        rows = self._rows([balancer.serial, int(balancer.last)])
        most = max(row[0] for row in rows)
        if balancer.serial < most:  # by one: nobody goes on without this rank's vote
            verdict = Verdict(next(row[1] for row in rows if row[0] == most))
            self._finish_job()
            balancer.apply(Decision(verdict=verdict, reason="as decided by others before ranks were lost"), self.step)
        rows = self._rows([balancer.serial, self._released()])
        cycle = balancer.cycle
        if cycle is not None:
            if cycle.moving is not None:
                cycle.moving.gate.release(max(row[1] for row in rows) - self._released())
                cycle.moving.gate.shut()
            self._finish_job()
            balancer.apply(Decision(verdict=Verdict.STOP, reason="ranks were lost"), self.step)

    def _released(self) -> int:
        cycle = self.balancer.cycle
        return 0 if cycle is None or cycle.moving is None else cycle.moving.gate.released

    def _finish_job(self) -> None:
        if self.balancer.cycle is not None:
            self._wait(self.balancer.cycle.job)

    def _wait(self, job: Job) -> None:
        if not job.wait(time.monotonic() + self.deadline_s):
            raise RecoveryError(f"the thread that moves experts did not end its work within {self.deadline_s:g} s")

    def _rows(self, words: Sequence[int]) -> list[list[int]]:
        return [row for row in self.exchange(words) if row is not None]

    def _plan(self) -> Planned:
        mover, planner = self.balancer.mover, self.balancer.planner
        usual = planner.make_plan
        planner.make_plan = lambda load, now: _Fill(slot_to_expert=self.replan(now, mover.topology))
        zeros = np.zeros((len(mover.slots), mover.n_experts), dtype=np.int64)
        try:
            job = mover.worker.start(partial(planner.run, lambda: zeros, mover.slots, mover.topology, mover.members))
            self._wait(job)
        finally:
            planner.make_plan = usual
        planned: Planned | None = job.result
        self._agree([str(job.error)] if planned is None else planned.problems, 0 if planned is None else planned.digest, "planning")
        assert planned is not None
        return planned

    def _write_tables(self) -> None:
        """Of all layers, now that every expert has a slot: also those where nothing moved must forget the slots of lost ranks."""
        mover = self.balancer.mover
        layers = list(range(len(mover.slots)))
        problems = []
        try:
            dealt = mover.tables.deal(layers, mover.slots)
        except Exception as error:
            problems.append(f"tables were not made: {error}")
        self._agree(problems, 0, "tables")
        mover.tables.write(layers, dealt)

    def _agree(self, problems: Sequence[str], mark: int, what: str) -> None:
        """RecoveryError on all survivors if one has problems, or another ``mark``."""
        rows = self._rows([int(bool(problems)), mark])
        if len(rows) != len(self.balancer.mover.members):
            raise RecoveryError(f"{what}: another rank was lost during the recovery")
        if any(row[0] for row in rows):
            raise RecoveryError(f"{what}: {problems[0] if problems else 'it failed on another rank'}")
        if len({row[1] for row in rows}) > 1:
            raise RecoveryError(f"{what}: survivors are about to do different things")
