"""Ranks compare before they connect: what differs, who is missing and whose clock is off is said by name, on all ranks."""

from __future__ import annotations

import os
import time

import pytest
import torch

from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.group import CollectiveError
from rorqual.parallel.ranges import spans
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def differing(key: str, values: list[object]) -> str:
    rank = int(os.environ["RANK"])
    os.environ["GROUP_RANK"] = str(rank // 2)
    try:
        grid = Grid.create(GridSpec(dp=4), CPU, 20.0, facts={"same": [1, 2], key: values[rank]})
    except ValueError as error:
        return str(error)
    hosts = grid.hosts
    grid.close()
    return f"met: {hosts}"


def test_facts_that_differ_are_named_on_all_ranks() -> None:
    texts = run_ranks(differing, 4, "page_size", [64, 64, 32, 64])
    assert len(set(texts)) == 1, texts
    assert "not started alike: page_size is 64 on " in texts[0] and "(ranks 0-1, 3), 32 on " in texts[0] and "(ranks 2)" in texts[0]
    assert all(text.startswith("met: ") for text in run_ranks(differing, 4, "page_size", [64] * 4))


def layouts() -> str:
    rank = int(os.environ["RANK"])
    spec = GridSpec(tp=2) if rank else GridSpec(dp=2)
    try:
        Grid.create(spec, CPU, 20.0, facts={"tensor_parallel_size": spec.tp}).close()
    except ValueError as error:
        return str(error)
    return ""


def test_other_degrees_on_one_node_do_not_hang() -> None:
    assert all("tensor_parallel_size is 1 on" in text for text in run_ranks(layouts, 2))


def declining(bad: int) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        with Grid.declining():
            if int(os.environ["RANK"]) == bad:
                raise ValueError("no such folder: /models/x")
        Grid.create(GridSpec(dp=3), CPU, 60.0).close()
    except ValueError as error:
        return str(error), time.monotonic() - begin
    return "", 0.0


@pytest.mark.parametrize("bad", [0, 2])
def test_a_rank_that_gives_up_tells_the_others(bad: int) -> None:
    for rank, (text, seconds) in enumerate(run_ranks(declining, 3, bad)):
        assert text.endswith("no such folder: /models/x") and seconds < 30
        assert rank == bad or text.startswith(f"rank {bad} on ")


def wrong_clock(ahead_s: float, allowed_s: float) -> str:
    rank = int(os.environ["RANK"])
    os.environ.update(GROUP_RANK=str(rank), LOCAL_RANK="0")
    if rank == 1:
        real = time.time
        time.time = lambda: real() + ahead_s  # type: ignore[assignment]
    try:
        Grid.create(GridSpec(dp=2), CPU, 20.0, max_skew_s=allowed_s).close()
    except ValueError as error:
        return str(error)
    return "met"


def test_a_clock_that_is_off_is_named() -> None:
    for text in run_ranks(wrong_clock, 2, 3600.0, 10.0):
        assert "the clock of " in text and "3600.0 s ahead of" in text and "at most 10 s" in text, text
    assert "90.0 s behind" in run_ranks(wrong_clock, 2, -90.0, 10.0)[0]
    assert run_ranks(wrong_clock, 2, 5.0, 20.0) == ["met", "met"]


def absent() -> str:
    if os.environ["RANK"] == "0":
        return ""
    with pytest.raises(CollectiveError) as caught:
        Grid.create(GridSpec(dp=3), CPU, 2.0)
    assert list(caught.value.missing) == [0]
    return str(caught.value)


def test_a_missing_rank_0_is_named_by_the_others() -> None:
    assert all("missing rank 0 (never heard of)" in text for text in run_ranks(absent, 3)[1:])


def test_spans() -> None:
    assert spans([]) == "" and spans([3]) == "3" and spans([5, 0, 1, 2, 7, 8]) == "0-2, 5, 7-8"
