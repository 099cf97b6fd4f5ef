"""The way of a step's results from the ranks that sample to the host of the leader, over the pipeline where there is one."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from ..parallel.grid import Grid
from ..parallel.pipeline import Pipe
from .exchange_watch import ExchangeWatch, Unwatched
from .offload.mover import Mover
from .pending import PendingResult
from .plan import StepPlan
from .results import StepResult, Wanted
from .streams import HostCopy
from .tables import DeviceTables

CPU = torch.device("cpu")


class Returns:
    """One for each rank. With several stages the last one gives results to the first, which also puts the tokens into its tables."""

    def __init__(self, *, grid: Grid, pipe: Pipe, tables: DeviceTables, watch: ExchangeWatch | Unwatched, mover: Mover | None) -> None:
        """``watch`` and ``mover`` confirm a step before its results are used."""
        self._grid, self._pipe, self._tables = grid, pipe, tables
        self._watch, self._mover = watch, mover
        self._awaited: deque[tuple[StepPlan, Wanted]] = deque()  # first stage: results still at the last stage
        self._ready: dict[int, tuple[HostCopy, HostCopy | None]] = {}  # leader: results on their way to the host

    def give(self, plan: StepPlan, tokens: torch.Tensor, table: torch.Tensor | None) -> None:
        """Last stage: a step's tokens int64 [n] and logprob table (``Wanted.table_shape``) start on their way."""
        if self._grid.spec.pp > 1:
            self._watch.confirm(plan.step)
            # Over the host: on one NCCL channel, tokens going back and hidden states going forth could wait for each other.
            for copy in self._download(tokens, table):
                if copy is not None:
                    self._pipe.send_async(copy.wait(), self._grid.first_stage_peer)
        elif self._grid.is_leader:
            self._ready[plan.step] = self._download(tokens, table)

    def give_copy(self, plan: StepPlan, tokens: HostCopy) -> None:
        """The same for tokens [n] that a graph brings to the host itself; one stage only."""
        if self._grid.is_leader:
            self._ready[plan.step] = (tokens, None)

    def expect(self, plan: StepPlan, want: Wanted) -> None:
        """First of several stages: the last one will give what ``want`` says."""
        self._awaited.append((plan, want))

    def absorb(self, step: int) -> None:
        """First of several stages: take in the tokens that the last stage sampled up to ``step``."""
        while self._awaited and self._awaited[0][0].step <= step:
            self._receive(*self._awaited.popleft())

    def _receive(self, plan: StepPlan, want: Wanted) -> None:
        peer, tables = self._grid.last_stage_peer, self._tables
        tokens = self._pipe.recv((want.samples,), torch.int64, peer, CPU)
        shape = want.table_shape
        table = None if shape is None else self._pipe.recv(shape, torch.float64, peer, CPU)
        ends = (plan.starts + plan.counts)[plan.samples].astype(np.int64)
        slots = plan.slots[plan.samples].astype(np.int64)
        found = tables.staging.upload({"slots": slots, "ends": ends, "tokens": tokens.numpy().astype(np.int32)})
        tables.tokens[found["slots"], found["ends"]] = found["tokens"]
        if self._grid.is_leader:
            self._ready[plan.step] = self._download(tokens, table)

    def _download(self, tokens: torch.Tensor, table: torch.Tensor | None) -> tuple[HostCopy, HostCopy | None]:
        streams = self._tables.staging.streams
        return streams.download(tokens), None if table is None else streams.download(table)

    @torch.inference_mode()
    def collect(self, pending: PendingResult) -> StepResult:
        """Values of a launched step on the host; waits for them. Leader only.

        Raises:
            RuntimeError: an exchange of the step failed, so that they are not to be used.
        """
        self.absorb(pending.step)
        if pending.step not in self._ready:  # nothing was sampled
            return StepResult(step=pending.step, tokens=[], table=None)
        tokens, table = self._ready.pop(pending.step)
        world = self._grid.world
        with self._grid.progress.waiting(world.name, "result of the device", world.ranks):  # the watchdog's deadline covers it
            values: list[int] = tokens.wait().tolist()
            rows = None if table is None else table.wait().numpy()
            self._watch.confirm(pending.step)
            if self._mover is not None:
                self._mover.counts.confirm(pending.step)
        return StepResult(step=pending.step, tokens=values, table=rows)

    def drain(self) -> None:
        """Take in everything still on its way, and forget what nobody asked for."""
        while self._awaited:
            self._receive(*self._awaited.popleft())
        self._pipe.drain()
        self._ready.clear()
