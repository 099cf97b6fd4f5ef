"""Slots that take over what others hold, in place: the order of moves, the twin and the kernel in the interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from rorqual.moe.eplb.permute_slots import SlotMover, local_sources  # noqa: E402
from rorqual.moe.kernels import move_slots, move_slots_torch  # noqa: E402
from rorqual.moe.kernels.move_slots_torch import SPARE, plan_moves  # noqa: E402
from tests.kernels.interpreter import repair  # noqa: E402
from tests.kernels.offline import compile_report  # noqa: E402

repair()
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")

sources = st.integers(1, 12).flatmap(lambda n: st.lists(st.integers(-1, n - 1), min_size=n, max_size=n))


def wanted(values: list[int], source: list[int]) -> list[int]:
    return [values[slot if at < 0 else at] for slot, at in enumerate(source)]


@given(sources)
@settings(max_examples=300, deadline=None)
def test_moves_lose_nothing_and_are_as_few_as_can_be(source):
    held: dict[int, int] = dict(enumerate(range(len(source))))
    moves = plan_moves(source)
    for at, to in moves:
        held[to] = held[at]
    assert [held[slot] for slot in range(len(source))] == wanted(list(range(len(source))), source)
    written = sum(at not in (-1, slot) for slot, at in enumerate(source))
    assert sum(to != SPARE for _, to in moves) == written
    cycles = 0
    for slot in range(len(source)):  # slots that come back to themselves, and nobody before them: the first of each cycle
        path, at = [slot], source[slot]
        while at not in (-1, *path):
            path.append(at)
            at = source[at]
        cycles += at == slot and len(path) > 1 and slot == min(path) and all(source.count(s) == 1 for s in path)
    assert sum(to == SPARE for _, to in moves) == cycles


def test_a_source_that_is_no_slot_is_refused():
    for source in ([0, 2], [-2, 0]):
        with pytest.raises(ValueError, match="slots 0 to 1"):
            plan_moves(source)


def state(slots: int) -> list[torch.Tensor]:
    """Weights, scales and odd bytes."""
    generator = torch.Generator().manual_seed(slots)
    weights = torch.randn(slots, 3, 40, generator=generator).to(torch.bfloat16)
    return [
        weights,
        torch.randn(slots, 24, 16, generator=generator).to(torch.float8_e4m3fn),
        torch.randn(slots, 2, 3, generator=generator),
        torch.randint(0, 255, (slots, 7), generator=generator, dtype=torch.uint8),
        torch.randn(slots, 0, generator=generator),
    ]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


@interpreted
@pytest.mark.parametrize("room", [move_slots_torch, move_slots])
@pytest.mark.parametrize("source", [[1, 2, 0, 4, 3, 5, 5, -1], [3, 0, 0, 1, 2, 7, 5, 6], [-1, 1, 2, -1], [1, 1]])
def test_everything_of_an_expert_moves(room, source):
    tensors, before = state(len(source)), state(len(source))
    written = room.move_slots(tensors, source)
    assert written == sum(at not in (-1, slot) for slot, at in enumerate(source))
    for tensor, old in zip(tensors, before, strict=True):
        assert same_bytes(tensor, torch.stack([old[slot if at < 0 else at] for slot, at in enumerate(source)]))


@pytest.mark.parametrize("room", [move_slots_torch, move_slots])
def test_what_has_gaps_is_refused_before_anything_is_written(room):
    good, gaps = torch.arange(4.0).view(2, 2), torch.zeros(2, 4, 4)[:, :, :2]
    with pytest.raises(ValueError, match="tensor 1 of the experts' state must be contiguous with 2 slots"):
        room.move_slots([good, gaps], [1, 0])
    assert good.tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_a_rank_takes_what_it_has():
    before, after = [4, 7, -1, 2, 9], [7, 7, 4, 2, 5]
    assert local_sources(before, after) == [1, -1, 0, -1, -1]
    assert local_sources([1, 1, 3], [3, 1, -1]) == [2, -1, -1]
    with pytest.raises(ValueError, match="2 before, 1 after"):
        local_sources([0, 1], [0])


def test_many_moves_back_and_forth_keep_the_experts_and_the_memory():
    tensors, first = state(9), state(9)
    mover, generator = SlotMover(tensors, backend="torch"), torch.Generator().manual_seed(0)
    places, where = list(range(9)), [tensor.data_ptr() for tensor in tensors]
    for _ in range(1000):
        source = torch.randperm(9, generator=generator).tolist()
        mover.move(source)
        places = [places[at] for at in source]
    for tensor, old in zip(tensors, first, strict=True):
        assert same_bytes(tensor, old[places])
    assert [tensor.data_ptr() for tensor in tensors] == where
    assert mover.bytes_of_expert == 3 * 40 * 2 + 24 * 16 + 2 * 3 * 4 + 7
    with pytest.raises(ValueError, match="found 'cuda'"):
        SlotMover(tensors, backend="cuda")


def test_kernel_reads_and_writes_wide():
    report = compile_report(
        "rorqual.moe.kernels.move_slots:move_kernel",
        {"words": "*i64", "moves": "*i32", "n_moves": "i32", "slot_words": "i32"},
        {"BLOCK": 2048, "SPARE": SPARE},
        aligned=("words", "moves", "slot_words"),
        options={"num_warps": 4, "num_stages": 1},
    )
    assert report.count("STL") == 0 and report.registers <= 128
    assert "LDG.E.128" in report.sass and "STG.E.128" in report.sass
