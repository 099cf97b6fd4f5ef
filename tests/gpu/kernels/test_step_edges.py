"""The ends of a decode step on the GPU: equal to their twins in every replay, at table offsets past 2^31 bytes too."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
pytest.importorskip("triton")

from rorqual.engine.kernels import step_edges, step_edges_torch  # noqa: E402
from tests.engine.kernels.test_step_edges import CASES, case  # noqa: E402

MADE = [*CASES, case(256, 64, page_size=64, assigned=200, seed=9)]


@pytest.mark.parametrize("made", MADE, ids=lambda made: f"{len(made[0][0])}x{made[2]}")
def test_replays_equal_the_twin(made):
    inputs, page_size, used = made
    before = inputs[5].clone()
    wanted = step_edges_torch.enter_step(*inputs[:5], before, page_size=page_size, used=used)
    own = [x.clone() for x in inputs]
    step_edges.enter_step(*[x.clone() for x in inputs], page_size=page_size, used=used)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step_edges.enter_step(*own, page_size=page_size, used=used)
    for _ in range(25):
        own[5].copy_(inputs[5])
        for x in found:
            x.fill_(-7)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)) and torch.equal(own[5], before)


def test_large_tables():
    """A token table of 5 GiB: rows whose offsets do not fit 32 bits."""
    rows, width = 9000, 150_001
    tokens = torch.empty((rows, width), dtype=torch.int32, device="cuda")
    slots = torch.tensor([0, 8999, 7200], device="cuda")
    starts = torch.tensor([5, 149_998, 149_999], device="cuda")
    tokens[slots, starts] = torch.tensor([11, 22, 33], dtype=torch.int32, device="cuda")
    pages = torch.arange(rows, device="cuda", dtype=torch.int32)[:, None].expand(-1, 2344).contiguous()
    at, page = slots * 2344 + starts // 64, torch.tensor([900, 901, 902], device="cuda")
    entry = step_edges.enter_step(slots, starts, at, page, tokens, pages, page_size=64, used=2344)
    assert entry.ids.tolist() == [11, 22, 33]
    assert entry.write_rows.tolist() == [900 * 64 + 5, 901 * 64 + 149_998 % 64, 902 * 64 + 149_999 % 64]
    lanes, counter = torch.zeros((2, 3), dtype=torch.int64, pin_memory=True), torch.tensor([3], device="cuda")
    step_edges.leave_step(torch.tensor([1, 2, 3], device="cuda"), slots, starts, tokens, lanes, counter)
    torch.cuda.synchronize()
    assert tokens[slots, starts + 1].tolist() == [1, 2, 3] and lanes.tolist() == [[0, 0, 0], [1, 2, 3]] and counter.tolist() == [4]


def test_pinned_lanes_are_read_in_turn():
    lanes, block = torch.zeros((4, 2000), dtype=torch.int64, pin_memory=True), torch.zeros(1538, dtype=torch.int64, device="cuda")
    counter, host = torch.zeros(1, dtype=torch.int64, device="cuda"), lanes.numpy()
    for step in range(20):
        host[step % 4] = step
        step_edges.fetch_inputs(lanes, counter, block)
        counter += 1
        assert block.unique().tolist() == [step]
