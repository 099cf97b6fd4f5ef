"""Signals reach every process that the agent started; the third one ends them for good."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from rorqual.launch.nodes.agent import _Relay, children

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print('drain', flush=True))
print('up', flush=True)
while True:
    time.sleep(0.1)
"""


def test_signals_are_passed_on_and_the_third_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        assert child.pid in children()
        monkeypatch.setattr("rorqual.launch.nodes.agent.children", lambda: [child.pid, 2**22 + 1])  # the second has ended
        relay = _Relay()
        for _ in range(2):
            relay(signal.SIGTERM, None)
            assert child.stdout.readline() == "drain\n"
        relay(signal.SIGTERM, None)
        assert child.wait(20) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait(20)
