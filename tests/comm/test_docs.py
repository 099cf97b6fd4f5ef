"""What the page on the all-to-all points to exists: backends, checks, tests, flags."""

from __future__ import annotations

import re
from pathlib import Path

from rorqual.comm.select import BACKENDS
from rorqual.comm.wire import Wire, workspace_bytes
from rorqual.launch.bench.comm.checks import CHECKS, FAULTS
from tests.comm.test_wire import SPEC

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "all-to-all.md").read_text(encoding="utf-8")


def test_every_backend_has_its_row() -> None:
    rows = [line for line in PAGE.split("## Using it")[0].splitlines() if line.startswith("| `") and "--moe" not in line]
    assert {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])} == set(BACKENDS) - {"auto", "local"}


def test_every_complaint_names_a_check_or_a_test_that_exists() -> None:
    table = PAGE.split("| reported |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(table) >= 29
    for row in table:
        names = re.findall(r"`([^`]+)`", row.split("|")[3])
        assert names or "by construction" in row or "engine's tests" in row, row
        for name in names:
            file, _, function = name.partition("::")
            if name.endswith(".py") or function:
                path = ROOT / file if "/" in file else ROOT / "tests" / "comm" / file
                assert path.exists() and f"def {function.removesuffix('...')}" in path.read_text(encoding="utf-8"), name
            else:
                assert name in {*CHECKS, *FAULTS, "all_none", "same_rank", "all_to_one"}, name


def test_the_sizes_of_the_page_are_those_of_the_formula() -> None:
    wire = Wire.of(SPEC)
    for size in ((wire.home_at - wire.rows_at), wire.channel_bytes, workspace_bytes(SPEC)):
        assert f"{size / 2**20:.1f} MiB" in PAGE
    by_expert = 256 * 128 * wire.row_bytes  # a place for every token at every expert
    assert f"takes {by_expert / 2**20:.0f}" in PAGE
