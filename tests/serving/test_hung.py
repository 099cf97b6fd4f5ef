"""HTTP processes that are hung: no sign of life, nothing read."""

from __future__ import annotations

import signal
import time

import pytest

from rorqual.engine.serving.costless import expected
from rorqual.engine.serving.peers import Peers
from rorqual.engine.serving.settings import ServeSettings
from tests.serving.client import RawClient
from tests.serving.ranks import costless, good_ends

VOCAB = 4096
PROMPT = list(range(3, 40))


def running(client: RawClient) -> int:
    return sum(r["leader"].get("running", 0) + r["leader"].get("waiting", 0) for s in client.snapshots[-1:] for r in s.replicas)


def test_one_without_a_sign_of_life_is_replaced_and_its_requests_end():
    with costless(step_seconds=0.05, settings={"http_process_timeout": 8.0}) as engine, RawClient(engine.address, name="http-0") as well:
        with RawClient(engine.address, name="http-1") as hung:
            hung.beats, start = False, time.monotonic()
            names = [hung.submit(PROMPT, max_tokens=450, ignore_eos=True) for _ in range(8)]
            hung.until(lambda: any(c.pieces for c in hung.open.values()), "a piece")
            well.until(lambda: engine.replaced, "it is to be replaced", 30)
            assert engine.replaced == ["http-1 has given no sign of life for 8 s"] and time.monotonic() - start > 5
            well.snapshots.clear()
            well.until(lambda: well.snapshots and running(well) == 0, "its requests are aborted", 15)
            # it is not hung after all: it is told, since what it was not sent cannot be made good
            hung.submit_raw(PROMPT, {"max_tokens": 1})
            hung.until(lambda: hung.goodbyes, "Goodbye", ended=True)
            assert "gave no sign of life" in hung.goodbyes[0].reason and not hung.refused
            assert all((n, 0) in hung.open for n in names)
        with RawClient(engine.address, name="http-1") as successor:
            assert successor.complete(PROMPT, max_tokens=3, ignore_eos=True).token_ids == expected(PROMPT, 3, VOCAB)
        assert len(engine.replaced) == 1 and not well.goodbyes
        engine.signal(signal.SIGTERM)
        well.until(lambda: len(well.goodbyes) == 2, "the last Goodbye", ended=True)
    good_ends(engine)


def test_silence_counts_only_while_it_could_be_heard():
    peers = Peers(10.0)
    peers.overdue(100.0)
    assert peers.heard(b"a")
    peers.meet(b"a", "http-0")
    assert peers.overdue(1000.0) == []  # rank 0 itself was held up
    assert [peers.overdue(1000.0 + second) for second in range(1, 9)] == [[]] * 8
    assert peers.overdue(1009.0) == [b"a"]
    assert peers.heard(b"a") and peers.overdue(1010.0) == []
    peers.drop(b"a", give_up=True)
    assert not peers.heard(b"a") and list(peers) == [] and peers.overdue(2000.0) == []


def test_those_that_a_new_one_replaces():
    peers = Peers(10.0)
    for peer, name in ((b"a", "http-0"), (b"b", "http-1"), (b"c", "")):
        peers.heard(peer)
        peers.meet(peer, name)
    peers.heard(b"d")
    assert peers.before(b"d", "http-1") == [b"b", b"d"] and peers.before(b"d", "") == [b"d"]


def test_a_timeout_that_a_sign_of_life_cannot_meet():
    with pytest.raises(ValueError, match="http_process_timeout must be 4 seconds or more, found 1.0"):
        ServeSettings(http_process_timeout=1.0)
