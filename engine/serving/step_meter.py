"""Steps of one replica in numbers, counted by its leader as it launches them."""

from __future__ import annotations

import time
from typing import Any

from ..plan import StepPlan
from .histogram import STEP, STEP_TOKENS, Histogram


class StepMeter:
    """Counters since the start. A few microseconds a step."""

    def __init__(self) -> None:
        self.steps = 0  # that ran on the device, because some replica had tokens
        self.idle_steps = 0  # of these, without tokens of this replica
        self.prefill_tokens = self.decode_tokens = 0  # computed
        self.busiest_tokens = 0  # of the busiest replica, summed over the steps: all others waited for it
        self.seconds = Histogram(STEP)  # from one launch to the next, where nothing came in between
        self.tokens = Histogram(STEP_TOKENS)
        self._last: float | None = None  # when the step before was launched

    def launched(self, plan: StepPlan) -> None:
        """The plan of this tick, whose ``dp_tokens`` are agreed; if no replica has tokens, nothing is launched."""
        if not plan.dp_tokens.any():
            self._last = None
            return
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.add(now - self._last)
        self._last = now
        n = plan.n_tokens
        self.steps += 1
        self.idle_steps += not n
        self.tokens.add(n)
        self.busiest_tokens += int(plan.dp_tokens.max())
        decodes = int(((plan.counts == 1) & plan.samples).sum()) if n else 0
        self.decode_tokens += decodes
        self.prefill_tokens += n - decodes

    def read(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "steps": self.steps,
            "idle_steps": self.idle_steps,
            "prefill_tokens": self.prefill_tokens,
            "decode_tokens": self.decode_tokens,
            "computed_tokens": self.prefill_tokens + self.decode_tokens,  # of the steps above: the scheduler is one ahead
            "busiest_tokens": self.busiest_tokens,
            "step_seconds": self.seconds.to_wire(),
            "step_tokens": self.tokens.to_wire(),
        }
