"""The fetch of missing rows over the real link: exact bytes, nothing else touched, in graphs and far out in big pools."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import fetch_rows, fetch_rows_torch
from rorqual.attention.kernels.fetch_rows import FetchConfig
from tests.attention.kernels.host_rows import Rows, release

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
N_POOL = 60_000


@pytest.fixture(autouse=True)
def _memory():
    yield
    release()


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def host_of(n_rows: int, row: int, pitch: int) -> Rows:
    host = Rows(n_rows, row, pitch)
    host.bytes[:, :row] = noise(n_rows, row, seed=1).cpu()
    return host


def lists(n_host: int, requests: int, width: int, *, seed: int = 0, moved: bool = True) -> list[torch.Tensor]:
    """Sources from both sides and nowhere, targets in the first half of the pool; poison behind the counts."""
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"device": "cuda", "generator": generator}
    source = torch.randint(0, n_host, (requests, width), dtype=torch.int32, **options)
    target = torch.randperm(N_POOL // 2, **options)[: requests * width].view(requests, width).int()
    count = torch.randint(0, width + 1, (requests,), dtype=torch.int32, **options)
    count[-1] = width
    if requests > 1:
        count[0] = 0
    if moved:
        near = torch.rand(requests, width, **options) < 0.3
        row = torch.randint(N_POOL // 2, N_POOL, (requests, width), dtype=torch.int32, **options)
        source = torch.where(near, -(row + 2), source)
        source[:, 2] = -1
    behind = torch.arange(width, device="cuda") >= count[:, None]
    source[behind], target[behind] = 2**31 - 1, -(2**31)
    return [source, target, count]


@pytest.mark.parametrize(("row", "pitch"), [(656, 656), (656, 768), (1152, 1152), (196, 196), (68, 72)])
@pytest.mark.parametrize(("requests", "width"), [(1, 2048), (1, 5), (3, 700), (64, 300), (200, 40)])
def test_the_bytes_are_exact_and_nothing_else_is_touched(row, pitch, requests, width):
    host, pool = host_of(5000, row, pitch), noise(N_POOL, row, seed=2)
    arguments = lists(5000, requests, width)
    expected = pool.clone()
    fetch_rows_torch.fetch_rows(host, expected, *arguments)
    fetch_rows.fetch_rows(host, pool, *arguments)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("config", [FetchConfig(programs=7, rows=1, warps=1), FetchConfig(programs=132, rows=4, warps=4)])
@pytest.mark.parametrize("count", [0, 1, 2048])
def test_any_count_with_any_grid(config, count):
    host, pool = host_of(5000, 656, 656), noise(N_POOL, 656, seed=2)
    source, target, n = lists(5000, 1, 2048, moved=False)
    n.fill_(count)
    expected = pool.clone()
    fetch_rows_torch.fetch_rows(host, expected, source, target, n)
    fetch_rows.fetch_rows(host, pool, source, target, n, config=config)
    assert torch.equal(pool, expected)


def test_a_graph_copies_what_the_lists_hold_at_its_replay():
    host, pool = host_of(5000, 656, 656), noise(N_POOL, 656, seed=2)
    start = pool.clone()
    arguments = lists(5000, 16, 300)
    fetch_rows.fetch_rows(host, pool, *arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fetch_rows.fetch_rows(host, pool, *arguments)
    for seed in range(25):
        for tensor, new in zip(arguments, lists(5000, 16, 300, seed=seed % 5), strict=True):
            tensor.copy_(new)
        pool.copy_(start)
        graph.replay()
        expected = start.clone()
        fetch_rows_torch.fetch_rows(host, expected, *arguments)
        assert torch.equal(pool, expected)


def test_rows_written_by_the_kernel_before_are_seen():
    """Programmatic launch: neither lists nor rows may be read before the work ahead of the fetch has finished."""
    host, pool = host_of(5000, 656, 656), noise(N_POOL, 656, seed=2)
    source, target, count = lists(5000, 1, 2048, moved=False)
    true_source, empty = source.clone(), torch.zeros_like(count)
    expected = pool.clone()
    fetch_rows_torch.fetch_rows(host, expected, source, target, count)
    true_count, start = count.clone(), pool.clone()
    for _ in range(25):
        pool.copy_(start)
        source.fill_(-1)
        count.copy_(empty)
        torch.cuda._sleep(20_000)
        source.copy_(true_source)
        count.copy_(true_count)
        fetch_rows.fetch_rows(host, pool, source, target, count)
        out = pool.clone()
        assert torch.equal(out, expected)


def test_rows_past_eight_gigabytes():
    row = 656
    n_rows = (1 << 33) // row + 5000
    host, pool = Rows(n_rows, row, fill=False), torch.empty(n_rows, row, dtype=torch.uint8, device="cuda")
    places = [0, (1 << 31) // row, (1 << 31) // row + 1, (1 << 32) // row + 1, (1 << 33) // row, n_rows - 1]
    for i, at in enumerate(places):
        host.bytes[at] = noise(row, seed=i).cpu()
        pool[at] = 0x55
    source = torch.tensor([places[::-1] + [-(places[4] - 7 + 2)]], dtype=torch.int32, device="cuda")
    target = torch.tensor([places + [9]], dtype=torch.int32, device="cuda")
    pool[places[4] - 7] = noise(row, seed=99)
    around = [at + step for at in places for step in (-1, 1) if 0 <= at + step < n_rows and at + step not in places]
    pool[around] = 0x77
    fetch_rows.fetch_rows(host, pool, source, target, torch.tensor([7], dtype=torch.int32, device="cuda"))
    assert torch.equal(pool[places].cpu(), host.bytes[places[::-1]])
    assert torch.equal(pool[9], noise(row, seed=99)) and bool((pool[around] == 0x77).all())
