"""Snapshots of real engines: the numbers are those of what happened, from every rank that leads."""

import json
import os
import signal
import time

from rorqual.engine.server.metrics import render
from tests.serving.client import RawClient
from tests.serving.ranks import good_ends, serving


def after(client, true, what):
    """The first snapshot from now on of which ``true`` holds."""
    client.snapshots.clear()
    client.until(lambda: client.snapshots and true(client.snapshots[-1]), f"a snapshot with {what}")
    return client.snapshots[-1]


def total(snapshot, part, name):
    return sum(replica[part][name] for replica in snapshot.replicas)


def still(snapshot):
    """Everything has ended, and both leaders have told so."""
    return all(r["leader"] and not r["requests"]["open"] and not r["leader"]["running"] for r in snapshot.replicas)


def test_numbers_are_what_happened_on_two_replicas(tmp_path):
    prompt = list(range(10, 58))
    with serving(2, data_parallel_size=2, max_model_len=2048, settings={"profile_dir": str(tmp_path / "traces")}) as engine:
        with RawClient(engine.address) as client:
            names = [client.submit(prompt, max_tokens=3 + i, ignore_eos=True, temperature=0.0) for i in range(6)]
            client.finish(*names)
            client.submit_raw([1] * 4000, {"max_tokens": 4}, name="too long")
            client.until(lambda: "too long" in client.refused, "the refusal")
            endless = client.submit([7, 8, 9], max_tokens=2000, ignore_eos=True, temperature=0.0, dp_rank=1)
            client.until(lambda: client.open[endless, 0].token_ids, "its first token")
            busy = after(client, lambda s: [r["leader"].get("running") for r in s.replicas] == [0, 1], "a running request of rank 1")
            assert busy.replicas[1]["leader"]["kv_usage"] > 0 and busy.replicas[1]["requests"]["open"] == 1
            client.abort(endless)
            client.finish(endless)
            snapshot = after(client, still, "nothing running")

            made = sum(len(done.token_ids) for done in client.done.values())
            assert total(snapshot, "requests", "generation_tokens") == made
            assert total(snapshot, "requests", "prompt_tokens") == 6 * len(prompt) + 3
            ended = [replica["requests"]["ended"] for replica in snapshot.replicas]
            assert {reason: sum(e.get(reason, 0) for e in ended) for reason in ("length", "abort")} == {"length": 6, "abort": 1}
            assert sum(sum(e.values()) for e in ended) == 7 and snapshot.engine["refused"] == {"400": 1}
            ranks = [client.done[name, 0].dp_rank for name in names]
            assert [r["requests"]["routed"] for r in snapshot.replicas] == [ranks.count(0), ranks.count(1) + 1]
            assert total(snapshot, "requests", "cached_prompt_tokens") == sum(d.cached_tokens for d in client.done.values())

            first, second = (replica["leader"] for replica in snapshot.replicas)
            assert first["steps"] == second["steps"] > 10 and second["idle_steps"] < first["idle_steps"] <= first["steps"]
            for leader in (first, second):
                assert sum(leader["step_tokens"]["counts"]) == leader["steps"] and leader["step_tokens"]["sum"] == leader["computed_tokens"]
                assert leader["computed_tokens"] <= leader["busiest_tokens"] and leader["pages_used"] == 0 and leader["dispatch_bytes"] > 0
                assert leader["prefix_queries"] >= leader["prefix_hits"] and leader["graph_steps"] == leader["padding_tokens"] == 0
            for replica in snapshot.replicas:
                hists = replica["requests"]["histograms"]
                counts = {name: sum(h["counts"]) for name, h in hists.items()}
                ended_here = sum(replica["requests"]["ended"].values())
                assert counts["e2e_request_latency_seconds"] == counts["request_queue_time_seconds"] == ended_here
                assert counts["time_to_first_token_seconds"] == ended_here
                assert counts["inter_token_latency_seconds"] == replica["requests"]["generation_tokens"] - ended_here
                parts = [hists[f"request_{part}_time_seconds"]["sum"] for part in ("queue", "prefill", "decode")]
                assert sum(parts) <= hists["e2e_request_latency_seconds"]["sum"] + 1e-6 and min(parts) >= 0

            client.snapshots.clear()
            while not (client.snapshots and client.snapshots[-1].engine["expert_counts"] and client.snapshots[-1].engine["experts"]):
                client.complete(prompt, max_tokens=20, ignore_eos=True)
                client.poll(0.05)
            engine_numbers = client.snapshots[-1].engine
            assert len(engine_numbers["experts"]["rank_loads"]) == 2 and 0.5 <= engine_numbers["experts"]["balancedness"] <= 1
            assert sum(engine_numbers["experts"]["rank_loads"]) > 0

            reply = client.control("start_profile", num_steps=3)
            assert reply.ok and not client.control("start_profile").ok, reply
            assert not client.control("start_profile", num_steps=10**9).ok
            client.complete(prompt, max_tokens=8, ignore_eos=True)
            assert client.control("stop_profile").ok and not client.control("stop_profile").ok
            text = render(client.welcome, snapshot).decode()
        engine.signal(signal.SIGTERM)
    good_ends(engine)
    for rank in range(2):
        events = json.loads((tmp_path / "traces" / f"rank{rank}.json").read_text())["traceEvents"]
        steps = {e["name"] for e in events if str(e.get("name", "")).startswith("step ")}
        assert len(steps) == 3 and all(name.endswith(", eager") for name in steps), steps
    assert sorted(os.listdir(tmp_path / "traces")) == ["rank0.json", "rank1.json"]
    assert 'rorqual:request_success_total{model_name="tiny",engine="1",finished_reason="abort"} 1\n' in text


def test_numbers_come_while_nothing_happens_and_say_their_age():
    with serving(1) as engine:
        with RawClient(engine.address) as client:
            client.until(lambda: client.snapshots, "the first snapshot")
            begin = time.monotonic()
            first = client.snapshots[-1].at
            client.until(lambda: client.snapshots[-1].at > first, "the next snapshot")
            assert time.monotonic() - begin < 20 and client.snapshots[-1].replicas[0]["age"] < 20
        engine.signal(signal.SIGTERM)
    good_ends(engine)
