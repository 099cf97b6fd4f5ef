"""Water filling in the interpreter against the plain PyTorch version and the linear program, and what it compiles to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from rorqual.moe.eplb.topology import Topology  # noqa: E402
from rorqual.moe.kernels import water_fill, water_fill_torch  # noqa: E402
from rorqual.moe.kernels.water_fill_torch import ROW, DeviceSeats  # noqa: E402
from tests.kernels.interpreter import repair  # noqa: E402
from tests.kernels.offline import Spec, compile_reports  # noqa: E402
from tests.moe.eplb.choice.linear import least_level, random_slots  # noqa: E402

repair()
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
TOPOLOGY = Topology.even(n_slots=42, n_ranks=6)
EXPERTS = 24


def case(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots [3, 42] and skewed counts [3, 24], of which some are 0."""
    rng = np.random.default_rng(seed)
    counts = np.floor(rng.lognormal(3.0, 1.2, (3, EXPERTS))).astype(np.int64) * (rng.random((3, EXPERTS)) > 0.1)
    return random_slots(rng, 3, EXPERTS, TOPOLOGY), counts


def rank_tokens(x: torch.Tensor, seats: DeviceSeats, counts: np.ndarray) -> torch.Tensor:
    """[layers, ranks]."""
    total = x.sum((1, 2)).double()
    for layer, row in enumerate(seats.single.tolist()):
        for expert, rank in enumerate(row):
            if rank >= 0:
                total[layer, rank] += int(counts[layer, expert])
    return total


@interpreted
@pytest.mark.parametrize("seed", [0, 1])
def test_kernel_equals_the_plain_version(seed):
    slots, counts = case(seed)
    seats, tokens = DeviceSeats.of(slots, EXPERTS, TOPOLOGY), torch.from_numpy(counts)
    used = (seats.expert >= 0).any(2)[..., None, None]
    plain = water_fill_torch.fill_ranks(tokens, seats, n_ranks=6, sweeps=3)
    got = torch.where(used, water_fill.fill_ranks(tokens, seats, n_ranks=6, sweeps=3), 0.0)
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("seed", range(6))
def test_split_is_within_a_hundredth_of_the_best(seed):
    slots, counts = case(seed)
    seats, tokens = DeviceSeats.of(slots, EXPERTS, TOPOLOGY), torch.from_numpy(counts)
    got = water_fill_torch.fill_ranks(tokens, seats, n_ranks=6)
    wanted = torch.where(seats.expert < 0, 0, tokens[torch.arange(3)[:, None, None], seats.expert.clamp(min=0).long()])
    torch.testing.assert_close(got.sum(-1), wanted.float(), rtol=1e-5, atol=1e-3)
    assert not got[seats.slot < 0].any() and (got >= 0).all()
    for layer, found in enumerate(rank_tokens(got, seats, counts)):
        assert float(found.max()) <= 1.01 * least_level(counts[layer], slots[layer], TOPOLOGY)
        assert float(found.sum()) == pytest.approx(counts[layer].sum(), rel=1e-5)


@interpreted
@pytest.mark.parametrize("ways", [64, 5])
def test_ways_are_in_the_parts_of_the_split(ways):
    slots, counts = case(7)
    seats, tokens = DeviceSeats.of(slots, EXPERTS, TOPOLOGY), torch.from_numpy(counts)
    x = water_fill_torch.fill_ranks(tokens, seats, n_ranks=6)
    total = np.zeros((3, EXPERTS, 42))
    for source in range(6):
        tables = [torch.full((3, EXPERTS, ways), -7, dtype=torch.int32) for _ in range(2)]
        for room, table in zip((water_fill, water_fill_torch), tables, strict=True):
            room.write_ways(x, seats, table, phase=source / 6)
        assert torch.equal(*tables)
        total += (tables[0].numpy()[..., None] == np.arange(42)).sum(2)
    for layer in range(3):
        for row in range(seats.expert.shape[1]):
            for place, expert in enumerate(seats.expert[layer, row].tolist()):
                if expert < 0:
                    continue
                slot, part = seats.slot[layer, row, place], x[layer, row, place].double()
                assert slot[slot >= 0].tolist() and set(slots[layer, slot[slot >= 0]].tolist()) == {expert}
                if counts[layer, expert] == 0:
                    part = (slot >= 0).double()
                exact = part / part.sum() * 6 * ways
                assert (torch.from_numpy(total[layer, expert])[slot[slot >= 0].long()] - exact[slot >= 0]).abs().max() <= 1.001
        lone = [e for e, rank in enumerate(seats.single[layer].tolist()) if rank >= 0]
        assert not total[layer, lone].any()  # left as they were


def test_another_placement_is_put_in_the_same_place():
    slots, _ = case(1)
    room = DeviceSeats.empty(n_layers=3, n_experts=EXPERTS, n_ranks=6, n_slots=42)
    where = room.slot.data_ptr()
    for seed in (1, 2):
        slots, counts = case(seed)
        room.write(slots, TOPOLOGY)
        tokens = torch.from_numpy(counts)
        fresh = DeviceSeats.of(slots, EXPERTS, TOPOLOGY)
        depth = fresh.expert.shape[1]
        assert torch.equal(room.expert[:, :depth], fresh.expert) and (room.expert[:, depth:] == -1).all()
        found = water_fill_torch.fill_ranks(tokens, room, n_ranks=6)
        assert torch.equal(found[:, :depth], water_fill_torch.fill_ranks(tokens, fresh, n_ranks=6))
    assert room.slot.data_ptr() == where
    with pytest.raises(ValueError, match="there is room for 1"):
        DeviceSeats.empty(n_layers=3, n_experts=EXPERTS, n_ranks=6, n_slots=42, n_rows=1).write(slots, TOPOLOGY)


def test_compiles_without_spills():
    arrays = {"counts": "*i64", "slot": "*i32", "expert": "*i32", "single": "*i32", "n_rows": "*i32", "x": "*fp32"}
    fixed = {"E": 256, "C": 32, "ROWS": ROW}
    specs = [
        Spec(
            fn="rorqual.moe.kernels.water_fill:fill_kernel",
            signature={**arrays, "sweeps": "i32"},
            constexprs={**fixed, "R": ranks, "RANKS": block, "CHUNK": min(32, 4096 // block)},
            aligned=tuple(arrays),
            options={"num_warps": warps},
        )
        for ranks, block, warps in ((32, 32, 1), (144, 256, 4))
    ]
    ways = {name: arrays[name] for name in ("x", "slot", "expert")} | {"table": "*i32"}
    specs.append(
        Spec(
            fn="rorqual.moe.kernels.water_fill:ways_kernel",
            signature={**ways, "phase": "fp32"},
            constexprs={**fixed, "R": 144, "RANKS": 256, "WAYS": 64, "WAYS_BLOCK": 64},
            aligned=tuple(ways),
            options={"num_warps": 1},
        )
    )
    for report in compile_reports(specs):
        assert report.count("STL") == 0 and report.registers <= 200
