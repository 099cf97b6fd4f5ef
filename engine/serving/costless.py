"""An engine whose model costs nothing: its loop, scheduler, sockets and text are real, its tokens are arithmetic.

To measure what serving itself costs, and to test it: a token depends on all of its prompt and on its position, so that one
that was lost, doubled or given to somebody else shows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from ...parallel.grid import Grid, GridSpec
from ...parallel.mailbox import Mailbox
from ..driver import Driver
from ..leader import Leader
from ..pending import PendingResult
from ..plan import I32, INT_COLUMNS, StepPlan
from ..rank_row import rank_row
from ..results import NO_PROMPT_ROWS, StepResult, Wanted
from ..runner_stats import RunnerStats
from ..scheduling.scheduler import Scheduler, SchedulerConfig
from ..streams import Streams
from ..text.tokenizer import Tokenizer

_SLOT, _LENGTH, _PROMPT_LEN = (INT_COLUMNS.index(name) for name in ("slot", "length", "prompt_len"))
_PRIME = 1_000_003


def prompt_mark(prompt: Sequence[int] | I32) -> int:
    """What tells a prompt from others."""
    ids = np.asarray(prompt, dtype=np.int64)
    return int((ids * (np.arange(len(ids)) * 31 + 7)).sum() % _PRIME)


def expected(prompt: Sequence[int], n: int, vocab_size: int) -> list[int]:
    """The first ``n`` tokens of output after ``prompt``; none of them is below 3."""
    positions = np.arange(len(prompt), len(prompt) + n, dtype=np.int64)
    return _tokens(np.full(n, prompt_mark(prompt), np.int64), positions, vocab_size).tolist()  # type: ignore[no-any-return]


def _tokens(marks: Any, positions: Any, vocab_size: int) -> Any:
    return 3 + (marks * 7 + positions * 13 + (marks >> 3) * positions) % (vocab_size - 3)


def _next_allowed(token: int, mask: I32) -> int:
    """The first token from ``token`` on, or else from 0 on, that a grammar has there."""
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])


class CostlessRunner:
    """Runs plans in no time, or in ``step_seconds``."""

    def __init__(
        self, *, max_num_seqs: int, n_pages: int, page_size: int, vocab_size: int, step_seconds: float = 0.0, leads: bool = True
    ) -> None:
        """``leads``: somebody collects the results."""
        self.cache = SimpleNamespace(n_pages=n_pages, page_size=page_size, bytes_per_token=0)
        self.stats = RunnerStats()
        self.streams = Streams(torch.device("cpu"))
        self.mover = self.graphs = None
        self._leads = leads
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._marks = np.zeros(max_num_seqs, dtype=np.int64)  # of the prompt in every slot
        self._results: dict[int, list[int]] = {}

    def execute(self, plan: StepPlan) -> PendingResult:
        """Run one step."""
        start, at = time.monotonic(), 0
        if self._step_seconds and plan.n_rows:
            time.sleep(self._step_seconds)
        for row in plan.new_ints.tolist():
            self._marks[row[_SLOT]] = prompt_mark(plan.new_tokens[at : at + row[_PROMPT_LEN]])
            at += row[_LENGTH]
        slots, positions = plan.slots[plan.samples], (plan.starts + plan.counts)[plan.samples].astype(np.int64)
        tokens = _tokens(self._marks[slots], positions, self._vocab_size).tolist()
        for place, mask in zip(plan.guided.tolist(), plan.masks, strict=True):
            tokens[place] = _next_allowed(tokens[place], mask)
        if self._leads:
            self._results[plan.step] = tokens
        self.stats.count(plan, start, graph_rows=None)
        return PendingResult(self._collect, plan.step, Wanted(samples=plan.n_samples, prompt=NO_PROMPT_ROWS, top=-1))

    def _collect(self, pending: PendingResult) -> StepResult:
        return StepResult(step=pending.step, tokens=self._results.pop(pending.step), table=None)

    def before_sharing(self, plan: StepPlan) -> None:
        """Nothing is shared."""

    def drain(self) -> None:
        """Nothing is under way."""
        self._results.clear()


class CostlessEngine:
    """What ``serve`` needs of an engine, on one rank. Log-probabilities are not there."""

    def __init__(
        self,
        *,
        dp: int = 1,
        tp: int = 1,
        max_num_seqs: int = 256,
        max_model_len: int = 4096,
        page_size: int = 64,
        n_pages: int = 4096,
        max_num_batched_tokens: int = 8192,
        vocab_size: int = 4096,
        tokenizer: str | None = None,
        dist_timeout: float = 60.0,
        step_seconds: float = 0.0,
        debug: bool = False,
        overlap: bool = True,
    ) -> None:
        """``tokenizer``: its folder; ids in and ids out without."""
        self.grid = Grid.create(GridSpec(dp=dp, tp=tp), torch.device("cpu"), dist_timeout)
        self.folder = Path(tokenizer or "")
        self.tokenizer = None if tokenizer is None else Tokenizer.load(self.folder)
        self.max_model_len = max_model_len
        self.debug = debug
        self.experts = None
        self.config = SimpleNamespace(model="costless", dist_timeout=dist_timeout, disable_log_stats=True)
        self.model_config = SimpleNamespace(model_type="deepseek_v3", vocab_size=vocab_size, eos_token_ids=(1,))
        load = SimpleNamespace(moe_layers=list)
        self.stage: Any = SimpleNamespace(model=load, layers=range(1), dispatcher=None, load=None, placement=None)
        runner = CostlessRunner(
            max_num_seqs=max_num_seqs,
            n_pages=n_pages,
            page_size=page_size,
            vocab_size=vocab_size,
            step_seconds=step_seconds,
            leads=self.grid.is_leader,
        )
        self.runner: Any = cast(Any, runner)
        plans = Mailbox(self.grid.replica)
        self.leader: Leader | None = None
        if self.grid.is_leader:
            scheduler = Scheduler(
                SchedulerConfig(
                    max_num_seqs=max_num_seqs, page_size=page_size, n_pages=n_pages, max_model_len=max_model_len,
                    max_num_batched_tokens=max_num_batched_tokens, eos_token_ids=(1,), overlap=overlap,
                )
            )  # fmt: skip
            self.leader = Leader(
                grid=self.grid, scheduler=scheduler, runner=self.runner, tokenizer=self.tokenizer, plans=plans, vocab_size=vocab_size
            )
        self.driver = Driver(grid=self.grid, runner=self.runner, plans=plans, leader=self.leader, front=None, debug=debug)

    def tokenizer_folder(self) -> Path:
        """Where the tokenizer is."""
        return self.folder

    def rank_stats(self) -> dict[str, Any]:
        """This rank's counters."""
        return rank_row(self.grid, self.stage, self.runner, self.leader, None)

    def close(self) -> None:
        """Leave the job."""
        self.grid.close()
