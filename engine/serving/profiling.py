"""torch's profiler on one rank, for as long as somebody asks."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from ...parallel.grid import Grid
from ..models.build import Stage
from ..runner import Runner
from ..step_ranges import StepRanges

log = logging.getLogger("rorqual")

#: steps after which a profile that nobody stops ends by itself: traces take memory, and all of it is written at the end
MOST_STEPS = 200


class RankProfiler:
    """Writes ``rank<r>.json`` (Chrome's trace format) into a folder, with a range for every step and for the parts of the model.

    All ranks run the same steps, so that profiles that end by themselves do so at the same step everywhere.
    """

    def __init__(self, grid: Grid, runner: Runner, stage: Stage, folder: str | None) -> None:
        self._grid, self._runner, self._stage = grid, runner, stage
        self._folder = folder
        self._profiler: Any = None
        self._ended = False  # it ended by itself, and was not asked for yet
        self._left = 0  # steps until it ends by itself
        self._former: Any = None  # the runner's trace before this one

    def start(self, num_steps: int = MOST_STEPS) -> str:
        """Begin, for at most ``num_steps`` steps that run; the folder.

        Raises:
            ValueError: it runs already, there is no folder for it, or ``num_steps`` is out of range.
        """
        from torch.profiler import ProfilerActivity, profile, record_function

        if self._folder is None:
            raise ValueError("there is no folder for profiles; start the server with --profile-dir FOLDER")
        if self._profiler is not None:
            raise ValueError("the profiler runs already; stop it first")
        if not isinstance(num_steps, int) or not 1 <= num_steps <= MOST_STEPS:
            raise ValueError(f"num_steps must be a number from 1 to {MOST_STEPS}, found {num_steps!r}")
        os.makedirs(self._folder, exist_ok=True)
        on_cuda = [ProfilerActivity.CUDA] if self._grid.device.type == "cuda" else []
        profiler = profile(activities=[ProfilerActivity.CPU, *on_cuda])
        profiler.start()
        self._profiler, self._left = profiler, num_steps
        self._former, self._runner.trace = self._runner.trace, StepRanges(self._stage.model, record_function, self._count)
        return self._folder

    def _count(self) -> None:
        """A step has ended."""
        self._left -= 1
        if self._left == 0:
            self._write()

    def stop(self) -> str:
        """End and write the trace; the folder.

        Raises:
            ValueError: it does not run.
        """
        if self._folder is None or (self._profiler is None and not self._ended):
            raise ValueError("the profiler does not run; start it first")
        if self._profiler is not None:
            self._write()
        self._ended = False
        return self._folder

    def _write(self) -> None:
        assert self._folder is not None
        profiler, self._profiler, self._ended = self._profiler, None, True
        trace, self._runner.trace = self._runner.trace, self._former
        if isinstance(trace, StepRanges):
            trace.close()
        profiler.stop()
        path = Path(self._folder) / f"rank{self._grid.rank}.json"
        try:
            with tempfile.TemporaryDirectory(dir=self._folder, prefix=".") as beside:  # nobody reads half a trace
                whole = Path(beside) / path.name
                profiler.export_chrome_trace(str(whole))
                whole.replace(path)
        except OSError as error:
            log.warning("rank %d: the profile was not written to %s: %s", self._grid.rank, path, error)
