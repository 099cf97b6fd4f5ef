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
    busy_seconds: float = 0.0  # host time in model, sampler and transfers of this stage
    intervals: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=4096))  # (step, start, end), time.monotonic

    def count(self, plan: StepPlan, start: float, *, from_graph: bool) -> None:
        """The step ``plan``, begun at ``start``, has been launched."""
        end, tokens = time.monotonic(), plan.n_tokens
        self.steps += 1
        self.idle_steps += tokens == 0
        self.graph_steps += from_graph
        self.tokens += tokens
        self.samples += plan.n_samples
        self.busy_seconds += end - start
        if tokens:
            self.intervals.append((plan.step, start, end))
