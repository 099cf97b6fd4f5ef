"""Words that a failed wait leaves on the device: no result behind it is given out, and the error says where it was."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.state import N_STATUS, Failure, Status
from rorqual.comm.timeout import DispatchTimeout, failure
from rorqual.comm.wire import COMBINE
from rorqual.engine.exchange_watch import ExchangeWatch, Place
from rorqual.engine.streams import Streams
from rorqual.parallel.grid import GridSpec
from rorqual.parallel.group import Group

RANKS = (4, 5)


def words(**values: int) -> torch.Tensor:
    found = torch.zeros(N_STATUS, dtype=torch.int64)
    for name, value in values.items():
        found[Status[name.upper()]] = value
    return found


MISSED = words(failed=Failure.MISSED, phase=COMBINE, epoch=9, missing=1, seen=7, tag=3)


class Fake:
    """A dispatcher whose words are set by hand."""

    def __init__(self, status: torch.Tensor | None, fault_tolerant: bool = False) -> None:
        self.status, self.known = status, [0] * N_STATUS
        self.spec = EPSpec(n_ranks=2, n_slots=8, hidden=16, top_k=2, max_tokens=4, fault_tolerant=fault_tolerant)
        self.group = SimpleNamespace(ranks=RANKS)

    def verdict(self, found: Any) -> DispatchTimeout | None:
        return None if self.spec.fault_tolerant else failure(found, RANKS, 0, 500)

    def health(self, *, wait: bool = False) -> None:
        error = self.verdict(self.status.tolist() if wait and self.status is not None else self.known)
        if error is not None:
            raise error


def watch(dispatcher: Fake, tp: Any = None, place: Place = Place.GIVES) -> ExchangeWatch:
    return ExchangeWatch(dispatcher, Streams(torch.device("cpu")), tp or Group.solo("tp"), place)  # type: ignore[arg-type]


def test_good_steps_pass_and_leave_nothing_behind():
    found = watch(Fake(words()))
    for step in range(3):
        with found.step(step):
            found.launched(step)
    assert len(found._coming) == 3
    found.confirm(0)
    found.confirm(2)  # whoever asked for step 1 gave up
    assert not found._coming


def test_a_failed_step_is_not_confirmed():
    found = watch(Fake(MISSED))
    found.launched(12)
    said = r"step 12, layer 3: rank 4: rank 5 did not come to combine 9 of channel 0 \(tag 3\) within 500 ms; the last .* is 7"
    with pytest.raises(RuntimeError, match=said):
        found.confirm(12)


def test_a_later_step_does_not_begin():
    dispatcher = Fake(words())
    found = watch(dispatcher)
    dispatcher.known = MISSED.tolist()
    with pytest.raises(RuntimeError, match="step 13, layer 3: rank 4"), found.step(13):
        raise AssertionError("it began")


def test_an_error_of_the_call_itself_is_named_too():
    found = watch(Fake(None))
    with pytest.raises(RuntimeError, match="step 14, layer 3: rank 4"), found.step(14):
        raise failure(MISSED.tolist(), RANKS, 0, 500)  # type: ignore[misc]
    found.launched(14)
    found.confirm(14)  # there are no words to look at


def test_a_failure_of_a_rank_that_shares_the_requests_counts():
    tp = SimpleNamespace(size=2, index=0, ranks=(4, 6), all_gather=lambda x: torch.cat([x, MISSED.view(1, -1)]))
    found = watch(Fake(words()), tp)
    found.launched(15)
    with pytest.raises(RuntimeError, match="step 15: an exchange of experts failed on rank 6, which shares this rank's requests"):
        found.confirm(15)


def test_places_of_a_grid():
    """Three stages of two ranks: the leader and the last stage give out, the middle confirms at once, the others follow."""
    grids = [SimpleNamespace(is_leader=r == 0, is_first_stage=r < 2, is_last_stage=r > 3, spec=GridSpec(pp=3, tp=2)) for r in range(6)]
    assert [Place.of(grid).name for grid in grids] == ["GIVES", "FOLLOWS", "PASSES_ON", "PASSES_ON", "GIVES", "GIVES"]  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="step 3, layer 3"):
        watch(Fake(MISSED), place=Place.PASSES_ON).launched(3)
    follower = watch(Fake(MISSED), place=Place.FOLLOWS)
    follower.launched(3)
    follower.confirm(3)


def test_a_rank_that_is_left_out_is_told_of_once(caplog):
    found = watch(Fake(MISSED, fault_tolerant=True))
    with caplog.at_level(logging.WARNING, logger="rorqual"):
        for step in (1, 2):
            found.launched(step)
            found.confirm(step)
    (told,) = (r.getMessage() for r in caplog.records)
    assert told.startswith("rank 5 did not answer in time: it is left out, and its experts add nothing from now on")


def test_a_step_without_results_is_looked_at_when_it_has_ended():
    dispatcher = Fake(words())
    found = watch(dispatcher)
    found.ended(5)
    dispatcher.status = MISSED  # known only to who waits for the device
    with found.step(6):
        pass
    with pytest.raises(RuntimeError, match="step 6, layer 3: rank 4: rank 5 did not come to combine 9"):
        found.ended(6)
