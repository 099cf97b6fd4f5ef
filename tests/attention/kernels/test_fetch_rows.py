"""The fetch of missing rows against its twin, and the twin against plain loops."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import fetch_rows, fetch_rows_torch
from rorqual.attention.kernels.fetch_rows import FetchConfig
from tests.attention.kernels.host_rows import Rows, noise
from tests.kernels.offline import SMEM_LIMIT, Spec, compile_reports

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
N_HOST, N_POOL = 50, 80


def lists(requests: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sources on both sides and nowhere, targets below row 60, counts of 0, all and between; poison behind them."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(0, N_HOST, (requests, width), dtype=torch.int32, generator=generator)
    target = torch.randperm(60, generator=generator)[: requests * width].view(requests, width).int()
    count = torch.randint(0, width + 1, (requests,), dtype=torch.int32, generator=generator)
    count[-1] = width
    if requests > 1:
        count[0] = 0
    source[:, 1] = -(60 + torch.arange(requests, dtype=torch.int32) + 2)
    source[:, 2] = -1
    behind = torch.arange(width) >= count[:, None]
    source[behind], target[behind] = 2**31 - 1, -(2**31)
    return source, target, count


def by_hand(host: Rows, pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    expected = pool.clone()
    for r, n in enumerate(count.tolist()):
        for x, y in zip(source[r, :n].tolist(), target[r, :n].tolist(), strict=True):
            if x != -1:
                expected[y] = host.bytes[x, : host.row_bytes] if x >= 0 else pool[-(x + 2)]
    return expected


@pytest.mark.parametrize(("requests", "width"), [(1, 7), (5, 6)])
def test_the_twin_copies_what_is_listed(requests, width):
    host, pool = Rows(N_HOST, 68, 72).noise(1), noise(N_POOL, 68, 2)
    source, target, count = lists(requests, width, 3)
    expected = by_hand(host, pool, source, target, count)
    fetch_rows_torch.fetch_rows(host, pool, source, target, count)
    assert torch.equal(pool, expected)


@on_cpu
@pytest.mark.parametrize(
    ("row", "pitch", "requests", "width", "config"),
    [
        (656, 656, 1, 7, FetchConfig(programs=4, rows=1, warps=1)),
        (656, 704, 3, 8, FetchConfig(programs=4, rows=2, warps=1)),
        (1152, 1152, 2, 5, FetchConfig(programs=2, rows=4, warps=1)),
        (68, 68, 5, 6, FetchConfig(programs=3, rows=4, warps=1)),  # rows that start at 4 bytes
        (70, 72, 1, 6, FetchConfig(programs=3, rows=2, warps=1)),  # ... at 2 bytes
        (33, 33, 2, 4, FetchConfig(programs=5, rows=1, warps=1)),  # ... anywhere
        (320, 320, 17, 3, FetchConfig(programs=16, rows=2, warps=1)),
    ],
)
def test_the_kernel_is_the_twin(row, pitch, requests, width, config):
    host, pool = Rows(N_HOST, row, pitch).noise(1), noise(N_POOL, row, 2)
    source, target, count = lists(requests, width, 3)
    expected = by_hand(host, pool, source, target, count)
    fetch_rows.fetch_rows(host, pool, source, target, count, config=config)
    assert torch.equal(pool, expected)


@on_cpu
@pytest.mark.parametrize("count", [0, 9])
def test_nothing_and_everything(count):
    host, pool = Rows(N_HOST, 64).noise(1), noise(N_POOL, 64, 2)
    source, target = torch.arange(9, dtype=torch.int32)[None], torch.arange(20, 29, dtype=torch.int32)[None]
    expected = pool.clone()
    expected[20 : 20 + count] = host.bytes[:count]
    fetch_rows.fetch_rows(host, pool, source, target, torch.tensor([count], dtype=torch.int32))
    assert torch.equal(pool, expected)


def test_what_does_not_fit_is_refused():
    host, pool = Rows(N_HOST, 64), noise(N_POOL, 64, 2)
    source, target, count = lists(2, 4, 3)
    for module in (fetch_rows, fetch_rows_torch):
        with pytest.raises(ValueError, match="one row layout"):
            module.fetch_rows(host, noise(N_POOL, 48, 2), source, target, count)
        with pytest.raises(ValueError, match="must be uint8"):
            module.fetch_rows(host, pool.int(), source, target, count)
        with pytest.raises(ValueError, match="allocate them together"):
            module.fetch_rows(host, pool, source, target, count[:1])
        with pytest.raises(ValueError, match="source must be contiguous int32"):
            module.fetch_rows(host, pool, source.long(), target, count)


def test_compiles_for_hopper():
    signature = dict.fromkeys(("host", "device", "pool"), "*u8") | dict.fromkeys(("source", "target", "count"), "*i32")
    specs = [
        Spec(
            fn="rorqual.attention.kernels.fetch_rows:fetch_rows_kernel",
            signature={**signature, "requests": "i32", "width": "i32"},
            constexprs={
                **dict.fromkeys(("ROW", "HOST_PITCH", "DEVICE_PITCH", "POOL_PITCH"), row),
                **{"UNIT": 16, "LINE": 128, "BLOCK": block, "REQUESTS": requests, "ROWS": rows, "EARLY": True},
            },
            aligned=tuple(signature),
            options={"num_warps": 1},
        )
        for row, block, requests, rows in ((656, 1024, 1, 1), (656, 1024, 64, 4), (1152, 2048, 256, 4))
    ]
    for report in compile_reports(specs):
        assert report.spill_bytes == 0 and report.shared <= SMEM_LIMIT
        assert "LDG.E.128" in report.sass and "STG.E.128" in report.sass
