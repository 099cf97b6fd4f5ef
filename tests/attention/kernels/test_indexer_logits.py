"""The twin against the fp64 formula, the portable kernel in the interpreter, what the Hopper kernel compiles to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels.indexer_logits_torch import indexer_logits as twin
from rorqual.attention.kv.rows import Fp4IndexRows, Fp8IndexRows
from tests.attention.kernels.indexer_problem import problem
from tests.kernels.interpreter import repair
from tests.kernels.offline import SMEM_LIMIT, Report, Spec, compile_reports

repair()

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
FP8 = torch.float8_e4m3fn


def kernel(*args: Any, **more: Any) -> torch.Tensor:
    from rorqual.attention.kernels.indexer_logits import indexer_logits

    return indexer_logits(*args, **more)


@pytest.mark.parametrize("store_type", [Fp8IndexRows, Fp4IndexRows])
def test_twin_is_the_formula_over_a_written_cache(store_type: type[Fp8IndexRows] | type[Fp4IndexRows]) -> None:
    torch.manual_seed(1)
    store = store_type(9, 16, 32, torch.float32, torch.device("cpu"))
    store.poison(torch.arange(9))
    table = torch.tensor([[4, 1, 7]], dtype=torch.int32)
    rows = table[0].long()[torch.arange(40) // 16] * 16 + torch.arange(40) % 16
    store.write(rows, torch.randn(40, 32) * torch.logspace(-3, 3, 40)[:, None])
    q, weights = torch.randn(2, 4, 32).to(FP8), torch.randn(2, 4)
    limit = torch.tensor([39, 40], dtype=torch.int32)
    zeros = torch.zeros(2, dtype=torch.int32)
    out = twin(q, weights, store.pages, table, zeros, limit, page_size=16, max_context=40, max_query=2)
    keys = store.read(rows)
    for t in range(2):
        true = (weights[t, :, None] * (q[t].float() @ keys.T).relu()).sum(0)
        torch.testing.assert_close(out[t, : limit[t]], true[: limit[t]], rtol=1e-5, atol=1e-5 * float(true.abs().max()))


@interpreted
@pytest.mark.parametrize(("page_size", "heads", "width"), [(1, 4, 32), (16, 32, 32), (64, 4, 64), (256, 64, 128)])
def test_kernel_over_fp8(page_size: int, heads: int, width: int) -> None:
    case = problem([(150, 1), (20, 20), (1, 1), (130, 2)], heads=heads, width=width, page_size=page_size)
    out = torch.full((24, 192), float("nan"))
    assert case.error(case.call(kernel, out=out)) < 1e-5
    assert case.error(case.call(twin)) < 1e-5
    assert bool(out[~case.defined(192)].isnan().all())


@interpreted
@pytest.mark.parametrize(("page_size", "heads", "width"), [(1, 4, 32), (16, 32, 32), (64, 4, 64), (256, 64, 128), (16, 4, 256)])
def test_kernel_over_fp4(page_size: int, heads: int, width: int) -> None:
    case = problem([(150, 1), (20, 20), (1, 1), (130, 2)], heads=heads, width=width, page_size=page_size, fp4=True)
    out = torch.full((24, 192), float("nan"))
    assert case.error(case.call(kernel, out=out)) < 1e-5
    assert case.error(case.call(twin)) < 1e-5
    assert bool(out[~case.defined(192)].isnan().all())


@interpreted
@pytest.mark.parametrize(
    ("dtype", "pool_dtype"), [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.bfloat16)]
)
def test_kernel_over_floats(dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    case = problem([(90, 3), (70, 1)], heads=4, width=32, page_size=16, dtype=dtype, pool_dtype=pool_dtype, row_type=torch.int64)
    assert case.error(case.call(kernel)) < 1e-5
    assert case.error(case.call(twin)) < 1e-5


@interpreted
@pytest.mark.parametrize("fp4", [False, True])
def test_ranges_with_a_start_and_tokens_without_keys(fp4: bool) -> None:
    case = problem([(150, 3), (90, 2)], heads=4, width=32, page_size=16, fp4=fp4)
    start = torch.tensor([0, 149, 17, 90, 3], dtype=torch.int32)
    case = replace(case, start=start)
    case.limit[0] = 0
    case.token_row[4] = -1
    for function in (kernel, twin):
        assert case.error(case.call(function, out=torch.full((5, 150), float("nan")))) < 1e-5


@interpreted
@pytest.mark.parametrize("fp4", [False, True])
def test_a_token_alone_gives_the_same_bits(fp4: bool) -> None:
    case = problem([(150, 3), (90, 30)], heads=4, width=32, page_size=16, fp4=fp4)
    whole, mask = case.call(kernel), case.defined(case.max_context)
    for token in (1, 20):
        alone = case.rows(slice(token, token + 1)).call(kernel)
        assert torch.equal(alone[0, : case.max_context][mask[token]], whole[token, : case.max_context][mask[token]])


def test_no_tokens() -> None:
    case = problem([(90, 3)], heads=4, width=32, page_size=16).rows(slice(0, 0))
    assert len(case.call(kernel)) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 48}, "power of two"),
        ({"page_size": 32}, "FP8 pool"),
        ({"max_context": 10_000}, "page table"),
        ({"max_query": 0}, "max_query"),
        ({"out": torch.zeros(3, 10)}, "out must be"),
        ({"start": torch.zeros(2)}, "start must be"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    case = problem([(90, 3)], heads=4, width=32, page_size=16)
    with pytest.raises(ValueError, match=message):
        case.call(twin, **change)


def test_settings_that_cannot_work_are_refused() -> None:
    from rorqual.attention.kernels.indexer_logits_schedule import constants, default_config

    config = default_config(64, 64)
    with pytest.raises(ValueError, match="multiple of key_ways"):
        constants(64, 64, 64, False, **{**config, "query_ways": 1, "key_ways": 3, "stages": 8})
    with pytest.raises(ValueError, match="at most 3"):
        constants(64, 64, 64, False, **{**config, "query_ways": 2, "key_ways": 2})


def _hopper_specs() -> dict[str, Spec]:
    from rorqual.attention.kernels.indexer_logits_schedule import default_config

    shapes = [(64, 1), (64, 2), (64, 4), (64, 6), (64, 64), (32, 1), (32, 4), (32, 64)]
    specs = {f"{heads} heads, {query} tokens": _hopper_spec(heads, query, default_config(heads, query)) for heads, query in shapes}
    for heads, query in ((64, 1), (64, 2), (64, 64), (32, 1), (32, 64)):
        config = default_config(heads, query, fp4=True)
        specs[f"fp4, {heads} heads, {query} tokens"] = _hopper_spec(heads, query, config, fp4=True)
    return specs


def _hopper_spec(heads: int, query: int, config: dict[str, Any], fp4: bool = False) -> Spec:
    from rorqual.attention.kernels.indexer_logits_schedule import constants

    bytes_layout = (
        "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2, transposed=False, fp4_padded=False, cga_layout=[])"
    )
    float_layout = bytes_layout.replace("128", "0").replace("=8", "=32")
    key_layout = bytes_layout.replace("128", "64") if fp4 else bytes_layout
    columns = config["tokens"] * heads
    settings = constants(heads, query, 64, False, **config)
    options = {name: settings[name] for name in ("num_warps", "maxnreg", "launch_pdl")}
    return Spec(
        fn="rorqual.attention.kernels.indexer_logits_hopper:indexer_logits_kernel",
        signature={
            "keys": f"tensordesc<{'u8[64, 64]' if fp4 else 'fp8e4nv[64, 128]'},{key_layout}>",
            "scales": f"tensordesc<{'i32' if fp4 else 'fp32'}[1, 64],{float_layout}>",
            "queries": f"tensordesc<fp8e4nv[{columns}, 128],{bytes_layout}>",
            **{"weights": "*fp32", "page_table": "*i32", "table_stride": "i32", "token_row": "*i32", "limit": "*i32", "start": "*i32"},
            **{"out": "*fp32", "out_stride": "i32", "n_tokens": "i32"},
        },
        constexprs={name: value for name, value in settings.items() if name not in ("maxnreg", "launch_pdl")},
        aligned=("weights", "page_table", "token_row", "limit", "start", "out"),
        gluon=True,
        options=options,
    )


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    specs = _hopper_specs()
    return dict(zip(specs, compile_reports(list(specs.values())), strict=True))


def test_hopper_kernel_compiles_to_warpgroup_products_without_spills(reports: dict[str, Report]) -> None:
    for name, report in reports.items():
        assert report.count("QGMMA") and not report.count("HMMA") and not report.count("IMMA"), name
        assert report.count("UTMALDG") and report.shared <= SMEM_LIMIT, name
        limit = 40 if name.startswith("fp4") and name.endswith("64 tokens") else 16  # scalars kept from one request to the next
        assert report.spill_bytes <= limit, f"{name}: {report.spill_bytes}"
        if name.startswith("fp4"):  # a table look-up for four values, two for a register of the product
            assert report.count("PRMT") >= 16 * report.count("QGMMA") // 4, name
