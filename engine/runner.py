"""Runs step plans on one rank: embed or receive, the layers of its stage, sample or send."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from ..attention.batch import AttentionBatch
from ..attention.kv.cache import KVCache
from ..attention.mla import layer_has_indexer
from ..parallel.grid import Grid
from ..parallel.pipeline import Pipe
from .models.build import Stage
from .plan import StepPlan
from .results import HostCopy, StepResult, Wanted, pack_logprobs, wanted
from .sampling.logprobs import gather_logprobs
from .sampling.sampler import sample
from .tables import DeviceTables

#: rows of the vocabulary scored at once when a prompt's log-probabilities are wanted
SCORE_ROWS = 512
CPU = torch.device("cpu")


@dataclass(kw_only=True)
class RunnerStats:
    """Counters of one rank since the start."""

    steps: int = 0  # steps run
    idle_steps: int = 0  # steps run without tokens, because another replica had some
    tokens: int = 0  # tokens computed
    samples: int = 0  # tokens sampled
    busy_seconds: float = 0.0  # host time in model, sampler and transfers of this stage
    intervals: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=4096))  # (step, start, end), time.monotonic


class PendingResult:
    """The result of a launched step; ``wait`` gives it to the host."""

    def __init__(self, runner: Runner, step: int, wanted: Wanted) -> None:
        self.step = step
        self.wanted = wanted
        self._runner = runner

    def wait(self) -> StepResult:
        """The values, once they are on the host."""
        return self._runner.collect(self)


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
    ) -> None:
        self.grid = grid
        self.stage = stage
        self.cache = cache
        self.tables = tables
        self.dtype = dtype
        self.debug = debug
        self.stats = RunnerStats()
        self.pipe = Pipe(grid.world)
        self._awaited: deque[tuple[StepPlan, Wanted]] = deque()  # first stage: results still at the last stage
        self._ready: dict[int, tuple[HostCopy, HostCopy | None]] = {}  # leader: results on their way to the host

    # ---- one step

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingResult:
        """Run one step. Launches on the device and returns; only the pipeline's receives block."""
        self.grid.progress.step = plan.step
        self._absorb(plan.step - self.grid.spec.pp)
        self.tables.apply(plan)
        if self.debug and len(plan.freed_pages):
            self.cache.poison(plan.freed_pages)
        want = wanted(plan, self.tables)
        slots = torch.from_numpy(plan.slots.astype(np.int64)).to(self.grid.device)
        batch = AttentionBatch.build(plan.starts, plan.counts, self.tables.pages[slots], self.cache.page_size, self.grid.device)
        x, topk = self._enter(plan, batch, slots)
        start = time.monotonic()
        x, topk = self.stage.model(x, batch, self.cache, topk)
        self._leave(plan, want, batch, x, topk, slots)
        self._count(plan, start)
        return PendingResult(self, plan.step, want)

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
        width = self._shared_width(batch, self.stage.layers.start)
        topk = self.pipe.recv((plan.n_tokens, width), torch.int64, self.grid.prev_rank, self.grid.device) if width else None
        return x, topk

    def _shared_width(self, batch: AttentionBatch, layer: int) -> int:
        """Keys per token that cross into the stage starting at ``layer``: its first layer may share those of the one before."""
        config = self.stage.model.config.attention
        if config.indexer is None or layer_has_indexer(config, layer):
            return 0
        if self.stage.model.selection == "dense":  # an evaluation's choice: no layer selects, nothing is sent
            return 0
        return config.indexer.topk if batch.max_context > config.indexer.topk else 0

    def _leave(
        self, plan: StepPlan, want: Wanted, batch: AttentionBatch, x: torch.Tensor, topk: torch.Tensor | None, slots: torch.Tensor
    ) -> None:
        """Send to the next stage, or sample."""
        grid = self.grid
        if not grid.is_last_stage:
            assert grid.next_rank is not None
            self.pipe.send_async(x, grid.next_rank)
            if self._shared_width(batch, self.stage.layers.stop):
                assert topk is not None
                self.pipe.send_async(topk, grid.next_rank)
            if grid.is_first_stage and want.anything:
                self._awaited.append((plan, want))
            return
        if not want.anything:
            return
        tokens, table = self._sample(plan, want, x, slots)
        if grid.spec.pp > 1:
            # Over the host: on one NCCL channel, tokens going back and hidden states going forth could wait for each other.
            self.pipe.send_async(tokens.cpu(), grid.first_stage_peer)
            if table is not None:
                self.pipe.send_async(table.cpu(), grid.first_stage_peer)
        elif grid.is_leader:
            self._ready[plan.step] = (HostCopy(tokens), None if table is None else HostCopy(table))

    def _sample(self, plan: StepPlan, want: Wanted, x: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample the rows that end at their last token and score wanted prompt positions; writes the token table."""
        device, top = self.grid.device, want.top
        rows = np.flatnonzero(plan.samples)
        last = torch.from_numpy(np.cumsum(plan.counts)[rows] - 1).to(device)
        ends = torch.from_numpy((plan.starts + plan.counts)[rows].astype(np.int64)).to(device)
        picked = slots[torch.from_numpy(rows).to(device)]
        parts: list[torch.Tensor] = []
        tokens = torch.empty(0, dtype=torch.int64, device=device)
        if len(rows):
            logits = self.stage.model.logits(x[last])
            host_slots, longest = plan.slots[rows], int((plan.starts + plan.counts)[rows].max())
            tables = self.tables
            result = sample(logits, picked, ends, tables.sampling, tables.tokens, ends, host_slots=host_slots, max_length=longest)
            tokens = result.tokens
            tables.tokens[picked, ends] = tokens.to(torch.int32)
            if top >= 0:
                found = result.logprobs if result.logprobs is not None else gather_logprobs(logits, tokens, 0)
                parts.append(pack_logprobs(tokens, found, top))
        if len(want.prompt):
            parts.extend(self._score_prompt(want, x, slots))
        return tokens, torch.cat(parts) if top >= 0 else None

    def _score_prompt(self, want: Wanted, x: torch.Tensor, slots: torch.Tensor) -> list[torch.Tensor]:
        """Log-probability rows of prompt tokens, in blocks of positions."""
        where, row, position = (torch.from_numpy(a).to(x.device) for a in (want.prompt.token, want.prompt.row, want.prompt.position))
        target = self.tables.tokens[slots[row], position].long()
        parts = []
        for block in range(0, len(target), SCORE_ROWS):
            tokens = target[block : block + SCORE_ROWS]
            logits = self.stage.model.logits(x[where[block : block + SCORE_ROWS]])
            parts.append(pack_logprobs(tokens, gather_logprobs(logits, tokens, want.top), want.top))
        return parts

    # ---- results

    def _absorb(self, step: int) -> None:
        """First of several stages: take in the tokens that the last stage sampled up to ``step``."""
        while self._awaited and self._awaited[0][0].step <= step:
            plan, want = self._awaited.popleft()
            peer = self.grid.last_stage_peer
            tokens = self.pipe.recv((want.samples,), torch.int64, peer, CPU)
            shape = want.table_shape
            table = None if shape is None else self.pipe.recv(shape, torch.float64, peer, CPU)
            slots = torch.from_numpy(plan.slots[plan.samples].astype(np.int64)).to(self.grid.device)
            ends = torch.from_numpy((plan.starts + plan.counts)[plan.samples].astype(np.int64)).to(self.grid.device)
            self.tables.tokens[slots, ends] = tokens.to(self.grid.device, torch.int32)
            if self.grid.is_leader:
                self._ready[plan.step] = (HostCopy(tokens), None if table is None else HostCopy(table))

    @torch.inference_mode()
    def collect(self, pending: PendingResult) -> StepResult:
        """Values of a launched step on the host. Leader only."""
        self._absorb(pending.step)
        if pending.step not in self._ready:  # nothing was sampled
            return StepResult(step=pending.step, tokens=[], table=None)
        tokens, table = self._ready.pop(pending.step)
        world = self.grid.world
        with self.grid.progress.waiting(world.name, "result of the device", world.ranks):  # the watchdog's deadline covers it
            values: list[int] = tokens.wait().tolist()
            rows = None if table is None else table.wait().numpy()
        return StepResult(step=pending.step, tokens=values, table=rows)

    @torch.inference_mode()
    def drain(self) -> None:
        """Take in everything still on its way from the last stage."""
        while self._awaited:
            self._absorb(self._awaited[0][0].step)
        self.pipe.drain()
        self._ready.clear()

    def _count(self, plan: StepPlan, start: float) -> None:
        end = time.monotonic()
        stats = self.stats
        stats.steps += 1
        stats.idle_steps += int(plan.n_tokens == 0)
        stats.tokens += plan.n_tokens
        stats.samples += plan.n_samples
        stats.busy_seconds += end - start
        if plan.n_tokens:
            stats.intervals.append((plan.step, start, end))
