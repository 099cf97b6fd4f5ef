"""Uploads through pinned buffers, and waits that are counted. The ring's rule is tested with buffers whose copies end when told."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.engine import staging as module
from rorqual.engine.staging import Staging
from rorqual.engine.streams import Mark, Streams


class SlowMark(Mark):
    """The end of a copy that this test lets happen."""

    def __init__(self, copy):
        super().__init__(None)
        self.copy = copy  # does the copy; None once done

    @property
    def on_device(self):
        return True

    @property
    def done(self):
        return self.copy is None

    def synchronize(self):
        if self.copy is not None:
            copy, self.copy = self.copy, None
            copy()


class SlowStreams(Streams):
    """A device whose copies read their source only when somebody waits for them."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.cuda = True
        self.marks: list[SlowMark] = []


class SlowStaging(Staging):
    def _send(self, buffer, target):
        source = buffer.pinned[: target.shape[0]]
        buffer.sent = SlowMark(lambda: target.copy_(source))
        self.streams.marks.append(buffer.sent)
        self.copies += 1


@pytest.fixture
def slow(monkeypatch):
    def unpinned(size):
        plain = torch.empty(size, dtype=torch.uint8)
        return module._Buffer(pinned=plain, host=plain.numpy(), sent=Mark(None))

    monkeypatch.setattr(module, "_pinned", unpinned)
    monkeypatch.setattr(module, "_SMALLEST", 64)
    return SlowStaging(SlowStreams(), n_buffers=3)


def test_a_buffer_is_not_rewritten_before_its_copy_is_done(slow):
    targets = [slow.upload({"x": np.full(4, i, dtype=np.int64)})["x"] for i in range(10)]
    assert slow.streams.waits == 7  # three buffers were free; each later upload had to wait for the oldest
    for mark in slow.streams.marks:
        mark.synchronize()
    assert [t.tolist() for t in targets] == [[i] * 4 for i in range(10)]


def test_buffers_that_are_done_are_not_waited_for(slow):
    for i in range(10):
        slow.upload({"x": np.full(4, i, dtype=np.int64)})
        slow.streams.marks[-1].synchronize()
    assert slow.streams.waits == 0 and slow.copies == 10


ARRAYS = {
    "a": np.arange(6, dtype=np.int32).reshape(2, 3),
    "b": np.zeros((0, 4), dtype=np.float64),
    "c": np.array([True, False, True]),
    "d": np.arange(5, dtype=np.float64) / 3,
    "e": np.arange(12, dtype=np.int64).reshape(3, 4).T,
}


def test_an_upload_is_one_copy_whatever_the_arrays(slow):
    found = slow.upload(ARRAYS)
    assert slow.copies == 1
    slow.streams.marks[-1].synchronize()
    for name, array in ARRAYS.items():
        assert found[name].shape == array.shape and np.array_equal(found[name].numpy(), array), name
    larger = slow.upload({"x": np.arange(1000)})
    slow.streams.marks[-1].synchronize()
    assert found["a"].tolist() == ARRAYS["a"].tolist() and larger["x"].tolist() == list(range(1000))
    assert slow.upload({"b": ARRAYS["b"]})["b"].shape == (0, 4) and slow.copies == 2


def test_on_the_cpu_nothing_is_copied_and_nothing_waits():
    staging = Staging(Streams(torch.device("cpu")))
    array = np.arange(3)
    assert staging.upload({"x": array})["x"].data_ptr() == array.ctypes.data
    frozen = np.frombuffer(array.tobytes(), dtype=np.int64)
    assert staging.upload({"x": frozen})["x"].tolist() == [0, 1, 2]
    target = torch.zeros(5, dtype=torch.int64)
    copy = staging.streams.download(target)
    assert copy.wait() is target and staging.streams.waits == 0 and staging.streams.mark().done


def test_captured_graphs_are_destroyed_once_at_the_latest_with_their_streams():
    class Graph:
        resets = 0

        def reset(self):
            self.resets += 1

    first, second, streams = Graph(), Graph(), Streams(torch.device("cpu"))
    streams._graphs.append(first)
    streams.release_graphs()
    streams._graphs.append(second)
    del streams
    assert first.resets == second.resets == 1
