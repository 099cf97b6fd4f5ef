"""What a replica that lacks pages says, to whom, and when it gives up."""

from __future__ import annotations

import pytest

from rorqual.engine.sharing import shortage as module
from rorqual.engine.sharing.shortage import Shortage
from tests.attention.kv.directory.common import member


def test_wants_are_those_of_the_first_request_that_lacks_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_REPEAT_S", 0.0)
    with member(tmp_path) as mine, member(tmp_path) as other:
        short = Shortage(mine, lambda job: job(), 10.0)

        def step(*lacks: tuple[str, int]) -> tuple[int, int | None]:
            short.begin()
            for lack in lacks:
                short.lack(*lack)
            assert short.now == bool(lacks)
            short.end(runs=True)
            found = other.pressure.wanted()
            return found.pages, found.first

        assert step() == (0, None)
        assert step(("a", 3), ("b", 9)) == (3, mine.member)
        other.pressure.want(1)
        assert step(("a", 2)) == (2, mine.member)
        assert step(("b", 4)) == (4, other.member)  # another request has waited for a shorter time
        assert step() == (0, other.member)


def test_waiting_is_told_and_ends(tmp_path, monkeypatch, caplog):
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with member(tmp_path) as mine:
        short = Shortage(mine, lambda job: None, 20.0)

        def step(seconds: float, *, runs: bool = False) -> None:
            clock[0] += seconds
            short.begin()
            short.lack("r1", 3)
            short.end(runs=runs)

        step(0.0)
        step(0.5)
        step(0.4, runs=True)  # somebody went on meanwhile
        step(0.4)
        step(0.9)
        assert not caplog.text and short.waits == 0
        step(0.2)
        assert "request r1 has waited 1.1 s for 3 host pages; of the prefix directory's pages have member 1" in caplog.text
        step(5.0)
        assert len(caplog.records) == 1 == short.waits
        step(6.0)
        assert len(caplog.records) == 2 and short.waits == 1
        with pytest.raises(TimeoutError, match="waited 2.* end one of them, enlarge the pool"):
            step(10.0)
