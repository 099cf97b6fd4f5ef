"""What a rank does with signals once its loop has ended."""

import os
import signal

import pytest

from rorqual.engine.serving.drain import Signals
from rorqual.parallel.progress import Progress

NUMBERS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def former():
    """A handler of both signals from before the loop; the test's own ones are put back."""
    kept, heard = {number: signal.getsignal(number) for number in NUMBERS}, []
    for number in NUMBERS:
        signal.signal(number, lambda number, _: heard.append(number))
    yield heard
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_signal_within_counts(former):
    with Signals(Progress(rank=0)) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.count, signals.reason, former) == (1, "SIGTERM", [])
    os.kill(os.getpid(), signal.SIGINT)
    assert former == [signal.SIGINT]


def test_one_that_comes_after_a_good_end_is_ignored(former):
    """Ranks are signalled one after the other: the job may have drained and ended before the last one hears of it."""
    with Signals(Progress(rank=1), for_good=True):
        pass
    for number in NUMBERS:
        os.kill(os.getpid(), number)
    assert former == []


def test_one_that_comes_after_a_failure_is_not(former):
    with pytest.raises(RuntimeError), Signals(Progress(rank=1), for_good=True):
        raise RuntimeError("another rank is gone")
    os.kill(os.getpid(), signal.SIGTERM)
    assert former == [signal.SIGTERM]
