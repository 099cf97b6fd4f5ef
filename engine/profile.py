"""Traces a few decode steps of a running engine, to say where their time goes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from .graph_key import NOT_DECODE, GraphKey
from .plan import StepPlan
from .ranges import ranges
from .streams import Streams
from .trace import STEP, Attribution, Event, StepProfile, analyse, works


class StepTrace:
    """Traces ``steps`` decode steps of at least ``wait`` tokens over all replicas, after ``skip`` of them.

    Set it as ``Runner.trace`` on every rank, so that all keep step.

    The kernels of a graph carry no ranges: which part they belong to is learnt from ``rehearse(key)``, which launches the
    work of that graph one by one.
    """

    def __init__(
        self,
        model: nn.Module,
        streams: Streams,
        rehearse: Callable[[GraphKey], None] | None,
        *,
        skip: int = 4,
        steps: int = 8,
        wait: int = 1,
    ) -> None:
        self._model, self._streams, self._rehearse = model, streams, rehearse
        self._wait = wait
        self._skip, self._last = skip, skip + steps + 1  # the step after the last one bounds it
        self._seen = 0
        self._keys: list[GraphKey | None] = []
        self._attribution: Attribution | None = None
        self._profiler: Any = None
        self._open = ExitStack()
        self._result: StepProfile | None = None

    @contextmanager
    def step(self, plan: StepPlan, key: GraphKey | None) -> Iterator[None]:
        """Around everything that a step launches."""
        decode = len(plan.dp_context) > 0 and plan.dp_context.min() != NOT_DECODE and int(plan.dp_tokens.sum()) >= self._wait
        if not decode and self._profiler is not None:
            self._stop()  # a prompt came in between: what there is must do
        if decode and self._seen == self._skip:
            self._start(key)
        self._seen += decode
        if self._profiler is None:
            yield
            return
        self._keys.append(key)
        with record_function(STEP):
            yield
        if self._seen == self._last:
            self._stop()

    def result(self) -> StepProfile | None:
        """The profile; None when too few steps were traced, or the device shows no kernels to the profiler."""
        if self._profiler is not None:
            self._stop()
        return self._result

    def _start(self, key: GraphKey | None) -> None:
        if key is not None and self._rehearse is not None:
            self._streams.settle()
            self._profiler = _started()
            with ranges(self._model), record_function(STEP):
                self._rehearse(key)
            self._attribution = Attribution([w for w in works(self._end()) if not w.name.startswith("Memcpy HtoD")])
        else:
            self._open.enter_context(ranges(self._model))
        self._profiler = _started()

    def _end(self) -> list[Event]:
        """Stop the profiler: its events."""
        self._streams.settle()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return events

    def _stop(self) -> None:
        events = self._end()
        self._open.close()
        self._seen = self._last
        self._result = analyse(events, [key is not None for key in self._keys], self._attribution)


def _started() -> profile:
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    profiler.start()
    return profiler
