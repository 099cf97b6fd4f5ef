"""Whole pages over the real link: exact bytes, nothing else touched, and an order that streams and events keep."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import mirror_pages
from rorqual.attention.kernels.mirror_pages_torch import pool_pairs
from tests.attention.kernels.host_rows import Rows, release

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PAGE = 64


@pytest.fixture(autouse=True)
def _memory():
    yield
    release()


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def lists(n_device: int, n_host: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    device, host = torch.randperm(n_device)[:n].int(), torch.randperm(n_host)[:n].int()
    if n > 2:
        device[1], host[2] = -1, -1
    return device.cuda(), host.cuda()


@pytest.mark.parametrize(("row", "pitch"), [(656, 656), (656, 768), (1152, 1152), (68, 68)])
@pytest.mark.parametrize("n", [1, 17])
def test_there_and_back_in_every_layer(row, pitch, n):
    layers = 3
    pools = [noise(40 * PAGE, row, seed=layer) for layer in range(layers)]
    hosts = [Rows(30 * PAGE, row, pitch) for _ in range(layers)]
    pairs = pool_pairs(pools, hosts)
    device, host = lists(40, 30, n)
    mirror_pages.mirror_layers(pairs, device, host, page_size=PAGE)
    torch.cuda.synchronize()
    live = [(d, h) for d, h in zip(device.tolist(), host.tolist(), strict=True) if d >= 0 and h >= 0]
    for pool, rows in zip(pools, hosts, strict=True):
        expected = torch.full((30, PAGE, pitch), 0xFF, dtype=torch.uint8)
        for d, h in live:
            expected[h, :, :row] = pool.view(-1, PAGE, row)[d].cpu()
        assert torch.equal(rows.bytes.view(30, PAGE, pitch), expected)
    others = torch.randperm(40)[:n].int().cuda()
    before = [pool.clone() for pool in pools]
    mirror_pages.restore_layers(pairs, host, others, page_size=PAGE)
    for pool, old, rows in zip(pools, before, hosts, strict=True):
        for h, d in zip(host.tolist(), others.tolist(), strict=True):
            if h >= 0:
                old.view(-1, PAGE, row)[d] = rows.bytes.view(30, PAGE, pitch)[h, :, :row].cuda()
        assert torch.equal(pool, old)


def test_one_layer_on_a_side_stream():
    pool, rows = noise(40 * PAGE, 656, seed=1), Rows(30 * PAGE, 656)
    device, host = lists(40, 30, 9)
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    for turn in range(25):
        pool.copy_(noise(40 * PAGE, 656, seed=turn))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            mirror_pages.mirror_pages(pool, rows, device, host, page_size=PAGE)
            done.record()
        torch.cuda.current_stream().wait_event(done)
        back = torch.empty_like(pool).fill_(0xEE)
        mirror_pages.restore_pages(rows, back, host, device, page_size=PAGE)
        for d, h in zip(device.tolist(), host.tolist(), strict=True):
            if d >= 0 and h >= 0:
                assert torch.equal(back.view(-1, PAGE, 656)[d], pool.view(-1, PAGE, 656)[d])


def test_pages_past_eight_gigabytes():
    row = 656
    n_pages = (1 << 33) // (PAGE * row) + 40
    rows, pool = Rows(n_pages * PAGE, row, fill=False), torch.empty(n_pages * PAGE, row, dtype=torch.uint8, device="cuda")
    places = [0, (1 << 31) // (PAGE * row), (1 << 33) // (PAGE * row) + 1, n_pages - 1]
    for i, page in enumerate(places):
        pool[page * PAGE : (page + 1) * PAGE] = noise(PAGE, row, seed=i)
    device = torch.tensor(places, dtype=torch.int32, device="cuda")
    mirror_pages.mirror_pages(pool, rows, device, device.flip(0), page_size=PAGE)
    torch.cuda.synchronize()
    for page, at in zip(places, places[::-1], strict=True):
        assert torch.equal(rows.bytes[at * PAGE : (at + 1) * PAGE], pool[page * PAGE : (page + 1) * PAGE].cpu())
    expected = [pool[page * PAGE : (page + 1) * PAGE].clone() for page in places]
    for page in places:
        pool[page * PAGE : (page + 1) * PAGE] = 0
    mirror_pages.restore_pages(rows, pool, device.flip(0), device, page_size=PAGE)
    for page, want in zip(places, expected, strict=True):
        assert torch.equal(pool[page * PAGE : (page + 1) * PAGE], want)
