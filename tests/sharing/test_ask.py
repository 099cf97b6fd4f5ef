"""An answer is either taken or given back."""

from __future__ import annotations

import time

import numpy as np

from rorqual.engine.sharing.ask import Ask


def test_an_answer_in_time():
    ask = Ask([5, 6, 7], 2)
    assert ask.load().tolist() == [5, 6] and not ask.late
    assert ask.answer(ask.load(), (3,)) and ask.answered.is_set()
    assert ask.tokens.tolist() == [5, 6] and ask.close() == (3,) and ask.close() == ()


def test_an_answer_that_nobody_wants():
    ask = Ask([5, 6, 7], 2)
    ask.until = time.monotonic() - 1
    assert ask.late and ask.close() == ()
    assert not ask.answer(np.zeros(2, dtype=np.int32), (3,))  # the clerk keeps it
    assert not ask.answered.is_set() and ask.pages == ()
