"""Balancing experts while steps run: a cycle sums loads, plans, and moves batch by batch; all ranks do the same at the same boundaries."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..topology import Ints, Topology
from .agreement import Agreement
from .audit import Audit
from .commit import forward
from .config import LiveConfig
from .cycle import Cycle
from .decision import Decision, Status, Verdict, Vote, decide
from .mover import Mover
from .planned import Counts, MakePlan, Planner, taken
from .points import Probe, unwatched
from .report import CycleReport, LiveStats, Outcome
from .state import ExpertState
from .tables import Tables
from .transport import Transport

log = logging.getLogger("rorqual")


class LiveBalancer:
    """One rank's part. ``boundary`` is called on every rank before every step that runs, and costs nothing between cycles."""

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
        agreement: Agreement,
        counts: Callable[[], Counts | Callable[[], Counts]],
        plan: MakePlan,
        tables: Tables,
        fault: Probe | None = None,
    ) -> None:
        """Collective over the expert group; makes all the memory that moving needs.

        Args:
            config: the same on all ranks.
            rank: of the expert group.
            topology: the slots of its ranks.
            n_experts: logical experts of a layer.
            slot_to_expert: [MoE layers, slots] what slots hold now, -1: nothing; the same on all ranks.
            states: declared tensors of this rank, one for each MoE layer.
            transport: moves bytes beside steps.
            agreement: carries votes from one boundary to the next.
            counts: called when a cycle begins: this rank's int64 [MoE layers, experts], or a function that the worker thread calls
                for it. All ranks' are summed.
            plan: (load float64 [MoE layers, experts], slots now) -> ``Plan``; called in the worker thread of the first rank. What it
                raises ends the cycle. A plan that leaves all slots as they are declines it.
            tables: where tokens go.
            fault: called at the moments of ``points.POINTS``; what it raises is an error there. For tests.

        Raises:
            ValueError: something cannot be, or differs between ranks.
        """
        self.mover = Mover(
            config=config, rank=rank, topology=topology, n_experts=n_experts, slot_to_expert=slot_to_expert, states=states,
            transport=transport, tables=tables, probe=fault or unwatched,
        )  # fmt: skip
        self.planner = Planner(
            rank=rank, n_experts=n_experts, staging=config.staging, max_sends=config.max_sends, transport=transport, make_plan=plan,
            probe=lambda point: self.mover.probe(point),
        )  # fmt: skip
        self.config, self.rank, self.agreement, self.counts = config, rank, agreement, counts
        self.cycle: Cycle | None = None
        self.off = ""  # why no cycle can begin any more
        self.serial = 1  # of the present or next phase
        self.last = Verdict.WAIT  # that ended the phase before
        self._audit = Audit(self.mover)
        self._cycles = 0
        self._boundaries = 0
        self._due = config.begins if config.interval else 0
        self._requested = self._posted = False

    @property
    def slot_to_expert(self) -> Ints:
        """[MoE layers, slots] as the next launched step must see it. Not to be changed."""
        return self.mover.slots

    @property
    def stats(self) -> LiveStats:
        """Counters since the start."""
        return self.mover.stats

    def request(self) -> None:
        """Begin a cycle at the next boundary at which none is under way. Called on all ranks between the same boundaries."""
        self._requested = True

    def boundary(self, step: int) -> CycleReport | None:
        """Before step ``step`` is launched, on the stream of steps: go on with the cycle under way, or begin one that is due.

        Returns:
            The report of a cycle that ended here.

        Raises:
            CommitError: this rank must end.
            CollectiveError: the agreement failed; nothing was changed.
        """
        self._boundaries += 1
        report = None
        if self._posted:
            report = self._go_on(step)
        elif self.cycle is None and self._is_due():
            self._begin(step)
        if self.cycle is not None or self.agreement.always:
            self.agreement.post(self._vote().words)
            self._posted = True
        return report

    def audit(self) -> list[str]:
        """Compare what all slots of all ranks hold: problems, [] if there are none; see ``Audit``. Collective, between two boundaries.

        Raises:
            RuntimeError: a cycle is under way.
        """
        if self.cycle is not None:
            raise RuntimeError(f"audit: cycle {self.cycle.number} of expert balancing is under way; wait for its end")
        return self._audit.run()

    def close(self) -> None:
        """Give up what is under way on this rank. Called on all ranks, before the process groups are left."""
        if self.cycle is not None:
            self.cycle.give_up()
        self.cycle = None
        self.mover.close()

    # ---- phases

    def _is_due(self) -> bool:
        if self.off:
            return False
        if self._requested:
            return True
        return self.config.interval > 0 and self._boundaries >= self._due

    def _begin(self, step: int) -> None:
        self._requested = False
        if self.config.interval:
            self._due = self._boundaries + self.config.interval
        self._cycles += 1
        mover = self.mover
        given_up = threading.Event()
        job = mover.worker.start(partial(self.planner.run, taken(self.counts), mover.slots, mover.topology, mover.members, given_up))
        self.cycle = Cycle(
            number=self._cycles, begun=step, boundary=self._boundaries, job=job, phase_boundary=self._boundaries,
            received=mover.stats.received, given_up=given_up,
        )  # fmt: skip

    def _go_on(self, step: int) -> CycleReport | None:
        self._posted = False
        table = self.agreement.collect()
        cycle = self.cycle
        if cycle is None:
            if self._is_due():
                self._begin(step)
            return None
        decision = forward(lambda: self._decide(table, cycle), self.mover.probe)
        if decision.verdict is Verdict.WAIT:
            if cycle.moving is not None:
                cycle.moving.gate.release(self.mover.pace.per_step)
            return None
        return self.apply(decision, step)

    def _decide(self, table: Any, cycle: Cycle) -> Decision:
        waited, patience = self._boundaries - cycle.phase_boundary, self.config.patience
        if cycle.moving is not None:
            patience += self.mover.pace.steps(len(cycle.moving.batch.rounds))
        left = self.config.max_steps - (self._boundaries - cycle.boundary)
        return decide(self.serial, table, waited=waited, patience=min(patience, waited + left), ranks=self.mover.members)

    def apply(self, decision: Decision, step: int) -> CycleReport | None:
        """End the present phase as decided, and begin the next one."""
        cycle = self.cycle
        assert cycle is not None
        self.serial += 1
        self.last = decision.verdict
        if decision.verdict is Verdict.STOP:
            return self._abort(cycle, decision, step)
        if cycle.moving is None:
            cycle.planned = cycle.job.result
            if not cycle.planned.batches:
                return self._end(cycle, Outcome.DECLINED, cycle.planned.reason or "the plan leaves all experts where they are", step)
        else:
            self.mover.commit(cycle.moving, step)
            cycle.layers.update(cycle.moving.batch.layers)
            cycle.moving = None
            cycle.batch += 1
        assert cycle.planned is not None
        if cycle.batch == len(cycle.planned.batches):
            return self._end(cycle, Outcome.ENDED, cycle.planned.reason, step)
        if self._boundaries - cycle.boundary >= self.config.max_steps:
            return self._end(cycle, Outcome.ABORTED, f"it has taken {self.config.max_steps} steps, the most (max_steps)", step)
        cycle.move(self.mover.start(cycle.planned.batches[cycle.batch]))
        assert cycle.moving is not None
        cycle.moving.gate.release(self.mover.pace.per_step)
        cycle.phase_boundary = self._boundaries
        return None

    def _abort(self, cycle: Cycle, decision: Decision, step: int) -> CycleReport:
        cycle.give_up()
        own = cycle.problems
        if own:
            log.warning("rank %d: cycle %d of expert balancing failed here: %s", self.rank, cycle.number, "; ".join(own))
        if decision.broken:
            self.off = f"cycle {cycle.number} {decision.reason}"
        reason = f"{decision.reason}: {own[0]}" if own else decision.reason
        if decision.broken:
            reason += "; a connection is lost, so no cycle begins again"
        return self._end(cycle, Outcome.ABORTED, reason, step)

    def _end(self, cycle: Cycle, outcome: Outcome, reason: str, step: int) -> CycleReport:
        stats = self.mover.stats
        boundaries, size = self._boundaries - cycle.boundary, self.mover.layout.expert_bytes
        report = cycle.report(outcome, reason, step, boundaries, received=stats.received - cycle.received, expert_bytes=size)
        self.cycle = None
        stats.count(report)
        if self.rank == self.mover.members[0]:
            (log.warning if outcome is Outcome.ABORTED else log.info)("%s", report.line())
        return report

    # ---- votes

    def _vote(self) -> Vote:
        status, detail = Status.IDLE, 0
        cycle = self.cycle
        if cycle is not None:
            try:
                status, detail = cycle.status(self.mover.preparer.waiting_for)
                self.mover.probe("vote")
            except Exception as error:
                cycle.voteless.append(f"no vote: {error}")
                status, detail = Status.FAILED, 0
        return Vote(serial=self.serial, status=status, detail=detail, last=self.last)
