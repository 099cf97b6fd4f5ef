"""Routing in a served engine of several replicas: news of caches reach rank 0, and the choice shows in pieces and snapshots."""

from __future__ import annotations

import signal
from typing import Any
from unittest import mock

from tests.serving.client import RawClient
from tests.serving.ranks import _running, costless, good_ends, rank_serves_costless


def routing(client: RawClient) -> dict:
    client.snapshots.clear()
    client.until(lambda: client.snapshots, "Snapshot")
    return client.snapshots[-1].engine["routing"]


def test_kv_sends_prefixes_where_they_are_and_hears_of_a_flush():
    with costless(2, dp=2, settings={"dp_routing": "kv"}) as engine:
        with RawClient(engine.address) as client:
            ranks: dict[int, list[int]] = {}
            for turn in range(3):
                for group in range(4):
                    found = client.complete([group] * 96 + [turn] * 5, temperature=0.0, max_tokens=4, ignore_eos=True)
                    ranks.setdefault(group, []).append(found.dp_rank)
                    assert found.cached_tokens >= (96 if turn else 0)
            assert all(len(set(seen)) == 1 for seen in ranks.values()), ranks
            assert sorted(seen[0] for seen in ranks.values()) == [0, 0, 1, 1]
            view = routing(client)
            assert view["policy"] == "kv" and sum(view["picked"]) == 12 and view["lost_news"] == 0
            assert min(view["cached_blocks"]) >= 12 and sum(view["hit_blocks"]) == 8 * 6
            assert client.control("flush_cache").body["pages"] >= sum(view["cached_blocks"])
            client.complete([9] * 40, temperature=0.0, max_tokens=2, dp_rank=1)
            assert sum(routing(client)["cached_blocks"]) <= 3
            engine.signal(signal.SIGTERM)
    good_ends(engine)


def test_a_named_rank_is_honoured_and_a_wrong_one_refused():
    with costless(2, dp=2, settings={"dp_routing": "total_tokens"}) as engine:
        with RawClient(engine.address) as client:
            assert [client.complete([5] * 9, temperature=0.0, max_tokens=2, dp_rank=1).dp_rank for _ in range(3)] == [1] * 3
            name = client.submit([5] * 9, dp_rank=2, max_tokens=2)
            client.until(lambda: name in client.refused, "refusal")
            assert client.refused[name].status == 400 and "ranks 0 to 1" in client.refused[name].error
            names = [client.submit([6] * 9, temperature=0.0, max_tokens=2) for _ in range(8)]
            client.finish()
            assert sorted(client.done[n, 0].dp_rank for n in names) == [0] * 4 + [1] * 4
            name = client.submit([6] * 9, temperature=0.0, max_tokens=400)
            client.abort(name)
            client.finish()
            view = routing(client)
            assert view["pinned"] == [0, 3] and view["open_tokens"] == view["open_requests"] == [0, 0]
            engine.signal(signal.SIGTERM)
    good_ends(engine)


def rank_that_loses(engine_args: dict[str, Any], settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """A rank whose third news of its cache get lost."""
    from rorqual.engine.serving.routing.kv_log import KvLog

    take = KvLog.take

    def losing(self: KvLog) -> bytes | None:
        found = take(self)
        self.count = getattr(self, "count", 0) + (found is not None)
        return None if self.count == 3 else found

    with mock.patch.object(KvLog, "take", losing):
        return rank_serves_costless(engine_args, settings, folder)


def test_lost_news_are_told_again():
    args = {"dp": 2, "max_num_seqs": 8, "page_size": 16, "n_pages": 256, "max_model_len": 512, "debug": True}
    with _running(2, rank_that_loses, (args, {"dp_routing": "kv"}), 60.0, debug=True) as engine:
        with RawClient(engine.address) as client:
            for group in range(8):
                client.complete([group] * 96, temperature=0.0, max_tokens=4, ignore_eos=True, dp_rank=group % 2)
            for group in range(8):
                assert client.complete([group] * 96, temperature=0.0, max_tokens=4, ignore_eos=True).dp_rank == group % 2
            view = routing(client)
            assert view["lost_news"] >= 2
            assert client.control("flush_cache").body["pages"] == sum(view["cached_blocks"])
            engine.signal(signal.SIGTERM)
    good_ends(engine)
