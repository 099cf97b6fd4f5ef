"""Copies of whole pages between device and host against their twins, and the twins against plain loops."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import mirror_pages, mirror_pages_torch
from rorqual.attention.kernels.mirror_pages import PagesConfig
from rorqual.attention.kernels.mirror_pages_torch import pool_pairs
from tests.attention.kernels.host_rows import Rows, noise
from tests.kernels.offline import SMEM_LIMIT, Spec, compile_reports

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
PAGE = 8
DEVICE_PAGES = torch.tensor([3, 0, -1, 9, 5], dtype=torch.int32)
HOST_PAGES = torch.tensor([7, 2, 1, 0, -1], dtype=torch.int32)
SHAPES = [(656, 656), (656, 704), (68, 68), (70, 72), (33, 33)]


def problem(row: int, pitch: int, layers: int = 3) -> tuple[list[torch.Tensor], list[Rows]]:
    return [noise(80, row, layer) for layer in range(layers)], [Rows(64, row, pitch).noise(9 + layer) for layer in range(layers)]


def pairs_of_pages() -> list[tuple[int, int]]:
    return [(d, h) for d, h in zip(DEVICE_PAGES.tolist(), HOST_PAGES.tolist(), strict=True) if d >= 0 and h >= 0]


@on_cpu
@pytest.mark.parametrize("module", [mirror_pages, mirror_pages_torch])
@pytest.mark.parametrize(("row", "pitch"), SHAPES)
def test_mirrors(module, row, pitch):
    pools, hosts = problem(row, pitch)
    for layered in (False, True):
        expected = [host.bytes.clone() for host in hosts]
        for d, h in pairs_of_pages():
            for layer in range(3 if layered else 1):
                expected[layer][h * PAGE : (h + 1) * PAGE, :row] = pools[layer][d * PAGE : (d + 1) * PAGE]
        if layered:
            module.mirror_layers(pool_pairs(pools, hosts), DEVICE_PAGES, HOST_PAGES, page_size=PAGE)
        else:
            module.mirror_pages(pools[0], hosts[0], DEVICE_PAGES, HOST_PAGES, page_size=PAGE)
        assert all(torch.equal(host.bytes, want) for host, want in zip(hosts, expected, strict=True))


@on_cpu
@pytest.mark.parametrize("module", [mirror_pages, mirror_pages_torch])
@pytest.mark.parametrize(("row", "pitch"), SHAPES)
def test_restores(module, row, pitch):
    pools, hosts = problem(row, pitch)
    for layered in (False, True):
        expected = [pool.clone() for pool in pools]
        for d, h in pairs_of_pages():
            for layer in range(3 if layered else 1):
                expected[layer][d * PAGE : (d + 1) * PAGE] = hosts[layer].bytes[h * PAGE : (h + 1) * PAGE, :row]
        if layered:
            module.restore_layers(pool_pairs(pools, hosts), HOST_PAGES, DEVICE_PAGES, page_size=PAGE)
        else:
            module.restore_pages(hosts[0], pools[0], HOST_PAGES, DEVICE_PAGES, page_size=PAGE)
        assert all(torch.equal(pool, want) for pool, want in zip(pools, expected, strict=True))


@on_cpu
def test_layers_that_start_at_odd_places():
    pools = [noise(81, 64, layer).flatten()[layer : layer + 80 * 64].view(80, 64) for layer in range(3)]
    hosts = [Rows(64, 64).noise(9 + layer) for layer in range(3)]
    mirror_pages.mirror_layers(pool_pairs(pools, hosts), DEVICE_PAGES[:2], HOST_PAGES[:2], page_size=PAGE)
    for pool, host in zip(pools, hosts, strict=True):
        assert torch.equal(host.bytes[7 * PAGE : 8 * PAGE], pool[3 * PAGE : 4 * PAGE])


@on_cpu
def test_more_pages_than_programs_and_none():
    pools, hosts = problem(656, 656, layers=2)
    first = torch.randperm(10).int()[:8]
    second = torch.randperm(8).int()
    mirror_pages.mirror_layers(pool_pairs(pools, hosts), first, second, page_size=PAGE, config=PagesConfig(programs=3, block=512, warps=4))
    for pool, host in zip(pools, hosts, strict=True):
        assert torch.equal(host.bytes.view(-1, PAGE, 656)[second.long()], pool.view(-1, PAGE, 656)[first.long()])
    before = hosts[0].bytes.clone()
    mirror_pages.mirror_pages(pools[0], hosts[0], first[:0], second[:0], page_size=PAGE)
    assert torch.equal(hosts[0].bytes, before)


def test_what_does_not_fit_is_refused():
    pools, hosts = problem(64, 64)
    for module in (mirror_pages, mirror_pages_torch):
        with pytest.raises(ValueError, match="one row layout"):
            module.mirror_pages(pools[0][:, :48], hosts[0], DEVICE_PAGES, HOST_PAGES, page_size=PAGE)
        with pytest.raises(ValueError, match="page lists must be"):
            module.restore_pages(hosts[0], pools[0], HOST_PAGES, DEVICE_PAGES[:2], page_size=PAGE)
        with pytest.raises(ValueError, match="contiguous int32"):
            module.mirror_pages(pools[0], hosts[0], DEVICE_PAGES.long(), HOST_PAGES.long(), page_size=PAGE)
    with pytest.raises(ValueError, match="each layer needs"):
        pool_pairs(pools, hosts[:1])
    with pytest.raises(ValueError, match="layers must agree"):
        pool_pairs(pools[:2], [hosts[0], Rows(64, 64, 80)])


def test_compiles_for_hopper():
    signature = {
        **dict.fromkeys(("source", "target"), "*u8"),
        **dict.fromkeys(("source_pages", "target_pages"), "*i32"),
        **dict.fromkeys(("source_offsets", "target_offsets"), "*i64"),
        **dict.fromkeys(("n_pages", "n_layers"), "i32"),
    }
    specs = [
        Spec(
            fn="rorqual.attention.kernels.mirror_pages:copy_pages_kernel",
            signature=signature,
            constexprs={
                "PIECE": piece,
                "PIECES": pieces,
                "SOURCE_PITCH": piece,
                "TARGET_PITCH": pitch,
                "UNIT": 16,
                "BLOCK": 2048,
                "LAYERED": True,
            },
            aligned=("source", "target"),
            options={"num_warps": 4},
        )
        for piece, pieces, pitch in ((64 * 656, 1, 64 * 656), (656, 64, 704))
    ]
    for report in compile_reports(specs):
        assert report.spill_bytes == 0 and report.shared <= SMEM_LIMIT
        assert "LDG.E.128" in report.sass and "STG.E.128" in report.sass
