"""A launched step whose results are not on the host yet."""

from __future__ import annotations

from collections.abc import Callable

from .results import StepResult, Wanted


class PendingResult:
    """The result of a launched step; ``wait`` gives it to the host."""

    def __init__(self, collect: Callable[[PendingResult], StepResult], step: int, wanted: Wanted) -> None:
        self.step = step
        self.wanted = wanted
        self._collect = collect

    def wait(self) -> StepResult:
        """The values, once they are on the host."""
        return self._collect(self)
