"""Collects what a step does and makes the arrays of its plan."""

from __future__ import annotations

import numpy as np

from ..plan import FLOAT_COLUMNS, INT_COLUMNS, StepPlan
from ..sampling.bias_table import bias_rows
from ..sampling.noise import request_seed
from ..sampling.sampler_table import ban_rows, param_floats, param_ints
from .scheduler_config import SchedulerConfig
from .seat import Seat

#: a step that does not come
NEVER = 1 << 62
#: seat, first position, positions, samples
Row = tuple[Seat, int, int, bool]


class PlanBuilder:
    """Rows, page assignments and entering requests of one step."""

    def __init__(self, step: int, config: SchedulerConfig) -> None:
        self.step = step
        self.cached_tokens = 0  # positions that entering requests take from the prefix tree
        self.queried_tokens = 0  # positions that they have
        self._config = config
        self._decodes: list[Row] = []
        self._prefills: list[Row] = []
        self._pages: list[tuple[int, int, int]] = []
        self._entering: list[Seat] = []

    def enter(self, seat: Seat) -> None:
        """``seat`` is new: its tokens, parameters and all its pages go to the device."""
        self._entering.append(seat)
        self.cached_tokens += seat.computed
        self.queried_tokens += seat.total
        self._pages.extend((seat.slot, index, page) for index, page in enumerate(seat.pages))

    def assign(self, seat: Seat, pages: list[int]) -> None:
        """Append ``pages`` to the page table of ``seat``."""
        first = len(seat.pages)
        seat.pages.extend(pages)
        self._pages.extend((seat.slot, first + i, page) for i, page in enumerate(pages))

    def add(self, seat: Seat, count: int, *, decode: bool) -> None:
        """A row: the next ``count`` positions of ``seat``. The seat and its request move on."""
        start, request = seat.computed, seat.request
        seat.computed = request.computed = start + count
        seat.last_step = request.last_step = self.step
        samples = seat.computed == seat.total
        if samples:
            seat.total += 1
            request.n_launched += 1
            # A grammar tells what may come next only once the token before is known: see Scheduler._append.
            seat.ready_step = NEVER if seat.guided else self.step + self._config.pp
        (self._decodes if decode else self._prefills).append((seat, start, count, samples))

    def several(self) -> list[tuple[int, bool]]:
        """Rows of several tokens, and whether each samples."""
        first = len(self._decodes)
        return [(first + i, row[3]) for i, row in enumerate(self._prefills) if row[2] > 1]

    def rows(self) -> list[Row]:
        """Rows of the plan in order."""
        return self._decodes + self._prefills

    def build(self, freed: list[int]) -> StepPlan:
        """The plan. ``freed``: pages that became free since the last one."""
        rows = self.rows()
        plan = StepPlan(step=self.step)
        if rows:
            plan.slots = np.array([row[0].slot for row in rows], dtype=np.int32)
            plan.starts = np.array([row[1] for row in rows], dtype=np.int32)
            plan.counts = np.array([row[2] for row in rows], dtype=np.int32)
            plan.samples = np.array([row[3] for row in rows], dtype=np.bool_)
        if self._pages:
            plan.pages = np.array(self._pages, dtype=np.int32)
        if self._entering:
            self._fill_entering(plan)
        if freed:
            plan.freed_pages = np.array(freed, dtype=np.int32)
        return plan

    def _fill_entering(self, plan: StepPlan) -> None:
        ints, floats, bans, biases = [], [], [], []
        for seat in self._entering:
            request, slot = seat.request, seat.slot
            assert seat.tokens is not None
            prompt = len(request.prompt_ids)
            seed = request_seed(request.params.seed, self._config.seed, request.index, 0)
            ints.append(param_ints(request.params, slot=slot, length=len(seat.tokens), prompt_len=prompt, seed=seed))
            floats.append(param_floats(request.params))
            biases.extend(bias_rows(slot, request.params))
            if not seat.guided:  # with a grammar, its masks keep the minimum length
                bans.extend(ban_rows(slot, prompt, request.params, self._config.eos_token_ids))
        plan.new_ints = np.array(ints, dtype=np.int64).reshape(-1, len(INT_COLUMNS))
        plan.new_floats = np.array(floats, dtype=np.float64).reshape(-1, len(FLOAT_COLUMNS))
        plan.new_bans = np.array(bans, dtype=np.int64).reshape(-1, 3)
        plan.new_biases = np.array(biases, dtype=np.float64).reshape(-1, 3)
        plan.new_tokens = np.concatenate([seat.tokens for seat in self._entering if seat.tokens is not None])
