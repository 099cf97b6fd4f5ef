"""The limit of the queue, and when to come again."""

from __future__ import annotations

from rorqual.engine.serving.limits import QueueLimit


def test_refuses_what_does_not_fit():
    limit = QueueLimit(seats=4, most_waiting=2)
    assert limit.most == 6 and limit.refuses(0, 6) is None and limit.refuses(5, 1) is None
    late = limit.refuses(5, 2)
    assert late is not None and "1 completions wait already and at most 2 may" in late.text and late.retry_after_s == 1.0


def test_comes_again_when_enough_have_ended():
    limit = QueueLimit(seats=1, most_waiting=0)
    for i in range(11):
        limit.ended(100.0 + 2 * i)  # one in two seconds
    assert [limit.refuses(1, n).retry_after_s for n in (1, 5, 100)] == [2.0, 10.0, 60.0]
    slow = QueueLimit(seats=1, most_waiting=0)
    slow.ended(1.0)
    slow.ended(1.0)
    assert slow.refuses(1, 1).retry_after_s == 1.0
