"""The helper that starts ranks: results, failures with the first error on top, timeouts."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch

from tests.ranks import collect_ranks, run_ranks


def square(x: int) -> tuple[int, torch.Tensor, str]:
    rank = int(os.environ["RANK"])
    return rank * x, torch.full((2,), float(rank)), os.environ.get("EXTRA", "")


def test_results_in_rank_order() -> None:
    begin = time.monotonic()
    results = run_ranks(square, 8, 3, env={"EXTRA": "e"})
    assert [r[0] for r in results] == [0, 3, 6, 9, 12, 15, 18, 21] and all(r[2] == "e" for r in results)
    assert torch.equal(results[5][1], torch.full((2,), 5.0))
    assert time.monotonic() - begin < 20


def fail_after(seconds: list[float]) -> None:
    rank = int(os.environ["RANK"])
    time.sleep(seconds[rank])
    raise RuntimeError(f"broken {rank}")


def test_first_error_is_on_top() -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(fail_after, 2, [1.0, 0.0])
    text = str(caught.value)
    assert text.startswith("--- rank 1 ended with code 1") and text.index("broken 1") < text.index("broken 0")


def hang(seconds: float) -> None:
    print("about to hang", file=sys.stderr)
    time.sleep(seconds if os.environ["RANK"] == "1" else 0)


def test_timeout_kills_and_says_so() -> None:
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1 did not end within 2 s\n.*about to hang"):
        run_ranks(hang, 2, 60.0, timeout=2.0)
    assert time.monotonic() - begin < 10


def leave(code: int) -> None:
    os._exit(code)


def test_exit_codes() -> None:
    exits = collect_ranks(leave, 2, 7)
    assert [e.code for e in exits] == [7, 7]
