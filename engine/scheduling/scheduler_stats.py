"""What one scheduler has done so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .plan_builder import PlanBuilder, Row


@dataclass(kw_only=True)
class SchedulerStats:
    """Counters since the start."""

    preemptions: int = 0  # times a running request lost its pages
    cached_tokens: int = 0  # tokens taken from the prefix tree at admission
    queried_tokens: int = 0  # tokens of admitted requests, those included
    computed_tokens: int = 0  # tokens scheduled for computation
    evictions: int = 0  # pages dropped from the prefix tree to make room
    plans: int = 0  # plans made
    empty_plans: int = 0  # of these, without a row

    def count(self, builder: PlanBuilder, rows: Sequence[Row]) -> None:
        """A plan of ``rows`` was made by ``builder``."""
        self.plans += 1
        self.empty_plans += not rows
        self.computed_tokens += sum(row[2] for row in rows)
        self.cached_tokens += builder.cached_tokens
        self.queried_tokens += builder.queried_tokens
