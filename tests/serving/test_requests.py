"""What may happen to requests: refusals, aborts, many clients, clients that leave; with a model that costs nothing."""

from __future__ import annotations

import random
import re
import signal
import time

import pytest

from rorqual.engine.serving.costless import expected
from tests.serving.client import Completion, RawClient
from tests.serving.ranks import costless, good_ends

VOCAB = 4096


def prompt(seed: int, longest: int = 60) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, longest))]


@pytest.fixture(scope="module")
def engine():
    with costless(settings={"max_queued_requests": 24, "dp_routing": "total_tokens"}, timeout=120) as engine:
        yield engine
        engine.signal(signal.SIGTERM)
    good_ends(engine)


@pytest.fixture
def client(engine):
    with RawClient(engine.address) as client:
        yield client


def test_welcome_tells_the_engine(client):
    welcome = client.welcome
    assert (welcome.vocab_size, welcome.max_model_len, welcome.dp_size, welcome.page_size) == (VOCAB, 512, 1, 16)
    assert welcome.folder == "" and welcome.pool_tokens == 256 * 16 and welcome.layout == "pp1 dp1 tp1"


def test_tokens_and_their_end(client):
    for n in (1, 2, 40):
        found = client.complete(prompt(n), max_tokens=n, ignore_eos=True)
        assert found.token_ids == expected(prompt(n), n, VOCAB) and found.finish_reason == "length" and found.dp_rank == 0
    stop = expected(prompt(7), 10, VOCAB)[4]
    found = client.complete(prompt(7), max_tokens=10, stop_token_ids=[stop])
    assert found.token_ids == expected(prompt(7), 5, VOCAB) and (found.finish_reason, found.stop_reason) == ("stop", stop)


def test_completions_of_one_prompt(client):
    name = client.submit(prompt(1), n=5, max_tokens=6, ignore_eos=True, seed=3)
    client.finish(name)
    assert [client.done[name, i].token_ids for i in range(5)] == [expected(prompt(1), 6, VOCAB)] * 5
    assert all(client.done[name, i].cached_tokens >= 0 for i in range(5))


@pytest.mark.parametrize(
    "ids, params, words",
    [
        ([], {}, "the prompt is empty"),
        ([5, VOCAB], {}, f"token id {VOCAB}"),
        ([5, -1], {}, "token id -1"),
        ([5] * 512, {}, "512 tokens.*max_model_len 512"),
        ([5], {"max_tokens": 0}, "max_tokens"),
        ([5], {"temperature": "hot"}, "temperature"),
        ([5], {"nonsense": 1}, "unknown sampling parameters.*nonsense"),
        ([5], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ([5], {"n": 10**9}, "n is 1000000000, but at most 32"),
    ],
)
def test_what_can_never_run_is_refused(client, ids, params, words):
    name = client.submit_raw(ids, params)
    client.until(lambda: name in client.refused, "Refused")
    assert client.refused[name].status == 400
    assert re.search(words, client.refused[name].error), client.refused[name].error


def test_a_replica_that_is_not_there(client):
    name = client.submit([5], dp_rank=1)
    client.until(lambda: name in client.refused, "Refused")
    assert client.refused[name].status == 400 and "rank 1" in client.refused[name].error


def test_an_id_that_is_in_use(client):
    client.submit(prompt(2), request_id="same", max_tokens=400, ignore_eos=True)
    client.submit_raw(prompt(2), {"max_tokens": 1}, name="same")
    client.until(lambda: "same" in client.refused, "Refused")
    assert "ids must be unique" in client.refused["same"].error
    client.open["same", 0] = Completion()  # the refusal was the second one's; the first runs on
    client.abort("same")
    client.finish("same")  # until then it counts among those that wait or run
    assert client.done["same", 0].finish_reason in ("abort", "length")


def test_too_many_wait(client):
    names = [client.submit(prompt(i), max_tokens=300, ignore_eos=True) for i in range(60)]
    client.finish()
    late = [n for n in names if n in client.refused]
    assert late and {client.refused[n].status for n in late} == {429}
    assert all(1 <= client.refused[n].retry_after_s <= 60 for n in late)
    taken = [(i, n) for i, n in enumerate(names) if n not in client.refused]
    assert len(taken) >= 32 and all(client.done[n, 0].token_ids == expected(prompt(i), 300, VOCAB) for i, n in taken)


def test_aborts(client):
    name = client.submit(prompt(3), max_tokens=400, ignore_eos=True, n=3)
    client.until(lambda: client.open[name, 0].pieces > 3, "a few pieces")
    client.abort("unknown", name, name)
    client.finish(name)
    found = [client.done[name, i] for i in range(3)]
    assert {f.finish_reason for f in found} == {"abort"}
    assert all(f.token_ids == expected(prompt(3), len(f.token_ids), VOCAB) for f in found)
    client.abort(name)  # it has ended: nothing happens
    assert client.control("ping").ok


def test_abort_everything(client):
    names = [client.submit(prompt(i), max_tokens=450, ignore_eos=True) for i in range(20)]
    client.abort(everything=True)
    client.finish()
    assert all(client.done[n, 0].finish_reason in ("abort", "length") for n in names)


def test_a_client_that_vanishes(engine, client):
    other = RawClient(engine.address)
    for i in range(20):
        other.submit(prompt(i), max_tokens=450, ignore_eos=True)
    other.until(lambda: any(c.pieces for c in other.open.values()), "a piece")
    other.close()
    end = time.monotonic() + 30
    while True:
        running = [r["leader"].get("running", 0) + r["leader"].get("waiting", 0) for s in client.snapshots[-1:] for r in s.replicas]
        if client.snapshots and sum(running) == 0:
            break
        assert time.monotonic() < end, client.snapshots[-1:]
        client.poll(0.2)
    assert client.complete(prompt(1), max_tokens=3, ignore_eos=True).token_ids == expected(prompt(1), 3, VOCAB)


def test_a_process_that_was_replaced(engine, client):
    with RawClient(engine.address, name="http-7") as old:
        name = old.submit(prompt(5), max_tokens=450, ignore_eos=True)
        old.until(lambda: old.open[name, 0].pieces > 0, "a piece")
        with RawClient(engine.address, name="http-7") as new:
            assert new.complete(prompt(6), max_tokens=2, ignore_eos=True).token_ids == expected(prompt(6), 2, VOCAB)
            old.finish(name)
            assert old.done[name, 0].finish_reason in ("abort", "length")


def test_bad_messages_and_versions(engine, client):
    for data in (b"", b"\xc1", b"\x81\xa4type\xa3Foo", b"x" * 1000):
        client.send_bytes(data)
    with RawClient(engine.address, hello=False) as stranger:
        stranger.say_hello(protocol=99)
        stranger.until(lambda: stranger.goodbyes, "Goodbye", ended=True)
        assert "protocol 99" in stranger.goodbyes[0].reason
    assert client.control("ping").ok


def test_controls(client):
    assert client.control("stats").body["ranks"][0]["rank"] == 0
    bad = client.control("explode")
    assert not bad.ok and "known: " in bad.error
    for name, words in (("start_profile", "--profile-dir"), ("stop_profile", "does not run"), ("expert_load", "no load of experts")):
        reply = client.control(name)
        assert not reply.ok and words in reply.error, reply
    assert not client.control("ping", surprising=1).ok
    name = client.submit(prompt(9), max_tokens=450, ignore_eos=True)
    busy = client.control("flush_cache")
    assert not busy.ok and "run or wait" in busy.error
    client.abort(name)
    client.finish(name)
    assert client.control("flush_cache").ok


def test_priority_and_order(client):
    names = [client.submit(prompt(i), max_tokens=20, ignore_eos=True, priority=-i) for i in range(24)]
    client.finish(*names)
    assert all(client.done[n, 0].token_ids == expected(prompt(i), 20, VOCAB) for i, n in enumerate(names))
