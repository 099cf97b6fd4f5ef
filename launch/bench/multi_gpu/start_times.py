"""Seconds of the parts of an engine's start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

#: functions that ``engine.engine`` calls at the start -> what they do
_STEPS = {
    "build_stage": "memory for the weights", "fill_weights": "weights", "make_experts": "balance", "make_offload": "host pool and cache",
    "make_cache": "cache", "make_runner": "runner",
}  # fmt: skip
_GRAPHS = "graphs"


@contextmanager
def start_times() -> Iterator[dict[str, float]]:
    """What is filled while an engine is made within: seconds by part of its start, on this rank, waiting for others included."""
    from ....engine import engine as room
    from ....engine.runner import Runner

    found: dict[str, float] = {}

    def timed(what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(work)
        def run(*args: Any, **more: Any) -> Any:
            start = time.monotonic()
            try:
                return work(*args, **more)
            finally:
                found[what] = found.get(what, 0.0) + time.monotonic() - start

        return run

    before = {name: getattr(room, name) for name in _STEPS}
    capture = Runner.capture_graphs
    try:
        for name, work in before.items():
            setattr(room, name, timed(_STEPS[name], work))
        Runner.capture_graphs = timed(_GRAPHS, capture)  # type: ignore[method-assign]
        yield found
    finally:
        for name, work in before.items():
            setattr(room, name, work)
        Runner.capture_graphs = capture  # type: ignore[method-assign]
