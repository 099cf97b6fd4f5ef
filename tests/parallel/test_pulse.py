"""The silence of the store is counted in short pieces, and ends when it answers."""

from __future__ import annotations

import time

from rorqual.parallel.pulse import Pulse


def test_silence_is_told_once_and_beats_prevent_it() -> None:
    told: list[float] = []
    pulse = Pulse(0.3, 0.05, told.append)
    pulse.start()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        pulse.beat()
        time.sleep(0.01)
    assert told == []
    end = time.monotonic() + 20.0
    while not told and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)
    assert len(told) == 1 and told[0] > 0.3


def test_a_stopped_pulse_says_nothing() -> None:
    told: list[float] = []
    pulse = Pulse(0.05, 0.02, told.append)
    pulse.stop()
    pulse.start()
    time.sleep(0.3)
    assert told == []
