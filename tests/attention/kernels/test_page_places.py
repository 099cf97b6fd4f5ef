"""The look-up of pages in the interpreter against the plain version, and what it compiles to."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import page_places, page_places_torch  # noqa: E402
from tests.kernels.interpreter import repair  # noqa: E402
from tests.kernels.offline import compile_report  # noqa: E402

repair()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("width", [1, 7, 1030])
def test_equals_the_plain_version(everywhere, writes, width, monkeypatch):
    monkeypatch.setattr(page_places, "_BLOCK", 512)
    generator = torch.Generator().manual_seed(width)
    device_page = torch.randint(-1, 50, (31,), generator=generator, dtype=torch.int32)
    host_page = torch.randint(-1, 50, (31,), generator=generator, dtype=torch.int32)
    moving = torch.randint(0, 2, (9,), generator=generator, dtype=torch.int8)
    table = torch.randint(0, 31, (4, width + 3), generator=generator, dtype=torch.int32)[:, :width]  # rows further apart than they are long
    slots, positions = torch.tensor([8, 0, 3, 5]), torch.randint(0, 4 * width, (4,), generator=generator)
    positions[0], positions[1] = 0, 4 * width - 1
    given = (device_page, host_page, moving, table, slots, positions if writes else None)
    wanted = page_places_torch.page_places(*given, page_size=4, everywhere=everywhere)
    got = page_places.page_places(*given, page_size=4, everywhere=everywhere)
    for name, ours, theirs in zip(wanted._fields, got, wanted, strict=True):
        assert (ours is None) == (theirs is None), name
        assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs)), name
    assert (got.host_table is None) != everywhere and (got.write_rows is None) != writes


@pytest.mark.parametrize("place", [page_places, page_places_torch])
def test_no_requests(place):
    none, pages = torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    got = place.page_places(
        pages, pages, pages.to(torch.int8), torch.empty(0, 5, dtype=torch.int32), none, none, page_size=4, everywhere=True
    )
    assert got.latent_table.shape == got.host_table.shape == (0, 5) and got.moving.shape == got.write_rows.shape == (0,)


def test_compiles_for_hopper():
    pointers = {"device_page": "*i32", "host_page": "*i32", "moving": "*i8", "page_table": "*i32", "table_stride": "i32", "slots": "*i64"}
    pointers |= {"positions": "*i64", "latent_table": "*i32", "host_table": "*i32", "moved": "*i8", "write_rows": "*i64", "width": "i32"}
    constexprs = {"PAGE": 64, "EVERYWHERE": True, "WRITES": True, "BLOCK": 1024}
    report = compile_report("rorqual.attention.kernels.page_places:page_places_kernel", pointers, constexprs)
    assert report.spill_bytes == 0 and report.registers <= 64
