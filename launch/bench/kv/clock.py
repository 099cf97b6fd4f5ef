"""The rig's steps, timed; and what they give, compared."""

from __future__ import annotations

import time

import torch

from .rig import Rig
from .ways import Timing, Way

#: ways whose attention is one call over the same rows as all-resident's
_EXACT: tuple[Way, ...] = ("resident", "resolve", "serial", "beside", "parts")


def measure(rig: Rig, way: Way, *, warm_up: int = 12, steps: int = 24, cold: bool = False) -> Timing:
    """Time ``steps`` steps after a warm-up in which the hot buffers fill; ``cold``: they are empty before every step.

    Choices change from step to step, outside the time measured.
    """
    rig.run(way)
    rig.restart()
    before = rig.memory.counters.clone()
    marks = []
    for step in range(warm_up + steps):
        if step == warm_up:
            before = rig.memory.counters.clone()
        rig.advance()
        if cold:
            rig.memory.hot_positions.fill_(-1)
        mark = _Mark(rig.device)
        rig.run(way)
        mark.end()
        marks.append(mark)
    times = tuple(mark.us() for mark in marks[warm_up:])
    return Timing(way=way, step_us=times, counters=(rig.memory.counters - before).cpu())


def check(rig: Rig, way: Way, *, steps: int = 3) -> None:
    """Compare what every layer attends with what it attends when all rows are on the device, over some steps.

    Bit by bit, but for the ways that attend fewer requests or rows at a time ("halves", "hits"): there up to rounding.

    Raises:
        AssertionError: a layer differs.
    """
    rig.restart()
    for _ in range(steps):
        rig.advance()
        wanted: list[torch.Tensor] = []
        found: list[torch.Tensor] = []
        rig.step("resident", wanted.append)
        rig.step(way, found.append)
        for layer, (a, b) in enumerate(zip(wanted, found, strict=True)):
            same = torch.equal(a, b) if way in _EXACT else torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2e-3)
            assert same, f"layer {layer}: attention over fetched rows ({way}) differs from all-resident"


class _Mark:
    """A span of time on a device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self.events[0].record()
        else:
            self.start = time.perf_counter()

    def end(self) -> None:
        """The span ends here."""
        if self.cuda:
            self.events[1].record()
        else:
            self.span = 1e6 * (time.perf_counter() - self.start)

    def us(self) -> float:
        """Microseconds; waits for them to have passed."""
        if not self.cuda:
            return self.span
        self.events[1].synchronize()
        return 1e3 * float(self.events[0].elapsed_time(self.events[1]))
