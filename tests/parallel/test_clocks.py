"""Clocks are compared by questions and answers; who does not ask or answer is named."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

from rorqual.parallel.clocks import ask_clock, serve_clock
from rorqual.parallel.roll_call import AbsentError


def test_threads_of_one_process_have_one_clock() -> None:
    store = HashStore()
    askers = [threading.Thread(target=ask_clock, args=(store, rank, 20.0)) for rank in (2, 5)]
    for asker in askers:
        asker.start()
    found = serve_clock(store, [2, 5], 20.0)
    for asker in askers:
        asker.join()
    assert list(found) == [2, 5] and all(abs(ahead) <= sure + 0.01 for ahead, sure in found.values())


def test_who_does_not_ask_is_named() -> None:
    with pytest.raises(AbsentError, match="5 did not come within 0.2 s") as caught:
        serve_clock(HashStore(), [5], 0.2)
    assert caught.value.missing == (5,)


def test_who_does_not_answer_is_named() -> None:
    with pytest.raises(AbsentError) as caught:
        ask_clock(HashStore(), 5, 0.2)
    assert caught.value.missing == (0,)
