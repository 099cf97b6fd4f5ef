"""Slots that change places on a GPU: bytes, memory, and under a captured graph's feet."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
pytest.importorskip("triton")

from rorqual.moe.eplb.permute_slots import SlotMover  # noqa: E402
from rorqual.moe.kernels import move_slots, move_slots_torch  # noqa: E402

DEVICE = torch.device("cuda")


def state(slots: int) -> list[torch.Tensor]:
    """FP8 weights, scales, and something of an odd size."""
    generator = torch.Generator(device=DEVICE).manual_seed(slots)
    raw = torch.randint(0, 120, (slots, 2, 640, 1024), dtype=torch.uint8, device=DEVICE, generator=generator)
    return [
        raw.view(torch.float8_e4m3fn),
        torch.randn(slots, 2, 5, 8, device=DEVICE, generator=generator),
        torch.randint(0, 255, (slots, 1001), dtype=torch.uint8, device=DEVICE, generator=generator),
    ]


@pytest.mark.parametrize("room", [move_slots, move_slots_torch])
@pytest.mark.parametrize("source", [[1, 2, 3, 4, 5, 6, 7, 8, 0], [3, 0, 0, 1, -1, 7, 5, 6, 8], [1, 0, 3, 2, 5, 4, 7, 6, 8]])
def test_everything_of_an_expert_moves(room, source):
    tensors, before = state(9), state(9)
    room.move_slots(tensors, source)
    for tensor, old in zip(tensors, before, strict=True):
        wanted = old.view(torch.uint8)[[slot if at < 0 else at for slot, at in enumerate(source)]]
        assert torch.equal(tensor.view(torch.uint8), wanted)


def test_a_thousand_moves_take_no_memory():
    tensors, first = state(9), state(9)
    mover, generator, places = SlotMover(tensors), torch.Generator().manual_seed(0), list(range(9))
    assert mover.triton
    for turn in range(1000):
        source = torch.randperm(9, generator=generator).tolist()
        mover.move(source)
        places = [places[at] for at in source]
        if turn == 10:
            torch.cuda.synchronize()
            held = torch.cuda.memory_reserved()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == held
    for tensor, old in zip(tensors, first, strict=True):
        assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8)[places])


def test_a_graph_reads_what_was_moved():
    weights, out = torch.arange(4.0, device=DEVICE).repeat_interleave(1024).view(4, 1024), torch.empty(4, device=DEVICE)
    mover = SlotMover([weights])
    torch.sum(weights, 1, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.sum(weights, 1, out=out)
    for source, wanted in (([1, 2, 3, 0], [1, 2, 3, 0]), ([3, 3, -1, -1], [0, 0, 3, 0])):
        mover.move(source)
        graph.replay()
        assert (out / 1024).tolist() == wanted
