"""Decode steps under CUDA graphs: the same tokens, no wait but the one for the last tokens, copies that never overtake each other."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from rorqual.engine.graph_key import decode_context
from tests.engine.stub import StubEngine, greedy, mixed_params, prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")]

TINY = Path(__file__).resolve().parents[2] / "launch" / "tiny"
SETTINGS = [
    {"sizes": (1, 2, 4, 8)},
    {"sizes": (8,), "overlap": False},
    {"sizes": (2, 4), "lazy": True, "page_size": 1},
    {"sizes": (1, 2, 4, 8), "n_pages": 40, "debug": True, "max_num_batched_tokens": 7},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_graphs_keep_tokens(settings):
    plain = {k: v for k, v in settings.items() if k not in ("sizes", "lazy", "debug")}
    texts = prompts(20)
    expected, eager, engine = StubEngine(**plain), StubEngine("cuda", **plain), StubEngine("cuda", **settings)
    for params in (greedy(20), mixed_params(20)):
        wanted = expected.tokens(texts, params)
        assert eager.tokens(texts, params) == wanted
        assert engine.tokens(texts, params) == wanted
    assert 0 < engine.runner.stats.graph_steps == engine.graphs.stats.replays
    with torch.inference_mode():
        assert engine.tables.pages[engine.tables.spare_slot].unique().tolist() == [engine.tables.dummy_page]


def only_decode(engine, wrap):
    """Run every decode step's launch, and the handling of every result, inside ``wrap()``."""
    execute, settle = engine.runner.execute, engine.leader._settle

    def execute_in(plan):
        if decode_context(plan) <= 0 or len(plan.new_ints):
            return execute(plan)
        with wrap():
            return execute(plan)

    def settle_in(plan):
        with wrap():
            settle(plan)

    engine.runner.execute, engine.leader._settle = execute_in, settle_in


@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), None], ids=["graphs", "eager"])
@pytest.mark.parametrize("params", [lambda: greedy(40), lambda: mixed_params(8, 40)], ids=["greedy", "mixed"])
def test_a_decode_step_waits_for_nothing_but_the_last_tokens(params, sizes):
    @contextmanager
    def no_sync():
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine = StubEngine("cuda", sizes=sizes)
    engine.tokens(prompts(8), params())  # warm: pinned buffers exist
    only_decode(engine, no_sync)
    waits, steps = engine.streams.waits, engine.runner.stats.steps
    engine.tokens(prompts(8), params())
    steps = engine.runner.stats.steps - steps
    each = 2 if isinstance(params(), list) else 1  # log-probabilities come down beside the tokens
    assert steps - 1 <= engine.streams.waits - waits <= each * steps


def test_the_driver_sees_one_wait_a_step():
    engine = StubEngine("cuda", sizes=(8,))
    engine.tokens(prompts(8, 6), greedy(30))
    stream = engine.driver.run(prompts(8, 6), greedy(50), None)
    for _ in range(8 * 8):
        next(stream)
    before = engine.runner.stats.steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(8 * 20):
            next(stream)
    steps = engine.runner.stats.steps - before
    stream.close()
    calls = Counter(e.name for e in profiler.events() if e.name.startswith("cuda"))
    if not calls:
        pytest.skip("the profiler shows no calls of the driver here")
    waits = {name: n for name, n in calls.items() if "Synchronize" in name}
    # Stopping the profiler synchronises the device itself.
    assert set(waits) <= {"cudaEventSynchronize", "cudaDeviceSynchronize"} and waits.get("cudaDeviceSynchronize", 0) <= 2, waits
    assert abs(waits["cudaEventSynchronize"] - steps) <= 1, (waits, steps)
    assert abs(calls["cudaGraphLaunch"] - steps) <= 1 and calls["cudaMemcpyAsync"] <= 4, calls


def test_staged_buffers_are_not_rewritten_under_a_copy():
    from rorqual.engine.staging import Staging
    from rorqual.engine.streams import Streams

    staging = Staging(Streams(torch.device("cuda")), n_buffers=3)
    torch.cuda._sleep(200_000_000)  # all copies queue behind it
    found = [staging.upload({"x": np.full(1000, i), "y": np.arange(i, dtype=np.float64)}) for i in range(12)]
    assert 1 <= staging.streams.waits <= 9
    for i, one in enumerate(found):
        assert one["x"].tolist() == [i] * 1000 and one["y"].tolist() == list(range(i))


def test_steps_that_nobody_waits_for():
    """The host runs far ahead of the device and takes the tokens late: no lane may be overwritten, in either direction."""
    engine = StubEngine("cuda", sizes=(4,), burn=30)
    engine.tokens(prompts(4), greedy(4))
    graphs = engine.graphs
    from rorqual.engine.graph_key import GraphKey
    from rorqual.engine.plan import StepPlan

    key = GraphKey(batch=4, context=64)
    copies, expected = [], []
    with torch.inference_mode():
        torch.cuda._sleep(100_000_000)
        for i in range(12):
            ints = {"slots": np.arange(4), "starts": np.arange(4) + i, "counts": np.ones(4)}
            plan = StepPlan(step=i, samples=np.ones(4, dtype=np.bool_), **{k: v.astype(np.int32) for k, v in ints.items()})
            outputs = graphs.run(plan, key, None)
            expected.append(outputs.logits.argmax(-1))
            copies.append(outputs.tokens)
        assert [c.wait().tolist() for c in copies] == [e.tolist() for e in expected]
        assert len({tuple(e.tolist()) for e in expected}) > 1
        assert [int(engine.tables.tokens[1, 2 + i]) for i in range(12)] == [int(e[1]) for e in expected]


def test_borrowed_tensors_see_the_memory_and_do_not_keep_it():
    from rorqual.engine.streams import borrow

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.arange(12, device="cuda").view(3, 4).to(dtype)
        view = borrow(x)
        assert view.data_ptr() == x.data_ptr() and view.dtype == dtype and torch.equal(view, x)
        x += 1
        assert torch.equal(view, x)
    del view, x
    before = torch.cuda.memory_allocated()
    x = torch.zeros(1 << 22, device="cuda")
    views = [borrow(x)]
    del x
    assert torch.cuda.memory_allocated() == before and len(views[0]) == 1 << 22


def test_graphs_share_memory():
    """Twenty graphs take little more than the largest: each of them alone would hold its own logits and temporaries."""
    sizes = tuple(range(400, 420))
    found = []
    for chosen in (sizes[-1:], sizes):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        engine = StubEngine("cuda", sizes=chosen, max_num_seqs=420, max_len=4000, dense=4000, n_pages=4)
        found.append(torch.cuda.memory_reserved() - before)
        assert engine.graphs.stats.graphs == len(chosen)
        del engine
    one, all_of_them = found
    assert 0 < all_of_them < 2 * one, found


# ---- the embedded model


def test_the_embedded_model_keeps_its_tokens():
    from rorqual import LLM, SamplingParams

    prompt_ids = [r["prompt_ids"] for r in json.loads((TINY / "eval" / "reference.json").read_text())["prompts"]]
    found = []
    for args in ({"enforce_eager": True}, {"cuda_graph_bs": (32,), "cuda_graph_capture": "lazy"}):
        with LLM("tiny", device="cuda", dtype="float32", disable_log_stats=True, max_total_tokens=65536, **args) as llm:
            if llm.engine.runner.graphs is None and "enforce_eager" not in args:
                pytest.skip("the model's steps cannot be captured here")
            outputs = llm.generate(prompt_ids, SamplingParams(temperature=0.0, max_tokens=48), use_tqdm=False)
            found.append([o.outputs[0].token_ids for o in outputs])
            row = llm.stats()["ranks"][0]
            assert (row["graph_steps"] > 0) == ("enforce_eager" not in args)
            assert row["host_waits"] <= row["steps"] + 4  # where others use the GPU too, a lane may be waited for
    assert found[0] == found[1]


def test_released_graphs_are_not_replayed():
    engine = StubEngine("cuda", sizes=(2,))
    engine.tokens(prompts(2), greedy(4))
    engine.streams.release_graphs()
    with pytest.raises(RuntimeError, match="capture"):
        engine.tokens(prompts(2), greedy(4))
