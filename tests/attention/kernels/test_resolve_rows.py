"""Resolving chosen rows: the plain version against tagged pools, the kernel in the interpreter against the plain version."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import resolve_rows, resolve_rows_torch  # noqa: E402
from rorqual.attention.kernels.resolve_rows_sizes import CAPACITY, CELLS, CHUNK, list_bytes, shared_groups, totals_bytes  # noqa: E402
from rorqual.attention.kv.tier import TierCounter  # noqa: E402
from tests.attention.kernels.tier_problem import Sizes, World  # noqa: E402
from tests.kernels.interpreter import repair  # noqa: E402
from tests.kernels.offline import Spec, compile_reports  # noqa: E402

repair()

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
ROW_BYTES = 656


def fresh(world: World) -> World:
    """All the requests begun, some of them with absent pages."""
    z = world.sizes
    for request in range(z.requests):
        world.extend(request, min(z.context, z.k + 3 + int(world.integers(z.context - z.k))))
        for page in range(world.n_pages):
            world.mirror(request, page)
    world.wander()
    return world


def step(world, resolve, positions, *, valid=None, **more):
    world.stamp += 1
    given = {} if valid is None else {"n_valid": torch.tensor([valid], dtype=torch.int32)}
    return resolve(*world.arguments(positions), page_size=world.sizes.page, row_bytes=ROW_BYTES, **given, **more)


def copies(found):
    return [
        list(zip(s[:n], t[:n], strict=True))
        for s, t, n in zip(found.source.tolist(), found.target.tolist(), found.count.tolist(), strict=True)
    ]


def check_counters(world, before, positions, found, valid):
    added = dict(zip(TierCounter, (world.counters - before).tolist(), strict=True))
    chosen = int((positions[:valid] >= 0).sum())
    parts = [TierCounter.RESIDENT, TierCounter.HITS, TierCounter.MISSES, TierCounter.MOVED, TierCounter.UNWRITTEN]
    assert sum(added[c] for c in parts) == chosen
    assert added[TierCounter.MISSES] + added[TierCounter.MOVED] == int(found.count.sum())
    assert added[TierCounter.BYTES] == added[TierCounter.MISSES] * ROW_BYTES
    assert added[TierCounter.EVICTIONS] <= int(found.count.sum())
    assert added[TierCounter.UNWRITTEN] == 0


SIZES = {
    "one row": Sizes(),
    "three rows": Sizes(queries=3, k=5, lease=4),
    "exact lease": Sizes(k=8, lease=2),
    "large pages": Sizes(page=16, lease=2, k=7),
    "grown leases": Sizes(lease=7, context=80),
}
USUAL = {"grown leases": 13}  # hot rows that most leases have at most; the kernel takes 16


@pytest.mark.parametrize("policy", resolve_rows_torch.POLICIES)
@pytest.mark.parametrize("name", SIZES)
def test_plain_version_reads_every_chosen_row(name, policy):
    for seed in range(2):
        world = fresh(World(SIZES[name], seed))
        z, rows = world.sizes, world.sizes.requests * world.sizes.queries
        total = torch.zeros(len(TierCounter))
        for turn in range(20):
            world.wander()
            positions = world.choose(spoil=turn % 2 == 1)
            valid = rows if turn % 3 else rows - z.queries
            before = world.counters.clone()
            scores = torch.randn(rows, z.context)
            found = step(world, resolve_rows_torch.resolve_rows, positions, valid=valid, scores=scores, policy=policy)
            used = world.hot_stamps[world.slots] == world.stamp
            world.copy(found.source, found.target, found.count)
            world.check(positions, found, valid)
            check_counters(world, before, positions, found, valid)
            assert int(used.sum()) <= rows * z.k
            total += world.counters - before
        assert (total[[TierCounter.RESIDENT, TierCounter.HITS, TierCounter.MISSES, TierCounter.MOVED, TierCounter.EVICTIONS]] > 0).all()


@interpreted
@pytest.mark.parametrize("policy", resolve_rows_torch.POLICIES)
@pytest.mark.parametrize("name", SIZES)
def test_kernel_equals_the_plain_version(name, policy):
    ours, plain = fresh(World(SIZES[name], 7)), fresh(World(SIZES[name], 7))
    z, rows, usual = ours.sizes, ours.sizes.requests * ours.sizes.queries, USUAL.get(name)
    widths = set()
    for turn in range(6):
        scores = torch.randn(rows, z.context).round(decimals=1)
        valid = rows if turn % 3 else rows - z.queries
        done = []
        for world, resolve in ((ours, resolve_rows.resolve_rows), (plain, resolve_rows_torch.resolve_rows)):
            world.wander()
            positions = world.choose(spoil=turn % 2 == 1)
            done.append(step(world, resolve, positions, valid=valid, scores=scores, policy=policy, usual=usual))
            world.copy(done[-1].source, done[-1].target, done[-1].count)
        ours.scratch[:] = torch.randint(-9, 2 * z.lease * z.page, ours.scratch.shape)  # another layer's
        assert torch.equal(done[0].rows, done[1].rows)
        assert copies(done[0]) == copies(done[1])
        for name in ("hot_positions", "hot_stamps", "counters"):
            assert torch.equal(getattr(ours, name), getattr(plain, name)), name
        ours.check(positions, done[0], valid)
        widths |= set((ours.hot_pages[ours.slots] >= 0).sum(1).tolist())
    assert usual is None or min(widths) <= 4 < max(widths)


BOTH = pytest.mark.parametrize(
    "resolve", [resolve_rows_torch.resolve_rows, pytest.param(resolve_rows.resolve_rows, marks=interpreted)], ids=["plain", "kernel"]
)


def one_request(**changes) -> World:
    world = World(replace(Sizes(requests=1, lease=2, page=4, k=8, context=40), **changes), 3)
    world.extend(0, 40)
    for page in range(world.n_pages):
        world.mirror(0, page)
        world.drop(0, page)
    world.lease(0, 2)
    return world


def row(*positions: int) -> torch.Tensor:
    return torch.tensor([[*positions, *[-1] * (8 - len(positions))]], dtype=torch.int32)


@BOTH
def test_least_recently_used_goes_first_and_ties_go_by_hot_row(resolve):
    world = one_request()
    step(world, resolve, row(0, 1, 2, 3))
    step(world, resolve, row(10, 11, 12, 13))
    assert world.hot_positions[world.slots[0]].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    step(world, resolve, row(1, 20, 21, 22, 23))  # 0, 2, 3 are oldest, then the lowest of the others
    assert world.hot_positions[world.slots[0]].tolist() == [20, 1, 21, 22, 23, 11, 12, 13]
    assert world.counters[TierCounter.EVICTIONS] == 4


@BOTH
def test_lowest_score_goes_first(resolve):
    world = one_request()
    step(world, resolve, row(0, 1, 2, 3, 4, 5, 6, 7), scores=torch.zeros(1, 40), policy="score")
    scores = torch.full((1, 40), 5.0)
    scores[0, 3], scores[0, 6], scores[0, 1] = -1.0, float("nan"), float("-inf")
    found = step(world, resolve, row(20, 21, 22), scores=scores, policy="score")
    assert world.hot_positions[world.slots[0]].tolist() == [0, 20, 2, 21, 4, 5, 22, 7]
    world.copy(found.source, found.target, found.count)
    scores[0, :] = torch.where(torch.arange(40) % 2 == 0, 0.0, -0.0)  # equal: the lowest hot row
    step(world, resolve, row(30, 31), scores=scores, policy="score")
    assert world.hot_positions[world.slots[0]].tolist() == [30, 31, 2, 21, 4, 5, 22, 7]


@BOTH
def test_a_page_without_any_copy_is_a_fault_that_counts(resolve):
    world = one_request()
    world.host[0, 2] = -1
    found = step(world, resolve, row(0, 8, 8, 9))
    assert world.counters.tolist() == [0, 0, 1, 0, 0, 3, ROW_BYTES]
    assert (found.rows[0, 1:] == -1).all()


@BOTH
def test_a_lease_that_is_too_small_is_a_fault_that_counts(resolve):
    world = one_request()
    world.lease(0, 1)
    found = step(world, resolve, row(0, 1, 2, 2, 3, 4, 5, 5))
    assert found.count.tolist() == [4]
    assert world.counters.tolist() == [0, 1, 4, 0, 0, 3, 4 * ROW_BYTES]
    world.copy(found.source, found.target, found.count)
    assert world.device_rows[found.rows[0, :5].long()].tolist() == world.tag(0, torch.tensor([0, 1, 2, 2, 3])).tolist()
    world.lease(0, 0)
    found = step(world, resolve, row(0, 1))
    assert found.count.tolist() == [0] and (found.rows == -1).all()


@BOTH
def test_moving_requests_fill_from_the_device(resolve):
    world = one_request()
    for page in range(10):
        world.restore(0, page)
    world.host[0, 1] = -1  # not finished: stays on the device whatever comes
    world.moving[0] = 1
    found = step(world, resolve, row(0, 4, 9))
    assert world.counters.tolist() == [1, 0, 0, 2, 0, 0, 0]
    assert (found.source[0, :2] <= -2).all()
    world.copy(found.source, found.target, found.count)
    world.check(row(0, 4, 9), found, 1)
    world.moving[0] = 0
    for page in (0, 2):
        world.drop(0, page)
    found = step(world, resolve, row(0, 4, 9))
    assert found.count.tolist() == [0]
    world.check(row(0, 4, 9), found, 1)


@BOTH
@pytest.mark.parametrize("length", [6, 7, 8, 9, 10])
def test_lengths_about_the_hot_buffer(resolve, length):
    """Every position chosen, with as many of them as hot rows and one or two fewer or more in the context."""
    world = World(Sizes(requests=1, lease=2, page=4, k=8, context=12), length)
    world.extend(0, length)
    for page in range(world.n_pages):
        world.mirror(0, page)
        world.drop(0, page)
    world.lease(0, 2)
    for turn in range(4):
        first = max(0, length - 8) if turn % 2 else 0
        positions = row(*range(first, min(first + 8, length)))
        found = step(world, resolve, positions)
        world.copy(found.source, found.target, found.count)
        world.check(positions, found, 1)
    assert world.counters[TierCounter.UNWRITTEN] == 0


@BOTH
def test_nothing_chosen_and_no_requests(resolve):
    world = one_request()
    found = step(world, resolve, row())
    assert found.count.tolist() == [0] and (found.rows == -1).all()
    assert world.counters.tolist() == [0] * len(TierCounter)
    world.slots, world.latent, world.host, world.moving = world.slots[:0], world.latent[:0], world.host[:0], world.moving[:0]
    assert step(world, resolve, row()[:0]).rows.shape == (0, 8)


@BOTH
def test_score_policy_without_scores(resolve):
    with pytest.raises(ValueError, match="scores"):
        step(one_request(), resolve, row(1), policy="score")


def test_unknown_policy():
    with pytest.raises(ValueError, match="unknown"):
        step(one_request(), resolve_rows.resolve_rows, row(1), policy="newest")


GIVEN = {"positions": "*i32", "latent_table": "*i32", "latent_stride": "i32", "host_table": "*i32", "host_stride": "i32", "moving": "*i8"}
GIVEN |= {"slots": "*i64", "hot_pages": "*i32", "hot_positions": "*i32", "hot_stamps": "*i32", "stamp": "*i32", "tables": "*i32"}
GIVEN |= {"tables_stride": "i32", "n_groups": "i32", "n_valid": "*i32", "scores": "*fp32", "scores_stride": "i32", "scores_width": "i32"}
GIVEN |= {"counters": "*i64", "row_bytes": "i32"} | dict.fromkeys(("rows", "source", "target", "count", "wanted"), "*i32")


def spec(queries: int, hot: int, by_score: bool, shared: bool = True, k: int = 2048, usual: int | None = None) -> Spec:
    chosen, usual = k * queries, usual or hot
    plan = resolve_rows.plan_for(1, chosen, hot)
    warps = min(plan.warps, max(1, min(chosen, usual) // 32))
    shape = {"CHOSEN": chosen, "QUERIES": queries, "HOT": hot, "PAGE": 64, "BY_SCORE": by_score}
    tables = {
        "N": chosen,
        "B": usual,
        "PAGES": hot // 64,
        "GROUPS": shared_groups(chosen, usual),
        "CHUNK": 2048,
        "SHARED": shared,
        "LIST": shared and list_bytes(chosen) > 0,
    }
    return Spec(
        fn="rorqual.attention.kernels.resolve_rows_kernel:resolve_rows_kernel",
        signature=GIVEN,
        constexprs=shape | tables | {"THREADS": 32 * warps, "FAST": shared and min(chosen, usual) >= 1024, "EARLY": True},
        aligned=("latent_table", "host_table", "source", "target", "wanted", "counters"),
        options={"num_warps": warps, "maxnreg": plan.registers},
    )


def test_compiles_for_hopper():
    few = spec(1, 64, True, k=8)
    specs = [spec(1, 4096, False), spec(1, 4096, True), spec(4, 8192, True), spec(1, 4096, True, False), few]
    lru, score, four, far, few, grown = compile_reports([*specs, spec(1, 8192, True, usual=4096)])
    for report in (lru, score):
        assert report.spill_bytes == 0
        assert report.count("BAR") <= 16  # each of them is a wait of all threads; none is for a change of layout
    assert four.spill_bytes <= 256
    assert far.spill_bytes <= 64
    assert grown.spill_bytes <= 32  # of the wide leases' part
    for report in (lru, score, four, far, few, grown):
        assert report.shared + CAPACITY <= 48 * 1024  # Triton's own beside the tables; a launch is refused above that


def test_tables_fit_shared_memory():
    """What the kernel lays out for the groups that are promised room."""
    for chosen, hot in ((1, 1), (32, 64), (2048, 2048), (2048, 4096), (4096, 8192), (8192, 8192)):
        groups = shared_groups(chosen, hot)
        lists = 4 * ((chosen + 1) // 2) + list_bytes(chosen)
        assert groups >= 2048
        assert groups * 64 >= 131_072
        totals = [totals_bytes(n) for n in (chosen, CHUNK, hot)]
        assert groups * 10 + 4 * CELLS + sum(totals) + lists <= CAPACITY
        assert groups % 8 == 0 and all(n % 16 == 0 or n >= 128 for n in totals)  # words that follow each other stay aligned


@interpreted
def test_outputs_need_no_values_before(monkeypatch):
    """Rows and counts begin as poison, none of which is left; so do the lists, which end where the counts say."""
    poison = 0x7A7A7A7A
    monkeypatch.setattr(torch, "empty", lambda *size, **more: torch.full(size if isinstance(size[0], int) else size[0], poison, **more))
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, poison))
    world = fresh(World(SIZES["three rows"], 5))
    valid = (world.sizes.requests - 1) * world.sizes.queries
    for turn in range(4):
        world.wander()
        positions = world.choose(spoil=turn % 2 == 1)
        found = step(world, resolve_rows.resolve_rows, positions, valid=valid)
        assert not (found.rows == poison).any() and not (found.count == poison).any()
        assert not any(poison in pair for pairs in copies(found) for pair in pairs)
        world.copy(found.source, found.target, found.count)
        world.check(positions, found, valid)
