"""The top-k kernels in the interpreter against the plain PyTorch version, and what they compile to."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import topk, topk_torch  # noqa: E402
from rorqual.attention.kernels.topk_plan import TopkPlan  # noqa: E402
from tests.kernels.interpreter import repair  # noqa: E402
from tests.kernels.offline import Spec, compile_reports  # noqa: E402

repair()

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")

PAGE = 16
#: small sizes of everything, so that rows of some hundred scores take every path
SMALL = {"capacity": 64, "sample": 32, "block": 64, "warps": 1, "row_block": 128, "row_warps": 1, "programs": 2, "registers": 128}
PLANS = {
    "parts": TopkPlan(by_rows=False, group=1, emit=64, **SMALL),
    "rows": TopkPlan(by_rows=True, group=4, emit=16, **SMALL),
}


def pages(requests: int, positions: int) -> torch.Tensor:
    """Pages in a shuffled order."""
    each = -(-positions // PAGE)
    return torch.randperm(requests * each, dtype=torch.int32).view(requests, each)


def scores(kind: str, rows: int, length: int) -> torch.Tensor:
    x = torch.randn(rows, length)
    if kind == "relu":
        x = (x - 1.5).relu() * torch.where(torch.rand(rows, length) < 0.5, -0.0, 1.0)
    elif kind == "few":
        values = torch.tensor([0.0, -0.0, 1.0, -1.0, float("-inf"), float("inf"), float("nan")])
        x = values[torch.randint(len(values), (rows, length))]
    elif kind == "nan":
        x = torch.full((rows, length), float("nan"))
    elif kind == "clustered":  # the sample misses what counts
        x = torch.arange(length).expand(rows, length).float() ** 3
        x[:, length // 3 : length // 3 + 20] += 1e12
    elif kind == "negative nan":
        x = torch.where(torch.rand(rows, length) < 0.3, -torch.tensor(float("nan")), x)
    return x


def check(x, limit, k, table, token_row, length, plan):
    wanted = topk_torch.select_rows(x, limit, k, table, token_row, page_size=PAGE, max_context=length)
    got = topk.select_rows(x, limit, k, table, token_row, page_size=PAGE, max_context=length, plan=plan)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.dtype == torch.int32
        assert torch.equal(ours, theirs)


@interpreted
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["random", "relu", "few", "nan", "negative nan", "clustered"])
def test_equals_the_plain_version(plan, kind):
    torch.manual_seed(0)
    length, k = 200, 12
    limit = torch.tensor([0, 11, 12, 13, 64, 65, 128, 200], dtype=torch.int32)
    buffer = scores(kind, len(limit), length + 5)
    x = buffer[:, :length]  # rows that are not contiguous
    for row, n in enumerate(limit.tolist()):
        buffer[row, n:] = float("inf") if row % 2 else float("nan")  # past the limit anything
    table = pages(3, length)
    check(x, limit, k, table, torch.arange(len(limit)) % 3, length, PLANS[plan])


@interpreted
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("k", [1, 7, 33])
def test_any_k(plan, k):
    torch.manual_seed(k)
    limit = torch.tensor([250, 30, 3], dtype=torch.int32)
    check(scores("random", 3, 250), limit, k, pages(3, 250), torch.arange(3), 250, PLANS[plan])


@interpreted
def test_row_at_a_large_stride_and_narrow_contexts():
    torch.manual_seed(1)
    x = torch.randn(3, 4096)[:, :50]
    limit = torch.tensor([50, 20, 9], dtype=torch.int32)
    check(x, limit, 16, pages(3, 50), torch.arange(3), 50, PLANS["parts"])
    assert topk.select_rows(x[:0], limit[:0], 16, pages(3, 50), torch.arange(0), page_size=PAGE, max_context=50)[1].shape == (0, 16)


@interpreted
@pytest.mark.parametrize("capacity", [32, 256])
def test_a_guess_that_misleads_costs_time_only(capacity):
    """A pivot that too few or too many scores reach is noticed; a capacity of twice k overflows often."""
    torch.manual_seed(2)
    x, limit = torch.randn(2, 200), torch.tensor([200, 190], dtype=torch.int32)
    for plan in (PLANS["parts"], PLANS["rows"]):
        small = TopkPlan(**{**vars(plan), "capacity": capacity, "sample": 32, "emit": min(plan.emit, capacity)})
        check(x, limit, 16, pages(2, 200), torch.arange(2), 200, small)


def test_refuses_what_it_cannot_do():
    table, limit = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="1 to 4096"):
        topk.select_rows(torch.zeros(1, 8), limit, 5000, table, limit, page_size=4, max_context=8)
    with pytest.raises(ValueError, match="fp32"):
        topk.select_rows(torch.zeros(1, 8).half(), limit, 4, table, limit, page_size=4, max_context=8)
    with pytest.raises(ValueError, match="fp32"):
        topk.select_rows(torch.zeros(1, 8), limit, 4, table, limit, page_size=4, max_context=9)


GIVEN = {"logits": "*fp32", "logits_stride": "i32", "limit": "*i32", "k": "i32", "max_context": "i32", "page_table": "*i32"}
GIVEN |= {"table_stride": "i32", "token_row": "*i64", "out": "*i32", "out_rows": "*i32"}
STATE = {"pivots": "*i32", "published": "*i32"}
KEPT = {"found": "*fp32", "places": "*i32"}
SCANNED = {name: GIVEN[name] for name in ("logits", "logits_stride", "limit", "max_context")} | STATE | KEPT | {"n_parts": "i32"}


def spec(kernel: str, signature: dict[str, str], warps: int, registers: int | None = None, **constexprs: int) -> Spec:
    return Spec(
        fn=f"rorqual.attention.kernels.topk:{kernel}",
        signature=signature,
        constexprs={"CAPACITY": 8192, "EARLY": True, **constexprs},
        aligned=tuple(name for name in signature if name not in ("n_rows", "table_stride")),
        options={"num_warps": warps, **({} if registers is None else {"maxnreg": registers})},
    )


def test_compiles_for_hopper():
    page = {"PAGE": 64, "K_BLOCK": 2048}
    start, scan, finish, rows = compile_reports(
        [
            spec("topk_start_kernel", GIVEN | STATE, 16, **page, SAMPLE=4096, GROUP=1, PARTS=32),
            spec("topk_scan_kernel", SCANNED, 4, PARTS=32, BLOCK=2048),
            spec("topk_finish_kernel", GIVEN | STATE | KEPT, 16, **page, PARTS=32, BLOCK=4096, EMIT=8192),
            spec("topk_rows_kernel", GIVEN | KEPT | {"n_rows": "i32"}, 8, 128, **page, SAMPLE=2048, GROUP=4, BLOCK=4096, EMIT=2048),
        ]
    )
    for report in (start, scan, finish):
        assert report.spill_bytes == 0
    assert rows.spill_bytes <= 256  # what the loop over rows holds, not what the loops over scores do
    assert scan.registers <= 80
    assert scan.shared <= 1024  # no exchange between threads but sums: loads and stores have one layout
    assert scan.count("LDG") > 0 and "LDG.E.128" in scan.sass
