"""Sizes and layouts as people type them."""

from __future__ import annotations

import pytest

from rorqual.launch.quantities import parse_bytes, parse_layout


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("141GB", 141 * 10**9),
        ("131.5 GiB", int(131.5 * 2**30)),
        ("2t", 2**41),
        ("512MiB", 2**29),
        ("640kB", 640_000),
        ("1024", 1024),
        ("7B", 7),
    ],
)
def test_amounts_of_memory(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "GB", "12 parsecs", "-1GB", "1e9", "1,5GB", "9" * 400])
def test_other_texts_are_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is no amount of memory; write for example 141GB"):
        parse_bytes(text)


def test_layouts() -> None:
    assert parse_layout("dp8") == {"dp": 8}
    assert parse_layout("pp2,tp4") == {"pp": 2, "tp": 4}
    assert parse_layout(" PP2 x dp=2xtp4 ep1") == {"pp": 2, "dp": 2, "tp": 4, "ep": 1}


@pytest.mark.parametrize("text", ["", "8", "dp8,dp2", "tp0", "dp8+tp2", "sp4"])
def test_other_layouts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write degrees of pp, dp, tp and ep once each"):
        parse_layout(text)


def test_a_refused_layout_is_named_whole_when_it_falls_apart_at_its_x() -> None:
    with pytest.raises(ValueError, match="cannot use 'xx3'"):
        parse_layout("xx3")
