"""What one rank has run so far."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from .plan import StepPlan


@dataclass(kw_only=True)
class RunnerStats:
    """Counters of one rank since the start."""

    steps: int = 0  # steps run
    idle_steps: int = 0  # steps run without tokens, because another replica had some
    tokens: int = 0  # tokens computed
    samples: int = 0  # tokens sampled
    graph_steps: int = 0  # of the steps, those replayed from a captured graph
    padding_tokens: int = 0  # rows that a graph computes beyond those that are scheduled
    busy_seconds: float = 0.0  # host time in model, sampler and transfers of this stage
    intervals: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=4096))  # (step, start, end), time.monotonic

    def count(self, plan: StepPlan, start: float, *, graph_rows: int | None) -> None:
        """The step ``plan``, begun at ``start``, has been launched; ``graph_rows``: of the graph it was replayed from, if it was."""
        end, tokens = time.monotonic(), plan.n_tokens
        self.steps += 1
        self.idle_steps += tokens == 0
        if graph_rows is not None:
            self.graph_steps += 1
            self.padding_tokens += graph_rows - tokens
        self.tokens += tokens
        self.samples += plan.n_samples
        self.busy_seconds += end - start
        if tokens:
            self.intervals.append((plan.step, start, end))
