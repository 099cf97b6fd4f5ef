"""Resolving, seeding and emptying hot buffers on a GPU against the plain PyTorch versions."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
pytest.importorskip("triton")

from rorqual.attention.kernels import release_hot, release_hot_torch, resolve_rows, resolve_rows_torch, seed_hot, seed_hot_torch  # noqa: E402
from rorqual.attention.kv.tier import TierCounter  # noqa: E402
from tests.gpu.kernels.hot_state import HotState, Shape  # noqa: E402

DEVICE = torch.device("cuda")
STATE = ("hot_positions", "hot_stamps", "counters")
SHAPES = {
    "one row": Shape(requests=5),
    "four rows": Shape(requests=2, queries=4, lease=128),
    "exact lease": Shape(requests=3, lease=32),
    "long": Shape(requests=2, context=300_000),  # too long for tables in shared memory
    "short": Shape(requests=3, k=500, context=2047, lease=8, absent=0.5),
    "few": Shape(requests=3, k=8, page=4, context=201, lease=4, absent=0.7),  # tables of a few words lie aligned too
}


def resolve(state, positions, op, **more):
    state.stamp += 1
    return op(*state.arguments(positions), page_size=state.shape.page, row_bytes=656, **more)


def same(found, plain):
    assert torch.equal(found.rows, plain.rows)
    assert torch.equal(found.count, plain.count)
    there = torch.arange(plain.source.shape[1], device=DEVICE) < plain.count[:, None]
    assert torch.equal(found.source[there], plain.source[there])
    assert torch.equal(found.target[there], plain.target[there])


@pytest.mark.parametrize("policy", resolve_rows_torch.POLICIES)
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_plain_version_over_many_steps(name, policy):
    shape = SHAPES[name]
    ours, plain = HotState(shape, 1, DEVICE), HotState(shape, 1, DEVICE)
    positions = ours.choose()
    rows = len(positions)
    for turn in range(7):
        scores = torch.randn(rows, shape.context + 64, device=DEVICE)
        if turn % 2:
            scores = scores.relu()
        positions = ours.next(positions, 0.13)
        if turn == 3:  # -1 and repeated positions in between
            positions[:, 5:400:7] = -1
            positions[:, 11:400:10] = positions[:, 10:399:10]
        ours.moving[0] = plain.moving[0] = int(turn == 4)
        valid = {} if turn % 3 else {"n_valid": torch.tensor([rows - shape.queries], dtype=torch.int32, device=DEVICE)}
        ours.scratch.random_(-3, 2 * shape.hot)
        found = resolve(ours, positions, resolve_rows.resolve_rows, scores=scores, policy=policy, **valid)
        same(found, resolve(plain, positions, resolve_rows_torch.resolve_rows, scores=scores, policy=policy, **valid))
        for field in STATE:
            assert torch.equal(getattr(ours, field), getattr(plain, field)), field
        ours.copy(found)
        if not valid:
            ours.check(positions, found)
        held = ours.hot_positions[ours.slots].sort(1).values
        assert not ((held[:, 1:] == held[:, :-1]) & (held[:, 1:] >= 0)).any()
    assert ours.counters[TierCounter.UNWRITTEN] == 0
    assert ours.counters[TierCounter.MISSES] > 0


@pytest.mark.parametrize("policy", resolve_rows_torch.POLICIES)
@pytest.mark.parametrize(("lease", "pages"), [(128, [64, 65, 128, 40, 96]), (511, [64, 511, 65, 200, 32])])
def test_leases_that_have_grown(lease, pages, policy):
    """Some requests have the usual hot rows, others more of them."""
    shape = Shape(requests=len(pages), lease=lease)
    ours, plain = HotState(shape, 8, DEVICE), HotState(shape, 8, DEVICE)
    for state in (ours, plain):
        for slot, count in zip(state.slots.tolist(), pages, strict=True):
            state.hot_pages[slot, count:] = -1
    positions = ours.choose()
    for _ in range(12):  # the windows of a grown lease meet its last rows only after some turns
        scores = torch.randn(len(positions), shape.context + 64, device=DEVICE)
        positions = ours.next(positions, 0.3)
        more = {"scores": scores, "policy": policy, "usual": 4096}
        found = resolve(ours, positions, resolve_rows.resolve_rows, **more)
        same(found, resolve(plain, positions, resolve_rows_torch.resolve_rows, **more))
        for field in STATE:
            assert torch.equal(getattr(ours, field), getattr(plain, field)), field
        ours.copy(found)
        ours.check(positions, found)
    held = (ours.hot_positions[ours.slots] >= 0).sum(1).tolist()
    assert held[1] > held[0] == 64 * 64 and ours.counters[TierCounter.UNWRITTEN] == 0


@pytest.mark.parametrize("policy", resolve_rows_torch.POLICIES)
@pytest.mark.parametrize("name", ["one row", "four rows"])
def test_replays_of_a_graph_are_equal(name, policy):
    state = HotState(SHAPES[name], 2, DEVICE)
    positions = state.choose()
    positions[:, 3:500:9] = positions[:, 2:499:9]
    state.fill(positions, 0.85)
    scores = torch.randn(len(positions), state.shape.context, device=DEVICE)
    before = {field: getattr(state, field).clone() for field in STATE}
    resolve(state, positions, resolve_rows.resolve_rows, scores=scores, policy=policy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = resolve(state, positions, resolve_rows.resolve_rows, scores=scores, policy=policy)
    first = None
    for _ in range(25):
        for field, value in before.items():
            getattr(state, field).copy_(value)
        for tensor in (found.rows, found.source, found.target, found.count):
            tensor.fill_(-777)
        state.scratch.random_(-3, 2 * state.shape.hot)
        state.stamp.fill_(200)
        graph.replay()
        there = torch.arange(found.source.shape[1], device=DEVICE) < found.count[:, None]
        seen = [found.rows, found.source[there], found.target[there], found.count, *(getattr(state, field) for field in STATE)]
        seen = [x.clone() for x in seen]
        first = seen if first is None else first
        assert all(torch.equal(a, b) for a, b in zip(seen, first, strict=True))
    assert not (found.rows == -777).any()
    assert int(found.count.sum()) > 0


def test_many_requests():
    """More programs than multiprocessors; each as if alone."""
    state, plain = HotState(Shape(requests=300, context=8000), 3, DEVICE), HotState(Shape(requests=300, context=8000), 3, DEVICE)
    positions = state.choose()
    for world in (state, plain):
        world.random.manual_seed(5)
        world.fill(positions, 0.8)
    found = resolve(state, positions, resolve_rows.resolve_rows)
    same(found, resolve(plain, positions, resolve_rows_torch.resolve_rows))
    for field in STATE:
        assert torch.equal(getattr(state, field), getattr(plain, field)), field
    state.copy(found)
    state.check(positions, found)


def test_offsets_past_2_to_the_31_elements():
    """Hot buffers of the last slots, and scratch rows, lie past what 32 bits address."""
    state = HotState(Shape(requests=2), 4, DEVICE)
    slots, far = state.hot_positions.shape[0], (1 << 31) // state.shape.hot + 9
    for field in ("hot_positions", "hot_stamps"):
        big = torch.empty(far + slots, state.shape.hot, dtype=torch.int32, device=DEVICE)
        big[far:] = getattr(state, field)
        setattr(state, field, big)
    state.hot_pages = torch.cat((torch.full((far, state.shape.lease), -1, dtype=torch.int32, device=DEVICE), state.hot_pages))
    state.slots += far
    buffer = torch.empty((1 << 31) + state.scratch.shape[1], dtype=torch.int32, device=DEVICE)
    state.scratch = buffer.as_strided(state.scratch.shape, (1 << 31, 1))
    positions = state.choose()
    for turn in range(3):
        positions = state.next(positions, 0.2)
        found = resolve(state, positions, resolve_rows.resolve_rows)
        state.copy(found)
        state.check(positions, found)
        assert turn == 0 or int(found.count.max()) < 900


@pytest.mark.parametrize("resident", [True, False])
def test_seeding_equals_the_plain_version(resident):
    shape = Shape(requests=2, absent=0.6)
    ours, plain = HotState(shape, 6, DEVICE), HotState(shape, 6, DEVICE)
    positions = [ours.choose()[:1]]
    for _ in range(7):
        positions.append(ours.next(positions[-1], 0.3))
    window = torch.cat(positions)
    done = []
    for state, op in ((ours, seed_hot.seed_hot), (plain, seed_hot_torch.seed_hot)):
        tables = (state.latent[0], state.host[0], state.hot_pages, state.hot_positions, state.hot_stamps, state.stamp, state.scratch)
        done.append(op(window, state.slots[:1], *tables, page_size=shape.page, seed_resident=resident))
    n = int(done[1].count)
    assert n == int(done[0].count) > 2000
    assert torch.equal(done[0].source[:, :n], done[1].source[:, :n]) and torch.equal(done[0].target[:, :n], done[1].target[:, :n])
    assert torch.equal(ours.hot_positions, plain.hot_positions) and torch.equal(ours.hot_stamps, plain.hot_stamps)


def test_release_equals_the_plain_version():
    held = torch.randint(0, 1000, (61, 9, 4096), dtype=torch.int32, device=DEVICE)
    other = held.clone()
    ranges = torch.tensor([[8, 0, 64], [2, 60, 64], [2, 3, 3], [0, 1, 2]], dtype=torch.int32, device=DEVICE)
    arguments = [ranges[:, i].contiguous() for i in range(3)]
    release_hot.release_hot(held, *arguments, page_size=64)
    release_hot_torch.release_hot(other, *arguments, page_size=64)
    assert torch.equal(held, other)
