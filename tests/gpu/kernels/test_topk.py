"""The top-k kernels on a GPU against the plain PyTorch version."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
pytest.importorskip("triton")

from rorqual.attention.kernels import topk, topk_torch  # noqa: E402
from rorqual.attention.kernels.topk_plan import TopkPlan, plan_for  # noqa: E402

DEVICE = torch.device("cuda")
K, PAGE, LENGTH = 2048, 64, 40_000
EDGES = [0, 1, 63, 64, 2047, 2048, 2049, 4095, 8191, 8192, 8193, 8194, 16383, 16384, 16385, 32767, 32768, 32769, 39_999, 40_000]


def plan(by_rows: bool) -> TopkPlan:
    return plan_for(4096 if by_rows else 16, LENGTH, K)


def scores(kind: str, rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(rows)
    x = torch.randn(rows, length, device=DEVICE, generator=generator)
    if kind == "plateau":  # about half of k positive, then exact zeros of both signs
        zero = torch.where(torch.rand(rows, length, device=DEVICE, generator=generator) < 0.5, -0.0, 0.0)
        return torch.where(x > 2.0, x, zero)
    if kind == "few values":
        return (x * 2).round()
    if kind == "nan":
        return torch.where(x > 1.5, float("nan"), x)
    if kind == "all nan":
        return torch.full_like(x, float("nan"))
    if kind == "rising":
        return torch.arange(length, device=DEVICE).float().expand(rows, length).contiguous()
    if kind == "one place":  # all that counts lies together, where the sample hardly looks
        x[:, 777:3000] += 100.0
    return x


def pages(requests: int, length: int) -> torch.Tensor:
    each = -(-length // PAGE)
    return torch.randperm(requests * each, device=DEVICE).int().view(requests, each)


def select(x, limit, table, token_row, k=K, length=LENGTH, **more):
    return topk.select_rows(x, limit, k, table, token_row, page_size=PAGE, max_context=length, **more)


def reference(x, limit, table, token_row, k=K, length=LENGTH):
    return topk_torch.select_rows(x, limit, k, table, token_row, page_size=PAGE, max_context=length)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("kind", ["random", "plateau", "few values", "nan", "all nan", "rising", "one place"])
def test_equals_the_plain_version_at_edge_lengths(kind, by_rows):
    limit = torch.tensor(EDGES, dtype=torch.int32, device=DEVICE)
    buffer = scores(kind, len(EDGES), LENGTH + 64)
    for row, n in enumerate(EDGES):
        buffer[row, n:] = float("nan") if row % 2 else float("inf")
    x = buffer[:, :LENGTH]
    table = pages(3, LENGTH)
    token_row = torch.arange(len(EDGES), device=DEVICE) % 3
    for got, wanted in zip(select(x, limit, table, token_row, plan=plan(by_rows)), reference(x, limit, table, token_row), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("by_rows", [False, True])
def test_replays_of_a_graph_are_equal_and_follow_new_inputs(by_rows):
    rows = 24
    x, limit = scores("plateau", rows, LENGTH), torch.full((rows,), LENGTH, dtype=torch.int32, device=DEVICE)
    table, token_row = pages(2, LENGTH), torch.arange(rows, device=DEVICE) % 2
    launch = plan(by_rows)
    select(x, limit, table, token_row, plan=launch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = select(x, limit, table, token_row, plan=launch)
    for kind, shorter in (("plateau", 0), ("random", 5000), ("few values", 39_000)):
        x.copy_(scores(kind, rows, LENGTH))
        limit.fill_(LENGTH - shorter)
        wanted = reference(x, limit, table, token_row)
        for _ in range(25):
            for tensor in out:
                tensor.fill_(-777)
            graph.replay()
            assert torch.equal(out[0], wanted[0])
            assert torch.equal(out[1], wanted[1])


@pytest.mark.parametrize("k", [1, 1000])
def test_other_k(k):
    x = scores("random", 5, LENGTH)
    limit = torch.tensor([40_000, 20_000, 5000, 999, 3], dtype=torch.int32, device=DEVICE)
    table, token_row = pages(5, LENGTH), torch.arange(5, device=DEVICE)
    for got, wanted in zip(select(x, limit, table, token_row, k=k), reference(x, limit, table, token_row, k=k), strict=True):
        assert torch.equal(got, wanted)


def test_rows_past_2_to_the_31_elements():
    """Score rows whose offset does not fit 32 bits."""
    stride = 1 << 28
    buffer = torch.empty(10 * stride + LENGTH, device=DEVICE)
    x = buffer.as_strided((11, LENGTH), (stride, 1))
    x.copy_(scores("random", 11, LENGTH))
    limit = torch.full((11,), LENGTH, dtype=torch.int32, device=DEVICE)
    table, token_row = pages(1, LENGTH), torch.zeros(11, dtype=torch.int64, device=DEVICE)
    wanted = reference(x.contiguous(), limit, table, token_row)
    for by_rows in (False, True):
        assert torch.equal(select(x, limit, table, token_row, plan=plan(by_rows))[0], wanted[0])


def test_a_row_is_the_same_alone_and_in_a_batch():
    x, limit = scores("random", 300, LENGTH), torch.full((300,), LENGTH, dtype=torch.int32, device=DEVICE)
    table, token_row = pages(1, LENGTH), torch.zeros(300, dtype=torch.int64, device=DEVICE)
    many = select(x, limit, table, token_row, plan=plan(True))[0]
    for row in (0, 150, 299):
        one = select(x[row : row + 1], limit[:1], table, token_row[:1], plan=plan(False))[0]
        assert torch.equal(one[0], many[row])
