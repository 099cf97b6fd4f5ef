"""The kernels at the ends of a decode step against their twins, in the interpreter (and on a GPU, where there is one)."""

import pytest
import torch

pytest.importorskip("triton")

from rorqual.engine.kernels import step_edges, step_edges_torch  # noqa: E402
from tests.kernels.offline import Spec, compile_reports  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(n: int, used: int, *, page_size: int, assigned: int, seed: int, width: int | None = None):
    """Tables of n + 3 slots; the last one is spare. ``assigned`` rows get a page, at their own position or later."""
    g = torch.Generator().manual_seed(seed)
    spare, width = n + 2, width or used + 2
    real = max(1, n - n // 3)
    slots = torch.cat([torch.randperm(n + 2, generator=g)[:real], torch.full((n - real,), spare)])
    starts = torch.cat([torch.randint(0, used * page_size, (real,), generator=g), torch.zeros(n - real, dtype=torch.int64)])
    tokens = torch.randint(0, 1000, (n + 3, used * page_size + 2), generator=g, dtype=torch.int32)
    pages = torch.randint(0, 1 << 20, (n + 3, width), generator=g, dtype=torch.int32)
    page_at, page = torch.full((n,), spare * width), torch.full((n,), 77)
    for i in range(min(assigned, real)):
        at = starts[i] // page_size if i % 2 == 0 else torch.randint(0, width, (1,), generator=g)[0]
        page_at[i], page[i] = slots[i] * width + at, 5000 + i
    return [x.to(DEVICE) for x in (slots, starts, page_at, page, tokens, pages)], page_size, used


CASES = [
    case(1, 1, page_size=1, assigned=1, seed=0),
    case(1, 5, page_size=64, assigned=0, seed=1),
    case(4, 7, page_size=16, assigned=4, seed=2),
    case(13, 33, page_size=4, assigned=6, seed=3),
    case(64, 3, page_size=64, assigned=40, seed=4),
    case(5, 2500, page_size=1, assigned=5, seed=5),
]


@pytest.mark.parametrize("made", CASES, ids=lambda made: f"{len(made[0][0])}x{made[2]}")
def test_entry_is_its_twins(made):
    inputs, page_size, used = made
    results = []
    for op in (step_edges_torch.enter_step, step_edges.enter_step):
        own = [x.clone() for x in inputs]
        results.append((op(*own, page_size=page_size, used=used), own))
    (wanted, after), (found, changed) = results
    for name, a, b in zip(wanted._fields, wanted, found, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name
    assert all(torch.equal(a, b) for a, b in zip(after, changed, strict=True))
    assert not torch.equal(inputs[5], changed[5]) or bool((inputs[3] == 77).all())


@pytest.mark.parametrize("n", [1, 5, 64])
def test_exit_is_its_twins(n):
    (slots, starts, _, _, tokens, _), _, _ = case(n, 6, page_size=8, assigned=0, seed=n)
    starts = torch.where(slots == n + 2, 0, starts)
    found = torch.where(slots == n + 2, 9, torch.arange(n, device=DEVICE) + 100)
    results = []
    for op in (step_edges_torch.leave_step, step_edges.leave_step):
        table, lanes, counter = tokens.clone(), torch.full((3, n + 4), -1, device=DEVICE), torch.tensor([5], device=DEVICE)
        op(found, slots, starts, table, lanes, counter)
        results.append((table, lanes, counter))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    _, lanes, counter = results[1]
    assert lanes[2, :n].tolist() == found.tolist() and bool((lanes[:2] == -1).all()) and counter.tolist() == [6]


@pytest.mark.parametrize("size", [1, 255, 600])
def test_fetch_is_its_twins(size):
    lanes = torch.arange(3 * 700, device=DEVICE).view(3, 700)
    for op in (step_edges_torch.fetch_inputs, step_edges.fetch_inputs):
        block = torch.full((650,), -1, device=DEVICE)
        op(lanes, torch.tensor([7], device=DEVICE), block[:size])
        assert block[:size].tolist() == list(range(700, 700 + size)) and bool((block[size:] == -1).all())


@pytest.mark.parametrize("n", [1, 17, 300])
@pytest.mark.parametrize("advance", [True, False])
def test_changes_of_places_are_their_twins(n, advance):
    g = torch.Generator().manual_seed(n)
    at, moving_at = torch.randperm(1000, generator=g)[:n], torch.randperm(400, generator=g)[:n]
    at[n // 2 :], moving_at[n // 3 :] = 999, 399  # padding names one place again and again
    values = torch.where(at == 999, -1, torch.arange(n) - 1)
    moving = torch.where(moving_at == 399, 0, torch.arange(n) % 2)
    changes = [x.to(DEVICE) for x in (at, values, moving_at, moving)]
    results = []
    for op in (step_edges_torch.put_places, step_edges.put_places):
        tables = [torch.full((1000,), -5, dtype=torch.int32), torch.zeros(400, dtype=torch.int8), torch.tensor([41], dtype=torch.int32)]
        tables = [x.to(DEVICE) for x in tables]
        op(*changes, *tables, advance=advance)
        results.append(tables)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][2].item() == 41 + advance


def test_compiled_for_sm_90a():
    i64, i32 = "*i64", "*i32"
    entry = {"slots": i64, "starts": i64, "page_at": i64, "page": i64, "tokens": i32, "token_stride": "i32", "pages": i32, "width": "i32"}
    entry |= {"used": "i32", "page_size": "i32", "n_rows": "i32", "ids": i64, "table": i32, "write_rows": i64, "ends": i64, "limit": i32}
    lane = {"lane_stride": "i32", "n_lanes": "i32", "counter": i64}
    leave = {"found": i64, "slots": i64, "starts": i64, "tokens": i32, "token_stride": "i32", "lanes": i64, **lane, "n_rows": "i32"}
    fetch = {"lanes": i64, **lane, "block": i64, "size": "i32"}
    name = "rorqual.engine.kernels.step_edges"
    reports = compile_reports(
        [
            Spec(fn=f"{name}:step_enter_kernel", signature=entry, constexprs={"ROWS": 256, "COLUMNS": 1024}),
            Spec(fn=f"{name}:step_leave_kernel", signature=leave, constexprs={"ROWS": 256}),
            Spec(fn=f"{name}:step_fetch_kernel", signature=fetch, constexprs={"WIDTH": 256}),
        ]
    )
    assert all(r.spill_bytes == 0 and r.registers <= 128 for r in reports)
