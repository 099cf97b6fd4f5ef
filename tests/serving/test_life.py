"""Beginning, idling and ending of a serving engine, on one rank and several; with a model that costs nothing."""

from __future__ import annotations

import signal
import time

from rorqual.engine.serving.costless import expected
from tests.serving.client import RawClient
from tests.serving.ranks import costless, good_ends

VOCAB = 4096
PROMPT = list(range(3, 40))
LONG = {"max_tokens": 300, "ignore_eos": True}


def test_a_signal_drains():
    with costless(step_seconds=0.004) as engine, RawClient(engine.address) as client:
        names = [client.submit(PROMPT, **LONG) for _ in range(4)]
        client.until(lambda: all(c.pieces for c in client.open.values()), "first pieces")
        engine.signal(signal.SIGTERM)
        client.until(lambda: client.goodbyes, "Goodbye")
        assert client.goodbyes[0].phase == "drain"
        late = client.submit(PROMPT, **LONG)
        client.until(lambda: late in client.refused, "Refused")
        assert client.refused[late].status == 503
        client.finish(*names)
        assert all(client.done[n, 0].token_ids == expected(PROMPT, 300, VOCAB) for n in names)
        client.until(lambda: len(client.goodbyes) == 2, "the last Goodbye", ended=True)
    good_ends(engine)


def test_a_second_signal_aborts():
    with costless(step_seconds=0.05) as engine, RawClient(engine.address) as client:
        names = [client.submit(PROMPT, **LONG) for _ in range(12)]
        client.until(lambda: any(c.pieces for c in client.open.values()), "first pieces")
        engine.signal(signal.SIGINT)
        client.until(lambda: client.goodbyes, "Goodbye")
        engine.signal(signal.SIGINT)  # the same request to end, passed on by somebody else
        time.sleep(1.2)
        assert len(client.open) == 12
        engine.signal(signal.SIGTERM)
        client.until(lambda: not client.open, "end of all", ended=True)
        found = [client.done[n, 0] for n in names]
        assert {f.finish_reason for f in found} == {"abort"} and {f.error for f in found} == {"the server is ending"}
    good_ends(engine)


def test_draining_has_a_limit():
    with costless(step_seconds=0.05, settings={"drain_timeout": 0.5}) as engine, RawClient(engine.address) as client:
        name = client.submit(PROMPT, **LONG)
        client.until(lambda: client.open[name, 0].pieces > 2, "pieces")
        engine.signal(signal.SIGTERM)
        client.until(lambda: not client.open, "end", ended=True)
        assert (client.done[name, 0].finish_reason, client.done[name, 0].error) == ("abort", "the server is ending")
    good_ends(engine)


def test_idle_for_longer_than_the_deadline_of_collectives():
    with costless(4, dp=2, tp=2, dist_timeout=10.0, max_num_seqs=4) as engine, RawClient(engine.address) as client:
        assert client.complete(PROMPT, max_tokens=5, ignore_eos=True).token_ids == expected(PROMPT, 5, VOCAB)
        end = time.monotonic() + 12
        while time.monotonic() < end:
            client.poll(0.2)
        names = [client.submit([*PROMPT, 3 + i], max_tokens=150, ignore_eos=True) for i in range(8)]
        client.until(lambda: any(c.pieces for c in client.open.values()), "first pieces")
        for name in ("ping", "stats", "ping"):  # between steps, while requests run
            assert client.control(name).ok
        client.finish()
        assert all(client.done[n, 0].token_ids == expected([*PROMPT, 3 + i], 150, VOCAB) for i, n in enumerate(names))
        stats = client.control("stats").body["ranks"]
        assert len(stats) == 4 and max(r["scheduler"]["plans"] for r in stats if "scheduler" in r) < 600, "an idle engine spins"
        engine.signal(signal.SIGTERM)
    good_ends(engine)


def test_two_replicas_share_the_load():
    with costless(2, dp=2) as engine, RawClient(engine.address) as client:
        names = [client.submit([*PROMPT, 3 + i], max_tokens=20, ignore_eos=True, dp_rank=1 if i >= 20 else None) for i in range(24)]
        client.finish(*names)
        ranks = [client.done[n, 0].dp_rank for n in names]
        assert sorted(ranks[:20]) == [0] * 10 + [1] * 10 and set(ranks[20:]) == {1}
        assert all(client.done[n, 0].token_ids == expected([*PROMPT, 3 + i], 20, VOCAB) for i, n in enumerate(names))
        assert client.control("flush_cache").ok and client.control("ping").ok
        engine.signal(signal.SIGTERM)
    good_ends(engine)


def test_a_signal_to_another_rank_drains_too():
    with costless(4, dp=2, tp=2, step_seconds=0.01) as engine, RawClient(engine.address) as client:
        name = client.submit(PROMPT, max_tokens=200, ignore_eos=True)
        client.until(lambda: client.open[name, 0].pieces > 2, "pieces")
        engine.signal(signal.SIGTERM, 3)
        client.until(lambda: client.goodbyes, "Goodbye")
        assert "rank 3 was asked to end" in client.goodbyes[0].reason
        late = client.submit(PROMPT, **LONG)
        client.until(lambda: late in client.refused, "Refused")
        client.finish(name)
        assert client.refused[late].status == 503 and client.done[name, 0].token_ids == expected(PROMPT, 200, VOCAB)
    good_ends(engine)


def test_a_failing_engine_says_so():
    with costless(debug=True) as engine, RawClient(engine.address) as client:
        client.complete(PROMPT, max_tokens=2)
        engine.break_soon()
        client.submit(PROMPT, **LONG)
        client.until(lambda: client.goodbyes, "Goodbye", ended=True)
        assert client.goodbyes[0].phase == "end" and "broken on purpose" in client.goodbyes[0].reason
    assert engine.exits[0].code == 1
