"""Dense decode in the interpreter against the plain version: pages, ragged requests, cuts of the keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import dense_decode_torch  # noqa: E402
from rorqual.attention.kernels.dense_decode import DecodeLaunch, dense_decode  # noqa: E402
from rorqual.attention.kernels.dense_decode_plan import dense_decode_plan_kernel  # noqa: E402
from rorqual.attention.kv.layout import encode_latent  # noqa: E402
from tests.kernels.interpreter import repair  # noqa: E402
from tests.kernels.offline import SMEM_LIMIT, Report, compile_reports  # noqa: E402

from .test_sparse_prefill import SPECS  # noqa: E402

repair()

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero|overflow:RuntimeWarning")

RAGGED = [(1, 120), (3, 70), (2, 33), (3, 4), (1, 0), (3, 130), (1, 1)]  # tokens and keys of each request


def problem(requests: list[tuple[int, int]], page: int, latent: int, rope: int, heads: int, fp8: bool) -> dict[str, Any]:
    """Pages in a shuffled order; what no token sees holds NaN, pages past a request's keys are -1 or another's."""
    torch.manual_seed(page)
    width = -(-max(keys for _, keys in requests) // page) + 2
    table = torch.randperm(len(requests) * width).int().view(len(requests), width)
    values = torch.randn(table.numel() * page, latent + rope)
    pool = encode_latent(values, latent) if fp8 else values
    unused = torch.ones(len(pool), dtype=torch.bool)
    for r, (_, keys) in enumerate(requests):
        place = torch.arange(keys)
        unused[table[r].long()[place // page] * page + place % page] = False
        table[r, -1] = -1
    pool[unused] = 255 if fp8 else float("nan")
    token_row = torch.tensor([r for r, (n, _) in enumerate(requests) for _ in range(n)])
    limit = torch.tensor([max(0, keys - n + 1 + i) for n, keys in requests for i in range(n)], dtype=torch.int32)
    return {
        "q_latent": torch.randn(heads, len(limit), latent).transpose(0, 1),
        "q_rope": torch.randn(len(limit), heads, rope),
        "pool": pool,
        "page_table": table,
        "token_row": token_row,
        "limit": limit,
        "page_size": page,
        "scale": 0.13,
        "max_context": width * page,
        "max_query": max(n for n, _ in requests),
    }


def check(given: dict[str, Any], launch: DecodeLaunch) -> None:
    out, lse = dense_decode(**given, launch=launch)
    wanted, wanted_lse = dense_decode_torch.dense_decode(**given)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize(("page", "fp8"), [(16, False), (1, False), (7, True), (64, True)])
def test_pages_of_any_size(page, fp8):
    check(problem(RAGGED, page, 64, 16, 4, fp8), DecodeLaunch(key_block=32, programs=9, least=64))


@interpreted
@pytest.mark.parametrize("programs", [1, 5, 64])
def test_cuts_change_nothing(programs):
    check(problem(RAGGED, 16, 48, 16, 3, False), DecodeLaunch(key_block=32, programs=programs, least=64))


@interpreted
@pytest.mark.parametrize("heads", [1, 20])
def test_heads(heads):
    check(problem([(2, 70), (1, 64), (2, 2)], 16, 128, 32, heads, True), DecodeLaunch(key_block=32, programs=4, least=64))


@interpreted
def test_more_tokens_than_a_plan_block():
    requests = [(1, 1 + i % 5) for i in range(40)]
    given = problem(requests, 4, 16, 16, 1, False)
    check(given, DecodeLaunch(key_block=16, programs=64, least=64))


@interpreted
@pytest.mark.parametrize("together", [1, 2, 4])
def test_a_plan_covers_every_key_once(together):
    token_row = torch.tensor([r for r, (n, _) in enumerate(RAGGED) for _ in range(n)])
    limit = torch.tensor([max(0, keys - n + 1 + i) for n, keys in RAGGED for i in range(n)], dtype=torch.int32)
    tokens, programs = len(limit), 6
    units = torch.full((tokens + programs, 8), -7, dtype=torch.int32)
    of_token = torch.full((tokens, 4), -7, dtype=torch.int32)
    dense_decode_plan_kernel[(1,)](token_row, limit, units, of_token, tokens, len(units), programs, 64, B=together, BT=8, U=64)
    assert int((of_token[:, :3] == -7).sum()) == 0
    covered: dict[int, list[int]] = {t: [] for t in range(tokens)}
    parts = []
    for first, led, begin, end, _, request, part, _ in units.tolist():
        for t in range(first, first + led):
            assert int(token_row[t]) == request
            covered[t] += list(range(begin, min(end, int(limit[t]))))
        if led and part >= 0:
            parts.append(part)
    assert all(covered[t] == list(range(int(limit[t]))) for t in range(tokens))
    assert parts == list(range(len(parts))) and len(parts) <= 2 * programs


def test_refuses_what_does_not_fit():
    given = problem(RAGGED, 16, 48, 16, 2, False)
    with pytest.raises(ValueError, match="page_table is torch.int64"):
        dense_decode(**{**given, "page_table": given["page_table"].long()})
    with pytest.raises(ValueError, match="page_size is 0"):
        dense_decode_torch.dense_decode(**{**given, "page_size": 0})


PAGED = {"PAGE": 64, "COUNTS": True}


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    specs = {}
    for name, spec in SPECS.items():
        pointers = {"n_keys": "*i32", "units": "*i32", "parts": "*fp32", "part_lse": "*fp32"}
        kept = {key: value for key, value in spec.constexprs.items() if key not in pointers}
        specs[name] = type(spec)(
            fn=spec.fn,
            signature={**spec.signature, **pointers},
            constexprs={**kept, **PAGED},
            aligned=spec.aligned,
            gluon=True,
            options=spec.options,
        )
    return dict(zip(specs, compile_reports(list(specs.values())), strict=True))


def test_hopper_kernels_over_pages_use_warpgroup_products_and_hardly_spill(reports):
    for name, report in reports.items():
        assert report.count("HGMMA") and not report.count("HMMA"), name
        assert report.spill_bytes <= (80 if name == "wide" else 0) and report.shared <= SMEM_LIMIT, name
