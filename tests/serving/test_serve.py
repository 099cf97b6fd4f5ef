"""Requests over the socket: the same tokens as offline, on every layout; nothing is left behind."""

from __future__ import annotations

import signal

import pytest

from tests.serving.client import RawClient
from tests.serving.ranks import ARGS, good_ends, serving

GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


def prompts() -> list[list[int]]:
    return [[3 + (7 * i + j * j) % 200 for j in range(1 + 5 * i % 41)] for i in range(12)]


@pytest.fixture(scope="module")
def offline() -> list[list[int]]:
    from rorqual import LLM, SamplingParams

    with LLM("tiny", **ARGS) as llm:
        return [o.outputs[0].token_ids for o in llm.generate(prompts(), SamplingParams(**GREEDY), use_tqdm=False)]


@pytest.mark.parametrize(
    "world, args",
    [
        (1, {}),
        (2, {"pipeline_parallel_size": 2}),
        (4, {"data_parallel_size": 2, "tensor_parallel_size": 2}),
    ],
    ids=["one", "pp2", "dp2tp2"],
)
def test_tokens_are_those_of_the_offline_engine(world, args, offline, tmp_path):
    with serving(world, settings={"profile_dir": str(tmp_path)}, **args) as engine:
        with RawClient(engine.address) as client:
            names = [client.submit(p, **GREEDY) for p in prompts()]
            client.finish()
            assert [client.done[n, 0].token_ids for n in names] == offline
            assert {client.done[n, 0].finish_reason for n in names} == {"length"}
            assert {client.done[n, 0].dp_rank for n in names} == set(range(args.get("data_parallel_size", 1)))
            assert client.control("ping").ok
            stats = client.control("stats")
            assert [r["rank"] for r in stats.body["ranks"]] == list(range(world))
            computed = sum(r["scheduler"]["computed_tokens"] for r in stats.body["ranks"] if "scheduler" in r)
            load = client.control("expert_load").body
            assert load["layers"] and [sum(row) for row in load["counts"]] == [computed * 4] * len(load["layers"])
            assert client.control("flush_cache").body["pages"] > 0
            assert client.control("start_profile").body == {"folder": str(tmp_path)}
            client.complete([5, 6, 7], **GREEDY)
            assert client.control("stop_profile").ok
            assert sorted(p.name for p in tmp_path.iterdir()) == [f"rank{r}.json" for r in range(world)]
            engine.signal(signal.SIGTERM)
            client.until(lambda: [g.phase for g in client.goodbyes] == ["drain", "end"], "Goodbye")
    good_ends(engine)
