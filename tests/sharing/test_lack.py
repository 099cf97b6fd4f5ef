"""Late answers, a locked store, and too few pages: nobody waits for ever, nothing is lost, tokens stay the same."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import threading
import time

import pytest

from rorqual.attention.kv.directory import DirectoryError, DirectoryLimits
from rorqual.engine.sharing import place, questions
from tests.offload.engines import PROMPTS, alone, params
from tests.offload.live import Live
from tests.sharing.engines import LONG, cached, expect_whole, expected, share_of, shared, small, tokens


def test_a_late_answer_is_a_miss(tmp_path, monkeypatch):
    with shared(tmp_path) as first, shared(tmp_path) as second:
        assert tokens(first, [LONG]) == [alone(11)]
        assert share_of(first).flush()
        monkeypatch.setattr(questions, "PATIENCE_S", 0.05)
        directory = share_of(second).directory
        slow, match, asked = threading.Event(), directory.match, []

        def late(hashes):
            slow.wait(30)
            asked.append(match(hashes))
            return asked[-1]

        monkeypatch.setattr(directory, "match", late)
        assert cached(second, LONG) == 0
        assert share_of(second).stats()["late"] == 1
        slow.set()
        while not asked:
            time.sleep(0.001)
        assert len(asked[0]) == (len(LONG) - 1) // 4  # found too late, and let go
        expect_whole(second)
        end = time.monotonic() + 20
        while directory.pressure.holders()[1].held:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_store_that_somebody_keeps_locked(tmp_path, monkeypatch):
    """He was stopped in the middle of a transaction: prefixes are computed, and pages are those in hand until he goes on."""
    monkeypatch.setattr(place, "LIMITS", DirectoryLimits(call=0.05))
    with shared(tmp_path) as llm:
        locked = threading.Event()

        def keep() -> None:
            with contextlib.closing(sqlite3.connect(tmp_path / "pool-prefixes", isolation_level=None, timeout=10)) as store:
                store.execute("BEGIN IMMEDIATE")
                locked.set()
                time.sleep(0.7)
                store.execute("ROLLBACK")

        keeper = threading.Thread(target=keep)
        keeper.start()
        locked.wait(10)
        assert tokens(llm) == expected()
        keeper.join()
        assert tokens(llm) == expected()
        expect_whole(llm)


def test_a_directory_that_fails_is_left_alone(tmp_path, monkeypatch, caplog):
    def torn(*args, **kwargs):
        calls.append(args)
        raise DirectoryError("the file is torn")

    calls: list[object] = []
    with shared(tmp_path) as llm:
        for name in ("match", "publish"):
            monkeypatch.setattr(share_of(llm).directory, name, torn)
        for _ in range(2):
            assert tokens(llm) == expected()
            assert share_of(llm).flush() and calls
        seen = len(calls)
        assert tokens(llm) == expected() and len(calls) == seen  # nobody asks any more
        assert caplog.text.count("prefixes are not shared any more: the file is torn") == 1
        expect_whole(llm)


def test_a_full_directory_is_pressure_and_nobody_is_lost(tmp_path, monkeypatch):
    """Each engine may have as many pages as there are for both; they run in turns, and what one keeps idle the other gets."""
    small(monkeypatch, 60)
    with shared(tmp_path) as first, shared(tmp_path) as second:
        assert tokens(first) == expected()
        assert tokens(second) == expected()  # the first is idle and holds a tree of prefixes
        lives = [Live(first), Live(second)]
        for live, places in zip(lives, ((4, 11, 8), (10, 11, 7)), strict=True):
            for one in places:
                live.add(one, PROMPTS[one], params())
        end = time.monotonic() + 60
        while any(live.open or live.scheduler.has_work for live in lives):
            for live in lives:
                live.step()
            assert time.monotonic() < end, [live.open for live in lives]
        for live in lives:
            assert all(asked.tokens == alone(asked.place) for asked in live.ended) and len(live.ended) == 3
        expect_whole(first, second)


def test_who_has_all_pages_is_told_and_waiting_has_an_end(tmp_path, monkeypatch, caplog):
    small(monkeypatch, 30)
    monkeypatch.setattr("rorqual.engine.sharing.shortage._TELL_S", 0.2)
    with shared(tmp_path, max_total_tokens=120) as first, shared(tmp_path, max_total_tokens=120, dist_timeout=1.0) as second:
        stream = first.generate_stream([LONG], params(20))
        next(stream)  # it has pages, and nobody reads on
        with pytest.raises(TimeoutError, match=r"waited .* host pages; .* member 1 \(rank 0 of 1, replica 0, pid \d+\): \d+ of its own"):
            tokens(second, [LONG[::-1]])
        assert "has waited" in caplog.text
        assert sum(len(chunk.token_ids) for chunk in stream) > 0


@pytest.mark.parametrize("policy", ["host", "hybrid"])
def test_random_work_of_two_engines(policy, tmp_path, monkeypatch):
    """Aborts, preemptions, flushes, and too few pages for both."""
    small(monkeypatch, 90)
    rng = random.Random(3)
    with shared(tmp_path, policy) as first, shared(tmp_path, policy, max_num_batched_tokens=16) as second:
        lives = [Live(first), Live(second)]
        rounds, until = 0, time.monotonic() + 60
        # pages are given to the directory beside the steps: how soon depends on the machine
        while rounds < 30 or (not any(share_of(live.llm).imported for live in lives) and time.monotonic() < until):
            rounds += 1
            for live in lives:
                while len(live.open) < 6:
                    one = rng.randrange(4, len(PROMPTS))
                    live.add(one, PROMPTS[one], params(), rng.randrange(3))
                if rng.random() < 0.05:
                    live.abort(rng.choice(list(live.open)))
                with live.llm.engine.leader.at_work:
                    if rng.random() < 0.05:
                        live.preempt(rng.randrange(4))
                    if rng.random() < 0.02:
                        live.scheduler.flush_prefix_cache()
                live.step()
        until = time.monotonic() + 60
        while any(live.open or live.scheduler.has_work for live in lives):
            for live in lives:
                live.step()
            assert time.monotonic() < until
        for live in lives:
            assert live.ended
            for asked in live.ended:
                assert asked.tokens == alone(asked.place)[: len(asked.tokens)]
                assert asked.aborted or len(asked.tokens) == 12
        expect_whole(first, second)
        assert sum(share_of(live.llm).imported for live in lives) > 0


def test_an_engine_that_gives_way_lets_go_of_answers_too(tmp_path, monkeypatch):
    """Pages that its waiting requests have found would otherwise stay with those, who are not admitted before the other has its pages."""
    pages = len(LONG) // 4 + 14
    small(monkeypatch, pages)
    some = {"dist_timeout": 20.0, "max_total_tokens": 4 * pages}
    with shared(tmp_path, **some) as asks, shared(tmp_path, max_num_seqs=1, **some) as holds:
        tokens(asks, [LONG], 2)
        assert share_of(asks).flush()
        with asks.engine.leader.at_work:
            asks.engine.leader.scheduler.flush_prefix_cache()
        holding, asking = Live(holds), Live(asks)
        holding.add(2, PROMPTS[2], params(12))
        holding.add(11, LONG, params(2))
        until = time.monotonic() + 10
        while not any(ask is not None and ask.pages for _, ask in share_of(holds).questions._asks.values()):
            assert time.monotonic() < until, "no answer came"
            if not holding.ended:
                holding.step()
        asking.add(11, LONG[::-1], params(2))
        until = time.monotonic() + 15
        while asking.open or holding.open:
            assert time.monotonic() < until, "two engines wait for each other"
            asking.step()
            holding.step()
