"""The attention rig at toy size, by the plain twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rorqual.attention.kv.tier import TierCounter
from rorqual.attention.ops import AttentionOps
from rorqual.launch.bench.kv.buffer import simulate
from rorqual.launch.bench.kv.clock import check, measure
from rorqual.launch.bench.kv.copies import copy_seconds
from rorqual.launch.bench.kv.memory import SharedHost
from rorqual.launch.bench.kv.policies import best
from rorqual.launch.bench.kv.record import save
from rorqual.launch.bench.kv.rig import Rig
from rorqual.launch.bench.kv.rig_command import TOY
from rorqual.launch.bench.kv.rig_rows import rows_of
from rorqual.launch.bench.kv.shape import RigShape
from rorqual.launch.bench.kv.traces import PUBLISHED, scaled, steps
from rorqual.launch.bench.kv.ways import WAYS

CPU = torch.device("cpu")
SHAPE = replace(TOY, requests=3)


@pytest.fixture(scope="module")
def rig():
    rig = Rig(SHAPE, CPU, AttentionOps.load("torch"))
    yield rig
    rig.close()


@pytest.mark.parametrize("way", ["serial", "beside", "parts", "waves", "halves", "hits"])
def test_attention_over_fetched_rows_is_that_of_resident_rows(rig, way):
    check(rig, way, steps=5)


def test_a_fetch_that_is_left_out_shows(rig):
    with pytest.raises(AssertionError, match="layer 0: attention over fetched rows"):
        for pool in rig.memory.pools:
            pool[: SHAPE.requests * SHAPE.hot_rows] = 0xFF
        check(rig, "resolve")


def test_every_chosen_row_is_counted_once(rig):
    timing = measure(rig, "serial", warm_up=3, steps=4)
    found = sum(timing.count(c) for c in (TierCounter.RESIDENT, TierCounter.HITS, TierCounter.MISSES))
    assert (found == SHAPE.requests * SHAPE.k).all()
    assert (timing.count(TierCounter.UNWRITTEN) == 0).all()
    assert torch.equal(timing.count(TierCounter.BYTES), timing.count(TierCounter.MISSES) * SHAPE.row_bytes)
    assert len(timing.step_us) == 4 and timing.us > 0


def test_a_cold_step_fetches_everything(rig):
    timing = measure(rig, "tier", warm_up=1, steps=2, cold=True)
    assert timing.missed(SHAPE.requests * SHAPE.k) > 0.95


def test_misses_are_those_of_the_simulated_buffer():
    shape = replace(TOY, layers=1, trace_kinds=1, steps=24)
    rig = Rig(shape, CPU, AttentionOps.load("torch"))
    timing = measure(rig, "tier", warm_up=6, steps=16)
    rig.close()
    trace = list(steps(scaled(PUBLISHED, context=shape.context - shape.steps, k=shape.k), shape.steps))[1:23]
    fetched = timing.missed(shape.k) + float(timing.count(TierCounter.RESIDENT).sum()) / shape.k
    assert 100.0 * fetched == pytest.approx(simulate(trace, shape.hot_rows, best(), warm_up=6).missed, abs=3.5)


def test_rows_name_what_was_measured(rig):
    timings = {way: measure(rig, way, warm_up=1, steps=2) for way in WAYS}
    rows = {row.name: row for row in rows_of(SHAPE, timings)}
    assert {"attention of a step, resident", "resolve and fetch alone", "added to a layer, serial", "misses of a layer and step"} <= set(
        rows
    )
    assert rows["unwritten of a layer and step"].met
    assert rows["attention of a step, serial"].params["missed_percent"] > 0


def test_recorded_choices_are_scaled_up(tmp_path):
    traces = [list(steps(scaled(PUBLISHED, context=100, k=8, seed=layer), 16)) for layer in range(2)]
    save(traces, tmp_path / "t.npz")
    shape = replace(TOY, trace=str(tmp_path / "t.npz"))
    rig = Rig(shape, CPU, AttentionOps.load("torch"))
    positions, scores = rig.feed.of_layer(1)
    assert positions[0].tolist() == [4 * p + j for p in traces[1][0].chosen.tolist() for j in range(4)]
    assert scores[0, positions[0, 0]] == traces[1][0].scores[traces[1][0].chosen[0]]
    check(rig, "serial", steps=2)
    rig.close()
    with pytest.raises(ValueError, match="which do not make 2 layers and 16 steps of 32 among 256"):
        Rig(replace(shape, context=256), CPU, AttentionOps.load("torch"))


def test_one_host_pool_serves_shapes_of_one_sort():
    with SharedHost(CPU) as shared:
        first = shared.pool(SHAPE)
        assert shared.pool(replace(SHAPE, requests=1)) is first
        assert copy_seconds(first, 1 << 16, CPU) < copy_seconds(first, 1 << 16, CPU, gb_per_s=0.0005)
        other = shared.pool(replace(SHAPE, context=256))
        assert other is not first and first.closed


def test_more_requests_than_memory_share_pages():
    shape = replace(TOY, requests=12, host_bytes=1 << 17, device_bytes=1 << 17)
    assert shape.host_pages < shape.requests * shape.pages
    rig = Rig(shape, CPU, AttentionOps.load("torch"))
    check(rig, "serial", steps=2)
    rig.close()


def test_wrong_sizes_are_refused():
    for changes, message in (
        ({"hot_rows": 1024}, "a hot buffer of 1024 rows cannot hold the 2048 rows of a step"),
        ({"context": 65_537}, "context must be whole pages of 64 rows"),
        ({"trace": "easy"}, "unknown trace 'easy'; use one of published, hard, or a recorded"),
        ({"context": 2048}, "a context of 2048 leaves nothing to choose"),
    ):
        with pytest.raises(ValueError, match=message):
            RigShape(**{"requests": 1, **changes})
