"""``bench kv link``: what is fetched, and what is refused; the times need a GPU."""

from __future__ import annotations

import pytest
import torch

from rorqual.launch.bench.kv.link import Link
from rorqual.launch.bench.kv.link_command import choices, line
from rorqual.launch.bench.kv.link_rows import Choice, Choices, MemoryRows
from rorqual.launch.bench.results import Row
from rorqual.launch.cli import main

N_HOST, N_DEVICE = 60_000, 5_000


def lists(**options) -> Choices:
    return Choices(Choice(requests=3, rows=40, context=8192, **options), N_HOST, 656, N_DEVICE, 4, "cpu")


@pytest.mark.parametrize("placement", ["range", "extents", "pages", "rows"])
@pytest.mark.parametrize("order", ["positions", "addresses", "mixed"])
def test_choices_stay_in_the_pools_and_are_new_each_time(placement, order):
    made = lists(placement=placement, order=order)
    before = [tensor.clone() for tensor in made.source]
    made.refill()
    for source, target, count, old in zip(made.source, made.target, made.count, before, strict=True):
        assert source.shape == target.shape == (3, 40) and count.tolist() == [40] * 3
        assert 0 <= int(source.min()) and int(source.max()) < N_HOST
        assert len(set(target.flatten().tolist())) == 120 and int(target.max()) < N_DEVICE
        assert not torch.equal(source, old)
        if order == "addresses" or (placement, order) == ("range", "positions"):
            assert torch.equal(source, source.sort(1).values)


def test_an_extent_is_two_mebibytes_of_whole_pages():
    assert lists().unit == 49 * 64
    assert lists(placement="pages").unit == 64


def test_memory_as_rows():
    rows = MemoryRows(torch.arange(250, dtype=torch.uint8), 48)
    assert rows.n_rows == 5 and rows.bytes.shape == (5, 48) and rows.data_ptr() == rows.memory.data_ptr()
    assert int(rows.bytes[3, 1]) == 145


def test_a_line_says_what_the_floor_is_and_whether_the_target_is_met():
    link = Link(gb_per_s=50.0, round_trip_us=1.5, piece_ns=24.0)
    params = {"rows": 2048, "requests": 1, "context": 131072, "pool_gib": 64.0, "placement": "extents", "order": "positions"}
    row = Row(name="fetch, 656 B rows", params=params, value=45.0, unit="GB/s", better="higher", target=42.5)
    text = line(row, 29.9, link.floor_us(2048 * 656), link)
    assert "90% of the link" in text and "floor   28.37" in text and "target 42.5 met" in text


def test_quick_measures_one_placement():
    assert len(choices(1, 274, [131072, 16384], quick=True)) == 2 and len(choices(1, 274, [131072, 16384], quick=False)) == 8


def test_the_floor_is_the_link_s_or_the_translations():
    link = Link(gb_per_s=50.0, round_trip_us=1.5, piece_ns=24.0)
    assert link.floor_us(500_000) == pytest.approx(11.5) and link.floor_us(500_000, 1000) == pytest.approx(25.5)
    made = lists(placement="rows")
    made.source[0].copy_(torch.arange(120).view(3, 40))  # 120 rows of 656 bytes from the start: two pieces
    assert made.pieces() > 60
    for source in made.source:
        source.copy_(made.source[0])
    assert made.pieces() == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "12"], "--rows takes requests x rows"),
        (["--rows", "300x1"], "--rows takes requests x rows"),
        (["--pool-gib", "a"], "--pool-gib takes whole numbers"),
        (["--context", "1000"], "--context must be at least"),
        (["--row-bytes", "100"], "--row-bytes must be multiples of 16"),
    ],
)
def test_wrong_flags_are_refused(capsys, words, message):
    assert main(["bench", "kv", "link", *words]) == 2
    assert message in capsys.readouterr().err
