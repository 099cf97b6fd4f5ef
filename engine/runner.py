"""Runs step plans on one rank: embed or receive, the layers of its stage, sample or send."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from ..attention.batch import AttentionBatch
from ..attention.kv.cache import KVCache
from ..parallel.grid import Grid
from ..parallel.pipeline import Pipe
from .eager_batch import eager_batch, shared_width
from .eplb.steps import ExpertSteps
from .exchange_watch import ExchangeWatch, Unwatched
from .graph_key import GraphKey
from .graphs import DecodeGraphs
from .head import Head, HeadJob, head_job
from .models.build import Stage
from .offload.mover import Mover
from .pending import PendingResult
from .plan import StepPlan
from .profile import StepTrace
from .results import NO_PROMPT_ROWS, Wanted, wanted
from .returns import Returns
from .runner_stats import RunnerStats
from .staging import Staging
from .step_ranges import StepRanges
from .streams import Streams
from .tables import DeviceTables


class Runner:
    """Model, cache and tables of one rank."""

    def __init__(
        self,
        *,
        grid: Grid,
        stage: Stage,
        cache: KVCache,
        tables: DeviceTables,
        dtype: torch.dtype,
        debug: bool,
        graphs: DecodeGraphs | None = None,
        mover: Mover | None = None,
        halves_from: int | None = None,
        watch: ExchangeWatch | Unwatched | None = None,
    ) -> None:
        self.grid = grid
        self.stage = stage
        self.cache = cache
        self.tables = tables
        self.dtype = dtype
        self.debug = debug
        self.graphs = graphs  # None: every step runs eagerly
        self.mover = mover  # None: all pages stay on the device
        self.halves_from = halves_from  # tokens of the busiest replica from which a step is cut in halves; None: never
        self.watch = watch or Unwatched()
        self.stats = RunnerStats()
        self.pipe = Pipe(grid.world)
        self.head = Head(stage.model, tables)
        self.returns = Returns(grid=grid, pipe=self.pipe, tables=tables, watch=self.watch, mover=mover)
        self.trace: StepTrace | StepRanges | None = None  # set while steps are profiled
        self.experts: ExpertSteps | None = None  # set where the load of experts is recorded or evened out between steps

    @property
    def staging(self) -> Staging:
        """How arrays get to the device."""
        return self.tables.staging

    @property
    def streams(self) -> Streams:
        """How results get to the host."""
        return self.tables.staging.streams

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture the graphs of all decode steps now. Collective where the model's steps are."""
        if self.graphs is not None:
            self.graphs.capture_all()

    @torch.inference_mode()
    def rehearse(self, plan: StepPlan) -> None:
        """Run the layers of a step that belongs to no request and samples nothing, to its end. Collective.

        Tables and the counters of steps stay; what it sends to other expert ranks counts.

        Raises:
            RuntimeError: an exchange of experts failed.
        """
        world, progress = self.grid.world, self.grid.progress
        progress.batch = plan.brief
        with self.watch.step(plan.step):
            self._run(plan, Wanted(samples=0, prompt=NO_PROMPT_ROWS, top=-1))
        with progress.waiting(world.name, "end of a step on padding", world.ranks):  # the watchdog's deadline covers it
            self.streams.settle()
            self.watch.ended(plan.step)

    # ---- one step

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingResult:
        """Run one step. Launches on the device and returns; only the pipeline's receives block."""
        self.grid.progress.step, self.grid.progress.batch = plan.step, plan.brief
        self.returns.absorb(plan.step - self.grid.spec.pp)
        key = self.graphs.key(plan) if self.graphs is not None and self.stage.capturable else None
        with self.watch.step(plan.step), self._traced(plan, key):
            if self.experts is not None:
                self.experts.before(plan)
            apart = key is None or not self._fits(plan, key)  # pages and moves are applied before the step, not by its graph
            if self.mover is not None:
                self.mover.before(plan, tables=apart)
            self.tables.apply(plan, pages=apart)
            if self.debug and len(plan.freed_pages):
                self.cache.poison(np.setdiff1d(plan.freed_pages, plan.imports[:, 0]))
            start = time.monotonic()
            if key is None:
                want = wanted(plan, self.tables)
                start = self._run(plan, want)
            else:
                want = self._replay(plan, key)
            if self.experts is not None:
                self.experts.after(plan)
            if self.mover is not None:
                self.mover.after(plan)
                if plan.offloaded and plan.n_samples and self.grid.is_leader:
                    self.mover.counts.watch(plan.step)
        self.stats.count(plan, start, graph_rows=None if key is None else key.batch)
        return PendingResult(self.returns.collect, plan.step, want)

    def before_sharing(self, plan: StepPlan) -> None:
        """Leader: what ``plan`` relies on is there for the other ranks, which get it now."""
        if self.mover is not None and self.mover.shared and plan.n_moves:
            world = self.grid.world
            with self.grid.progress.waiting(world.name, "copies to the host pool", world.ranks):
                self.mover.settle(plan.step)

    def _traced(self, plan: StepPlan, key: GraphKey | None) -> AbstractContextManager[None]:
        return nullcontext() if self.trace is None else self.trace.step(plan, key)

    def _fits(self, plan: StepPlan, key: GraphKey) -> bool:
        assert self.graphs is not None
        return self.graphs.fits(plan, key)

    def _replay(self, plan: StepPlan, key: GraphKey) -> Wanted:
        """Run a step of pure decode rows from its graph; what is more than the highest logit is sampled after it."""
        graphs, tables = self.graphs, self.tables
        assert graphs is not None
        if not self.debug and not len(plan.guided) and tables.sampling.host_plain[plan.slots].all():
            outputs = graphs.run(plan, key, None)
            if plan.n_rows:
                self.watch.launched(plan.step)
                self.returns.give_copy(plan, outputs.tokens)
            return Wanted(samples=plan.n_rows, prompt=NO_PROMPT_ROWS, top=-1)
        want = wanted(plan, tables)
        job = head_job(plan, want, tables)
        outputs = graphs.run(plan, key, job.rows)
        if want.anything:
            self.watch.launched(plan.step)
        found = outputs.arrays(job.rows)
        more = job.masked()
        if len(want.prompt):
            more |= {k: v for k, v in job.arrays(plan).items() if k.startswith("prompt")}
        if more:
            found |= self.staging.upload(more)
        self.returns.give(plan, *self.head.run(job, outputs.hidden, found, outputs.logits))
        return want

    def _run(self, plan: StepPlan, want: Wanted) -> float:
        """Run a step eagerly; returns when the model began."""
        last = self.grid.is_last_stage and want.anything
        job = head_job(plan, want, self.tables) if last else None
        arrays = {"slots": plan.slots.astype(np.int64), "starts": plan.starts.astype(np.int64)}
        found = self.staging.upload(arrays if job is None else arrays | job.arrays(plan))
        batch = eager_batch(
            plan, found["slots"], found["starts"], tables=self.tables, page_size=self.cache.page_size, static=self.stage.capturable,
            mover=self.mover, halves_from=self.halves_from,
        )  # fmt: skip
        x, topk = self._enter(plan, batch, found["slots"])
        start = time.monotonic()
        x, topk = self.stage.model(x, batch, self.cache, topk)
        self._leave(plan, want, batch, x, topk, job, found)
        return start

    def _enter(self, plan: StepPlan, batch: AttentionBatch, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Input of this stage: embedded tokens, or what the stage before sends."""
        if self.grid.is_first_stage:
            ids = self.tables.tokens[slots[batch.token_row], batch.positions]
            if self.debug and ids.numel() and int(ids.min()) < 0:
                raise RuntimeError(f"step {plan.step} reads a token that was never written")
            return self.stage.model.embed(ids.long()), None
        assert self.grid.prev_rank is not None
        if plan.n_tokens == 0:
            return torch.empty(0, self.stage.model.config.hidden, dtype=self.dtype, device=self.grid.device), None
        x = self.pipe.recv((plan.n_tokens, self.stage.model.config.hidden), self.dtype, self.grid.prev_rank, self.grid.device)
        width = shared_width(self.stage, batch, self.stage.layers.start)
        topk = self.pipe.recv((plan.n_tokens, width), torch.int64, self.grid.prev_rank, self.grid.device) if width else None
        return x, topk

    def _leave(
        self,
        plan: StepPlan,
        want: Wanted,
        batch: AttentionBatch,
        x: torch.Tensor,
        topk: torch.Tensor | None,
        job: HeadJob | None,
        found: dict[str, torch.Tensor],
    ) -> None:
        """Send to the next stage, or sample."""
        grid = self.grid
        if want.anything:
            self.watch.launched(plan.step)
        if grid.is_last_stage:
            if job is not None:
                self.returns.give(plan, *self.head.run(job, x, found))
            return
        assert grid.next_rank is not None
        self.pipe.send_async(x, grid.next_rank)
        if shared_width(self.stage, batch, self.stage.layers.stop):
            assert topk is not None
            self.pipe.send_async(topk, grid.next_rank)
        if grid.is_first_stage and want.anything:
            self.returns.expect(plan, want)

    @torch.inference_mode()
    def drain(self) -> None:
        """Take in everything still on its way from the last stage."""
        self.returns.drain()
