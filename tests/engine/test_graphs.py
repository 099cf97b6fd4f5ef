"""Decode steps from captured graphs: the rule that chooses them, padding, what is sampled after them, and agreement over replicas."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rorqual.attention.batch import AttentionBatch
from rorqual.attention.kv.hot import HotShape, allocate_tables
from rorqual.engine import assembly, tables
from rorqual.engine.config import EngineConfig, check_config
from rorqual.engine.graph_key import NOT_DECODE, GraphKey, choose_graph, context_classes, decode_context, graph_sizes
from rorqual.engine.graphs import DecodeGraphs
from rorqual.engine.lanes import Lanes
from rorqual.engine.models.build import Stage
from rorqual.engine.offload.tier_places import TierPlaces
from rorqual.engine.plan import StepPlan
from rorqual.engine.sampling.sample_rows import SampleRows
from rorqual.engine.step_inputs import InputLayout, StepInputs, block_size
from tests.checkpoints import checkpoint
from tests.engine.parity import greedy_tokens, ragged_prompts
from tests.engine.stub import FakeStreams, StubEngine, greedy, mixed_params, prompts
from tests.ranks import run_ranks


def i32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


# ---- the rule


def test_sizes():
    whole = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
    assert graph_sizes(256, None, None) == graph_sizes(1000, None, None) == whole
    assert graph_sizes(100, None, None)[-3:] == (80, 96, 100) and graph_sizes(600, 512, None)[-2:] == (480, 512)
    assert graph_sizes(20, None, None) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(256, 12, None) == (1, 2, 4, 8, 12)
    assert graph_sizes(1, None, None) == (1,) and graph_sizes(3, None, None) == (1, 2, 3)
    assert graph_sizes(10, None, [16, 3]) == (3, 10)
    assert graph_sizes(512, None, [512]) == (512,) and graph_sizes(512, 300, [512]) == (300,)  # named sizes know no default limit
    assert graph_sizes(4, None, []) == (1, 2, 4)
    for wrong in ({"cuda_graph_max_bs": 0}, {"cuda_graph_bs": (4, 0)}):
        with pytest.raises(ValueError, match="must be at least 1, found 0; use --enforce-eager"):
            check_config(EngineConfig(model="m", **wrong))


def test_contexts():
    assert context_classes(163840, 2048) == (2048, 16384, 163840)
    assert context_classes(2048, 2048) == (2048,) and context_classes(100, None) == (100,)
    assert context_classes(4096, 2048) == (2048, 4096)


def plan_of(starts, counts, samples=None) -> StepPlan:
    flags = np.ones(len(starts), dtype=np.bool_) if samples is None else np.array(samples, dtype=np.bool_)
    return StepPlan(step=0, slots=i32(*range(len(starts))), starts=i32(*starts), counts=i32(*counts), samples=flags)


def test_what_a_replica_says_of_its_plan():
    assert decode_context(plan_of([5, 9], [1, 1])) == 10
    assert decode_context(StepPlan(step=0)) == 0
    assert decode_context(plan_of([5, 0], [1, 3])) == NOT_DECODE
    assert decode_context(plan_of([5, 0], [1, 1], [True, False])) == NOT_DECODE  # a prompt cut to one token samples nothing


@pytest.mark.parametrize(
    ("tokens", "contexts", "expected"),
    [
        ([3], [10], (4, 16)),
        ([4], [16], (4, 16)),
        ([5], [17], (8, 64)),
        ([9], [10], None),  # more rows than the largest graph
        ([3], [65], None),  # longer than the longest
        ([3], [NOT_DECODE], None),
        ([1, 4], [60, 3], (4, 64)),  # the largest of all replicas, in both
        ([0, 2], [0, 3], (2, 16)),  # a replica without rows pads
        ([0, 2], [0, NOT_DECODE], None),
        ([2, 30], [3, NOT_DECODE], None),
        ([0, 0], [0, 0], None),
        ([], [], None),
    ],
)
def test_the_rule(tokens, contexts, expected):
    key = choose_graph(i32(*tokens), i32(*contexts), (1, 2, 4, 8), (16, 64))
    assert key == (None if expected is None else GraphKey(batch=expected[0], context=expected[1]))


@pytest.mark.parametrize(
    ("offloaded", "contexts", "expected"),
    [
        ([0], [60], GraphKey(batch=4, context=64)),
        ([1], [60], GraphKey(batch=4, context=64, offloaded=True)),
        ([1], [16], GraphKey(batch=4, context=16)),  # every key is read, so every page is on the device
        ([0, 1], [60, 3], GraphKey(batch=4, context=64, offloaded=True)),  # replicas capture and replay alike
        ([0, 1], [0, 60], GraphKey(batch=4, context=64, offloaded=True)),
    ],
)
def test_the_rule_with_offloading(offloaded, contexts, expected):
    tokens = i32(*[3] * len(contexts))
    assert choose_graph(tokens, i32(*contexts), (1, 2, 4, 8), (16, 64), i32(*offloaded), dense=16) == expected


def test_the_block_of_moves():
    tables = allocate_tables(
        HotShape(
            n_slots=3, n_layers=1, lease_pages=2, page_size=4, n_logical_pages=10, max_requests=3, max_context=20, chosen_rows=8
        ),
        "cpu", dummy_device_page=6,
    )  # fmt: skip
    places = TierPlaces.of(tables)
    layout = InputLayout(spare_slot=3, table_width=5, dummy_page=10, places=places)
    plan = plan_of([30], [1])
    plan.device_pages, plan.host_pages = np.array([[4, 2], [7, -1]], np.int32), np.array([[7, 5]], np.int32)
    plan.moving = np.array([[1, 1]], np.int32)
    assert layout.fits(plan, 2) and layout.moves(2) == 18
    block = torch.full((block_size(2, 18),), 77)
    layout.pack(block.numpy(), plan, None, 2)
    views = StepInputs.views(block, 2, 18)
    places.put(views.place_at, views.place, views.moving_at, views.moving)
    assert places.tables.device_page.tolist() == [-1, -1, -1, -1, 2, -1, -1, -1, -1, -1, 6]
    assert places.tables.host_page.tolist() == [-1] * 7 + [5, -1, -1, -1] and places.tables.moving.tolist() == [0, 1, 0, 0]
    plan.hot_pages = np.array([[2, 0, 3], [2, 1, 4]], np.int32)
    assert not layout.fits(plan, 2)  # hot rows are emptied before the graph, too
    at, values = (torch.from_numpy(x) for x in places.changes(plan))
    places.put(at, values, views.moving_at, views.moving)
    assert places.tables.hot_pages.tolist() == [[-1, -1], [-1, -1], [3, 4], [-1, -1]]
    layout.pack(block.numpy(), plan, None, 2)  # applied apart: the block changes nothing
    assert set(views.place_at.tolist()) == {places.idle_place} and set(views.moving_at.tolist()) == {3}


def test_the_block_of_inputs():
    layout = InputLayout(spare_slot=9, table_width=5, dummy_page=77)
    plan = plan_of([30, 7, 12], [1, 1, 1])
    plan.slots, plan.pages = i32(2, 0, 8), np.array([[2, 4, 60], [8, 1, 61]], dtype=np.int32)
    rows = SampleRows(random=np.array([0, 2]), penalised=np.array([1]), banned=False, logprobs=-1)
    block = torch.full((block_size(8),), 5)
    layout.pack(block.numpy(), plan, rows, 4)
    views = StepInputs.views(block, 4)
    assert views.n_valid.tolist() == [3] and views.n_valid.dtype == torch.int32
    assert views.slots.tolist() == [2, 0, 8, 9] and views.starts.tolist() == [30, 7, 12, 0]
    assert views.page_at.tolist() == [14, 41, 45, 45] and views.page.tolist() == [60, 61, 77, 77]
    assert views.random.tolist()[:2] == [0, 2] and views.penalised.tolist()[:1] == [1]
    layout.pack(block.numpy(), StepPlan(step=1), None, 2)
    views = StepInputs.views(block, 2)
    assert (views.n_valid.tolist(), views.slots.tolist(), views.starts.tolist(), views.page.tolist()) == ([0], [9, 9], [0, 0], [77, 77])
    many = plan_of([1], [1])
    many.pages = np.zeros((2, 3), dtype=np.int32)
    assert layout.fits(plan, 4) and not layout.fits(many, 1)


def test_what_keeps_steps_eager():
    def why(device="cuda", pp=1, tp=1, capturable=True, **settings):
        grid = SimpleNamespace(device=torch.device(device), spec=SimpleNamespace(pp=pp, tp=tp))
        return assembly.why_eager(EngineConfig(model="m", **settings), grid, SimpleNamespace(capturable=capturable))

    assert why() is None
    assert "no CUDA device" in why(device="cpu") and "enforce_eager" in why(enforce_eager=True)
    assert "pipeline" in why(pp=2) and "tensor parallelism" in why(tp=2) and "waits for the device" in why(capturable=False)


# ---- the loop, around a model of exact arithmetic

SETTINGS = [
    {"sizes": (1, 2, 4, 8)},
    {"sizes": (8,)},
    {"sizes": (3, 8), "page_size": 1},
    {"sizes": (2, 4)},  # larger batches run eagerly
    {"sizes": (1, 2, 4, 8), "overlap": False, "lazy": True},
    {"sizes": (1, 2, 4, 8), "max_num_batched_tokens": 7, "page_size": 16},
    {"sizes": (1, 2, 4, 8), "n_pages": 40, "debug": True},  # preemption; freed pages are poisoned
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_graphs_keep_tokens(settings):
    plain = {k: v for k, v in settings.items() if k not in ("sizes", "lazy", "debug")}
    texts = prompts(20)
    expected = StubEngine(**plain)
    engine = StubEngine(**settings)
    for params in (greedy(20), mixed_params(20)):
        assert engine.tokens(texts, params) == expected.tokens(texts, params)
    stats = engine.runner.stats
    assert expected.runner.stats.graph_steps == 0 < stats.graph_steps < stats.steps
    assert engine.graphs is not None and engine.streams.replays == stats.graph_steps == engine.graphs.stats.replays
    if "lazy" in settings:
        assert 0 < engine.graphs.stats.graphs < len(engine.graphs.sizes) * len(engine.graphs.contexts)


def test_log_probabilities_come_from_the_graphs_logits():
    texts, params = prompts(9), [greedy(8, logprobs=2, prompt_logprobs=1) for _ in range(9)]
    engine, expected = StubEngine(sizes=(1, 2, 4, 8)), StubEngine()
    for ours, theirs in zip(engine.outputs(texts, params), expected.outputs(texts, params), strict=True):
        assert ours.outputs[0].logprobs == theirs.outputs[0].logprobs and ours.outputs[0].logprobs
        assert ours.prompt_logprobs == theirs.prompt_logprobs
    assert engine.runner.stats.graph_steps > 0


def test_padding_touches_nothing_of_requests():
    engine = StubEngine(sizes=(8,))
    engine.tokens(prompts(3), greedy(4))
    assert engine.tables.pages[engine.tables.spare_slot].unique().tolist() == [engine.tables.dummy_page]
    assert int(engine.tables.tokens[engine.tables.spare_slot, 0]) == 0
    before = engine.cache.rows.clone(), engine.tables.tokens.clone(), engine.tables.pages.clone()
    for key in [GraphKey(batch=8, context=c) for c in engine.graphs.contexts]:
        plan = StepPlan(step=0, dp_tokens=i32(0, 1), dp_context=i32(0, key.context))
        assert engine.graphs.key(plan) == key
        with torch.inference_mode():
            engine.graphs.run(plan, key, None)
    after = engine.cache.rows, engine.tables.tokens, engine.tables.pages
    spare, page = engine.tables.spare_slot, engine.cache.page_size
    assert torch.equal(before[0][:-page], after[0][:-page])  # the dummy page is the last one
    assert torch.equal(before[1][:spare], after[1][:spare]) and torch.equal(before[2], after[2])


def test_a_step_uploads_nothing_beside_its_lane():
    engine = StubEngine(sizes=(1, 2, 4, 8))
    sent: list[int] = []
    upload = engine.tables.staging.upload
    engine.tables.staging.upload = lambda *a: (sent.append(1), upload(*a))[1]
    execute, counts = engine.runner.execute, []

    def counted(plan):
        before = len(sent)
        pending = execute(plan)
        if engine.graphs.key(plan) is not None and not len(plan.new_ints):
            counts.append(len(sent) - before)
        return pending

    engine.runner.execute = counted
    engine.tokens(prompts(8), [greedy(24, temperature=0.7 * (i % 2), seed=i, logprobs=i % 3 or None) for i in range(8)])
    assert len(counts) > 10 and set(counts) == {0}


def test_lanes_are_used_in_turn_and_tokens_outlive_them():
    streams = FakeStreams(torch.device("cpu"))
    lanes = Lanes(streams, block=6, batch=3, count=2)
    copies = []
    for step in range(5):
        block = lanes.take()
        block[:3] = step
        lane = step % 2
        assert lanes.inputs[lane, 0] == step and (step == 0 or lanes.inputs[1 - lane, 0] == step - 1)
        lanes.tokens[lane] = 10 * step + torch.arange(3)
        copies.append(lanes.launched(2))
    assert [c.wait().tolist() for c in copies] == [[10 * s, 10 * s + 1] for s in range(5)]
    lanes.rest(np.full(4, 99))
    assert lanes.inputs[:, :4].eq(99).all() and lanes.inputs[1, 4] == 0
    lanes.counter += 7
    lanes.resume()
    assert int(lanes.counter) == lanes.steps == 5 and copies[4].wait().tolist() == [40, 41]


def dp_job(settings):
    torch.set_num_threads(1)
    engine = StubEngine(dp=2, **settings)
    steps = []
    execute = engine.runner.execute

    def noted(plan):
        steps.append((plan.step, None if engine.graphs is None else engine.graphs.key(plan), plan.n_rows))
        return execute(plan)

    engine.runner.execute = noted
    texts = prompts(11)
    params = [greedy(4 + 3 * i) for i in range(11)]  # the last request runs alone: one replica has nothing to do
    found = engine.tokens(texts, params)
    engine.grid.close()
    return found, steps


def test_replicas_choose_alike():
    (expected, _), _ = run_ranks(dp_job, 2, {})
    (found, first), (_, second) = run_ranks(dp_job, 2, {"sizes": (1, 2, 4, 8)})
    assert found == expected
    assert [s[:2] for s in first] == [s[:2] for s in second]
    keys = [key for _, key, _ in first]
    assert None in keys and {k.batch for k in keys if k is not None} >= {1, 2, 4}
    assert any(key is not None and 0 in (a, b) for (_, key, a), (_, _, b) in zip(first, second, strict=True))


def test_a_failed_capture_says_what_to_do(monkeypatch):
    def failing(self, body):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(FakeStreams, "capture", failing)
    with pytest.raises(RuntimeError, match="a decode step of 2 rows and contexts up to 64 .* --enforce-eager .*not permitted"):
        StubEngine(sizes=(2,))


# ---- the real model, with graphs played on the CPU


def test_the_engine_with_played_graphs_keeps_tokens(monkeypatch):
    def batch(entry, positions, rows, page_size, max_context, n_valid):
        return AttentionBatch.build(positions.numpy(), np.ones(len(rows)), entry.page_table, page_size, positions.device)

    monkeypatch.setattr(assembly, "uses_graphs", lambda *a: True)
    monkeypatch.setattr(Stage, "capturable", True)
    monkeypatch.setattr(assembly, "DecodeGraphs", partial(DecodeGraphs, make_batch=batch))
    monkeypatch.setattr(tables, "Streams", FakeStreams)
    args = {"prompts": ragged_prompts(12), "n": 24, "max_num_seqs": 8, "cuda_graph_bs": (3, 8), "max_model_len": 256}
    replayed = []
    found = greedy_tokens(checkpoint("v32"), check=lambda llm: replayed.append(llm.stats()["ranks"][0]), **args)
    monkeypatch.undo()
    assert found == greedy_tokens(checkpoint("v32"), **args)
    (row,) = replayed
    assert 0 < row["graph_steps"] < row["steps"] and row["graphs"]["graphs"] == 4
