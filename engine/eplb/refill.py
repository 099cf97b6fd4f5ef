"""Shares of copies that follow the load: every so many steps this rank's tokens are dealt anew over the copies of experts.

Each rank levels its own recent tokens over all ranks by water filling. What is level from every rank is level in sum, so ranks
need not agree on anything, exchange nothing, and may be at different steps of this. Which copy answers changes no token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from ...moe.eplb.choice.water import WaterFill
from ...moe.eplb.live.worker import Job, Worker
from ...moe.eplb.load.window import LoadWindow
from ...moe.eplb.topology import Ints, Topology
from .tables import WaysWriter

log = logging.getLogger("rorqual")

#: intervals whose load counts: enough to be less than a batch's chance, few enough to follow
WINDOW = 4
_CLOSE_SECONDS = 30.0


class ShareRefill:
    """Fills and deals in a thread of its own, and writes between two steps, in the order of the steps."""

    def __init__(
        self,
        writer: WaysWriter,
        window: LoadWindow,
        fetch: Callable[[torch.Tensor], Callable[[], Ints]],
        topology: Topology,
        *,
        n_experts: int,
        interval: int,
    ) -> None:
        """
        Args:
            writer: of this rank's table.
            window: choices of this rank's recent steps, [MoE layers, experts].
            fetch: starts a tensor's way to the host; what it gives waits for it, in the thread.
            topology: of the slots.
            n_experts: logical experts of a layer.
            interval: steps from one refill to the next, at least.
        """
        self._writer, self._window, self._fetch, self._topology = writer, window, fetch, topology
        self._n_experts, self._interval = n_experts, interval
        self._worker = Worker("expert shares")
        self._job: Job | None = None
        self._writes = 0  # of moves that the job knows of
        self._steps, self._due = 0, interval
        self._water: tuple[Ints, WaterFill] | None = None  # for the slots that it was made for; the thread's
        self.refills = 0  # that were written
        self.off = ""  # why there are no more

    def after_step(self) -> None:
        """A step has been launched."""
        self._window.push()
        self._steps += 1

    def boundary(self, slots: Ints) -> None:
        """Before a step is launched, after moves: write what is ready, and begin anew when it is due. Waits for nothing.

        ``slots`` [MoE layers, slots]: what they hold in the next step.
        """
        if self._job is not None:
            if not self._job.done:
                return
            job, self._job = self._job, None
            self._take(job)
        if self.off or self._steps < self._due:
            return
        self._due, self._writes = self._steps + self._interval, self._writer.writes
        self._job = self._worker.start(partial(self._fill, slots.copy(), self._fetch(self._window.sum())))

    def close(self) -> None:
        """End the thread."""
        self._worker.close(_CLOSE_SECONDS)

    def _take(self, job: Job) -> None:
        if job.error is not None:
            self.off = f"{type(job.error).__name__}: {job.error}"
            log.warning("expert shares are not filled by load any more, the last ones stay: %s", self.off)
        elif job.result is not None and self._writer.writes == self._writes:  # else experts have moved since: it is of old slots
            self._writer.refill(job.result)
            self.refills += 1

    def _fill(self, slots: Ints, counts: Callable[[], Ints]) -> torch.Tensor | None:
        """In the thread: the ways of all layers, or None where no token was routed."""
        found = counts()
        if not found.any():
            return None
        if self._water is None or not np.array_equal(self._water[0], slots):
            self._water = slots, WaterFill(slots, self._n_experts, self._topology)
        return self._writer.deal(range(len(slots)), slots, shares=self._water[1].fill(found).split)
