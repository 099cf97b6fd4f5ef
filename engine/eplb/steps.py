"""What is done for the experts before and after every step that runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ...moe.eplb.live.balancer import LiveBalancer
from ...moe.eplb.live.report import CycleReport
from ...moe.eplb.load.recorder import LoadRecorder
from ...moe.eplb.topology import Ints
from ...moe.placement import Placement
from ...parallel.group import Group
from ..plan import StepPlan
from .planning import Planner
from .refill import ShareRefill
from .tables import WaysWriter

log = logging.getLogger("rorqual")


class ExpertSteps:
    """Records the load and lets experts move at the boundaries between steps. All ranks of the EP group run the same steps.

    Nothing here waits for the device, nor, outside of a cycle of moves, for another rank.
    """

    def __init__(
        self,
        *,
        recorder: LoadRecorder,
        live: LiveBalancer | None,
        planner: Planner | None,
        writer: WaysWriter | None,
        ep: Group,
        counts_tokens: bool,
        slots: Ints | None = None,
        refill: ShareRefill | None = None,
        stage: str = "",
    ) -> None:
        """
        Args:
            recorder: of this rank.
            live: what moves experts; None: they stay, and there is no ``planner``.
            planner: what the first EP rank plans by.
            writer: of the tables that tokens follow.
            ep: ranks that the experts are on.
            counts_tokens: this rank answers for its replica's tokens.
            slots: [MoE layers, slots] what they hold at the start.
            refill: what fills the shares of copies by load; None: they are even.
            stage: what the names of files get before their ending, so that stages of a pipeline write files of their own.
        """
        self.recorder, self.live, self.planner, self.writer = recorder, live, planner, writer
        self._ep, self._counts_tokens, self._stage = ep, counts_tokens, stage
        self._slots, self.refill = slots, refill
        self.steps = 0  # that ran
        self._writes = self._changed_at = 0  # of the tables; steps that had run at the last one
        self.last: CycleReport | None = None

    def before(self, plan: StepPlan) -> None:
        """The step ``plan`` is about to be launched: experts may change places, and tables with them.

        Raises:
            CommitError: this rank could not take new places that others take: it has to end.
        """
        if self.live is not None and self.writer is not None:
            self._move(self.live, self.writer, plan)
        slots = self._slots if self.live is None else self.live.slot_to_expert
        if self.refill is not None and slots is not None:
            self.refill.boundary(slots)

    def _move(self, live: LiveBalancer, writer: WaysWriter, plan: StepPlan) -> None:
        report = live.boundary(plan.step)
        if writer.writes != self._writes:
            self._writes, self._changed_at = writer.writes, self.steps
        if report is not None:
            self.last = report

    def after(self, plan: StepPlan) -> None:
        """The step ``plan`` has been launched."""
        self.steps += 1
        if self.refill is not None:
            self.refill.after_step()
        self.recorder.after_step(plan.step, tokens=plan.n_tokens if self._counts_tokens else 0, phase=phase_of(plan))

    def placement(self, start: Placement) -> Placement:
        """Where experts are now; ``start``: where they began."""
        if self.live is None:
            return start
        return start.replaced(self.recorder.layer_ids, self.live.slot_to_expert)

    def dump(self, path: str | Path) -> None:
        """Write what was recorded, summed over the EP ranks; the first of them writes. Collective over them.

        Raises:
            ValueError: nothing was recorded, or the ending of ``path`` names no format.
        """
        from ...moe.eplb.formats.recorded import dump

        path = Path(path)
        path = path.with_name(f"{path.stem}{self._stage}{path.suffix}")
        dump(self.recorder, path, self._ep, slot_to_expert=None if self.live is None else self.live.slot_to_expert)

    def stats(self) -> dict[str, Any]:
        """Counters of this rank, for reports."""
        found: dict[str, Any] = {"layers": self.recorder.n_layers, "window_steps": self.recorder.window_steps}
        if self.refill is not None:
            found["refills"] = self.refill.refills
        if self.live is None:
            return found
        moved = self.live.stats
        found["cycles"] = dict(moved.cycles)  # by how they ended
        found["age_steps"] = self.steps - self._changed_at  # of the placement
        found |= {"experts_received": moved.received, "bytes_received": moved.received_bytes}
        if self.last is not None:
            found["last"] = self.last.line()
        if self.planner is not None and self.planner.last is not None:
            found["load"] = vars(self.planner.last)
        return found

    def finish(self, path: str | None) -> None:
        """The engine closes: write what was recorded to ``path``, if one is named, and end what is under way. Collective."""
        try:
            if path is not None:
                self.dump(path)
        except (ValueError, OSError) as error:  # on all ranks: nothing has run; on the one that writes: there is no place for the file
            if self._ep.index == 0 or isinstance(error, OSError):
                log.warning("expert_distribution_dump %s was not written: %s", path, error)
        finally:
            self.close()

    def close(self) -> None:
        """End what is under way, in good order; nothing the second time."""
        if self.refill is not None:
            self.refill.close()
        if self.live is not None:
            self.live.close()


def phase_of(plan: StepPlan) -> str:
    """What kind of rows this replica's step has."""
    if not plan.n_rows:
        return "mixed"
    decode = (plan.counts == 1) & plan.samples
    return "decode" if decode.all() else "mixed" if decode.any() else "prefill"
