"""Seeding and emptying hot buffers: the plain versions by their rules, the kernels in the interpreter against them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import release_hot, release_hot_torch, seed_hot, seed_hot_torch  # noqa: E402
from tests.attention.kernels.tier_problem import Sizes, World  # noqa: E402
from tests.kernels.interpreter import repair  # noqa: E402
from tests.kernels.offline import Spec, compile_reports  # noqa: E402

repair()

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
BOTH = pytest.mark.parametrize(
    "seed", [seed_hot_torch.seed_hot, pytest.param(seed_hot.seed_hot, marks=interpreted)], ids=["plain", "kernel"]
)


def prompt(number: int, lease: int = 4) -> World:
    """One request of 64 tokens at the end of its prompt: some pages absent, the last one unfinished."""
    world = World(Sizes(requests=2, page=4, lease=4, k=8, context=64), number)
    for request in range(2):
        world.extend(request, 62)
        for page in range(world.n_pages):
            world.mirror(request, page)
        for page in world.integers(world.n_pages, 6).tolist():
            world.drop(request, page)
        world.lease(request, lease)
    world.stamp += 3
    return world


def run(seed, world: World, positions: torch.Tensor, request: int = 1, **more):
    tables = (
        world.latent[request],
        world.host[request],
        world.hot_pages,
        world.hot_positions,
        world.hot_stamps,
        world.stamp,
        world.scratch,
    )
    return seed(positions, int(world.slots[request]), *tables, page_size=world.sizes.page, **more)


def chosen(world: World, rows: int, *, spoil: bool) -> torch.Tensor:
    out = torch.full((rows, 8), -1, dtype=torch.int32)
    for row in range(rows):
        p = torch.randperm(62, generator=world.random)[: 8 - row % 3].sort().values
        out[row, : len(p)] = p
        if spoil:
            out[row, 2] = -1
            out[row, 4] = out[row, 3]
    return out


@BOTH
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("lease", [4, 3, 1, 0])
def test_newest_choices_first_until_full(seed, lease, resident):
    world = prompt(lease, lease)
    slot = int(world.slots[1])
    world.hot_positions[slot, : lease * 4] = 7  # an earlier content
    positions = chosen(world, 5, spoil=True)
    made = run(seed, world, positions, seed_resident=resident)
    wanted: list[int] = []
    for row in positions.flip(0).tolist():
        for p in row:
            if p >= 0 and p not in wanted and (resident or world.latent[1, p // 4] < 0):
                wanted.append(p)
    wanted = wanted[: lease * 4]
    held = world.hot_positions[slot].tolist()
    assert held == wanted + [-1] * (16 - len(wanted))
    assert made.count.tolist() == [len(wanted)]
    world.copy(made.source, made.target, made.count)
    rows = [int(world.hot_pages[slot, b // 4]) * 4 + b % 4 for b in range(len(wanted))]
    assert world.device_rows[rows].tolist() == [int(world.tag(1, torch.tensor(p))) for p in wanted]
    newest = {p for p in positions[-1].tolist() if p >= 0}
    assert all((world.hot_stamps[slot, b] == 3) == (p in newest) for b, p in enumerate(wanted))
    assert (world.hot_stamps >= 0).all()


@interpreted
@pytest.mark.parametrize("resident", [True, False])
def test_kernel_equals_the_plain_version(resident):
    for number in range(4):
        ours, plain = prompt(number, 3 + number % 2), prompt(number, 3 + number % 2)
        if number == 3:  # a lease with a gap
            for world in (ours, plain):
                world.hot_pages[int(world.slots[1]), 1] = -1
        positions = chosen(ours, 6, spoil=number % 2 == 0)
        a, b = (
            run(seed_hot.seed_hot, ours, positions, seed_resident=resident),
            run(seed_hot_torch.seed_hot, plain, positions, seed_resident=resident),
        )
        n = int(a.count)
        assert n == int(b.count)
        assert torch.equal(a.source[:, :n], b.source[:, :n]) and torch.equal(a.target[:, :n], b.target[:, :n])
        assert torch.equal(ours.hot_positions, plain.hot_positions) and torch.equal(ours.hot_stamps, plain.hot_stamps)


@BOTH
def test_slot_as_a_tensor_and_no_tokens(seed):
    world = prompt(9)
    tables = (world.latent[0], world.host[0], world.hot_pages, world.hot_positions, world.hot_stamps, world.stamp, world.scratch)
    made = seed(torch.empty(0, 8, dtype=torch.int32), world.slots[:1], *tables, page_size=4)
    assert made.count.tolist() == [0]
    assert made.source.shape == made.target.shape == (1, 16)


@pytest.mark.parametrize(
    "release", [release_hot_torch.release_hot, pytest.param(release_hot.release_hot, marks=interpreted)], ids=["plain", "kernel"]
)
def test_release_empties_ranges_in_every_layer(release):
    held = torch.arange(3 * 4 * 20, dtype=torch.int32).view(3, 4, 20)  # 5 pages of 4
    before = held.clone()
    ranges = torch.tensor([[2, 0, 5], [0, 3, 5], [1, 2, 2], [0, 0, 1]], dtype=torch.int32)
    release(held, *(ranges[:, i].contiguous() for i in range(3)), page_size=4)
    before[:, 2] = -1
    before[:, 0, 12:] = -1
    before[:, 0, :4] = -1
    assert torch.equal(held, before)
    release(held, *(torch.empty(0, dtype=torch.int32) for _ in range(3)), page_size=4)
    assert torch.equal(held, before)


SEED = {"positions": "*i32", "n_rows": "i32", "k": "i32", "slot": "*i64", "latent_row": "*i32", "host_row": "*i32", "hot_pages": "*i32"}
SEED |= dict.fromkeys(("hot_positions", "hot_stamps", "stamp", "scratch", "source", "target", "count", "order"), "*i32")
RELEASE = {"hot_positions": "*i32", "layer_stride": "i32", "slots": "*i32", "first": "*i32", "last": "*i32", "n_layers": "i32"}


def test_compiles_for_hopper():
    shape = {"H": 64, "PAGE": 64, "RESIDENT": True, "N": 2048, "PAGES": 64, "BLOCK": 1024}
    tensor = Spec(fn="rorqual.attention.kernels.seed_hot:seed_hot_kernel", signature=SEED, constexprs=shape, options={"num_warps": 16})
    number = Spec(
        fn="rorqual.attention.kernels.seed_hot:seed_hot_kernel",
        signature=SEED | {"slot": "i32"},
        constexprs=shape,
        options={"num_warps": 16},
    )
    release = Spec(
        fn="rorqual.attention.kernels.release_hot:release_hot_kernel",
        signature=RELEASE,
        constexprs={"HOT": 4096, "PAGE": 64, "BLOCK": 1024},
        aligned=("hot_positions", "layer_stride"),
        options={"num_warps": 4},
    )
    for report in compile_reports([tensor, number, release]):
        assert report.spill_bytes == 0
    assert "STG.E.64" in report.sass or "STG.E.128" in report.sass or report.count("STG") > 0
