"""The sparse prefill kernels: the general one in the interpreter against the plain version, Hopper's by what they compile to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import sparse_prefill_unpack  # noqa: E402
from rorqual.attention.kernels.dense_prefill_torch import gather_latent  # noqa: E402
from rorqual.attention.kernels.sparse_attention_torch import evaluate  # noqa: E402
from rorqual.attention.kernels.sparse_prefill import Launch, choose, sparse_attention  # noqa: E402
from rorqual.attention.kv.layout import encode_latent  # noqa: E402
from tests.kernels.interpreter import repair  # noqa: E402
from tests.kernels.offline import SMEM_LIMIT, Report, Spec, compile_reports  # noqa: E402

repair()

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero|overflow:RuntimeWarning")

WIDTHS = [(128, 32, 8), (96, 16, 5), (192, 16, 20), (48, 8, 1)]  # latent, rope, heads


def problem(latent: int, rope: int, heads: int, fp8: bool) -> dict[str, Any]:
    """Three tokens: mixed absent keys, all keys, none; rows that nobody chose hold NaN."""
    torch.manual_seed(latent)
    n, k = 50, 21
    rows = torch.randint(0, n, (3, k), dtype=torch.int32)
    rows[0, 9:] = -1
    rows[0, ::4] = torch.tensor([n, -5, n + 10**6], dtype=torch.int32).repeat(2)
    rows[2] = -1
    unused = torch.ones(n, dtype=torch.bool)
    unused[rows[(rows >= 0) & (rows < n)].long()] = False
    values = torch.randn(n, latent + rope)
    pool = encode_latent(values, latent) if fp8 else values
    pool[unused] = 255 if fp8 else float("nan")
    return {
        "q_latent": torch.randn(heads, 3, latent).transpose(0, 1),
        "q_rope": torch.randn(3, heads, 2 * rope)[..., rope:],
        "pool": pool,
        "rows": rows,
    }


def check(given: dict[str, Any], launch: Launch | None = None, **more: Any) -> None:
    out, lse = sparse_attention(**given, scale=0.11, launch=launch, **more)
    wanted, wanted_lse = evaluate(**given, scale=0.11, sink=more.get("sink"), n_keys=more.get("n_keys"), compute=torch.float64)
    assert out.dtype == given["q_latent"].dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("fp8", [False, True], ids=["float", "fp8"])
@pytest.mark.parametrize("widths", WIDTHS, ids=lambda w: "x".join(map(str, w)))
def test_equals_the_plain_version(widths, fp8):
    check(problem(*widths, fp8))


@interpreted
@pytest.mark.parametrize("fp8", [False, True], ids=["float", "fp8"])
def test_sink_and_key_counts(fp8):
    counts = torch.tensor([21, 3, 0], dtype=torch.int32)
    check(problem(128, 32, 8, fp8), sink=torch.randn(8), n_keys=counts)
    check(problem(128, 32, 8, fp8), sink=torch.full((8,), float("-inf")))


@interpreted
def test_scales_need_not_be_powers_of_two():
    given = problem(128, 32, 4, True)
    scales = given["pool"].view(torch.float32)[:, 32]
    scales.copy_(torch.where(scales.isnan(), scales, torch.logspace(-3, 3, len(scales)) * 1.37))
    given["q_latent"] = given["q_latent"] * 1e-3
    check(given)


@interpreted
def test_no_tokens_no_keys_no_rows():
    given = problem(48, 16, 2, False)
    out, lse = sparse_attention(given["q_latent"][:0], given["q_rope"][:0], given["pool"], given["rows"][:0], scale=1.0)
    assert out.shape == (0, 2, 48) and lse.shape == (0, 2)
    check({**given, "rows": given["rows"][:, :0]})
    check({**given, "pool": given["pool"][:0]})


@interpreted
def test_blocks_of_any_size_give_the_same():
    for block in (16, 32):
        check(problem(128, 32, 20, False), launch=Launch(head_block=block, key_block=32))


@interpreted
@pytest.mark.parametrize("slots", [4096, 3])
def test_rows_dequantised_once(slots, monkeypatch):
    """Runs of chosen rows move to a workspace; when they do not fit, the gate says so and nothing else."""
    torch.manual_seed(slots)
    monkeypatch.setattr(sparse_prefill_unpack, "_MOST", slots)
    pool = encode_latent(torch.randn(1000, 208), 192)
    rows = torch.randint(0, 1000, (5, 40), dtype=torch.int32)
    rows[1, ::3], rows[2, 5], rows[2, 6] = -1, 1000, 999
    rows[:, 30:] = rows[:, 30:] % 130
    for chosen in (rows, torch.where(rows < 192, rows, -7)):
        found = sparse_prefill_unpack.unpack(pool, chosen, 192, 16, torch.float32)
        runs = (chosen[(chosen >= 0) & (chosen < 1000)] // 64).unique()
        fits = len(runs) <= slots
        assert (found.fits is None and fits) or (int(found.fits), int(found.fails)) == (fits, not fits)
        if fits:
            wanted = gather_latent(pool, chosen.view(-1), 192, 16, torch.float32)
            assert torch.equal(gather_latent(found.pool, found.rows.view(-1), 192, 16, torch.float32), wanted)


@interpreted
def test_a_key_after_one_past_the_pool_is_kept():
    """Row 130 is no key of a pool of 130 rows, though it lies in the run of 64 that row 128 begins."""
    pool = encode_latent(torch.randn(130, 208), 192)
    rows = torch.tensor([[5, 130, 128, -1]], dtype=torch.int32)
    found = sparse_prefill_unpack.unpack(pool, rows, 192, 16, torch.float32)
    wanted = gather_latent(pool, rows.view(-1)[[0, 2]], 192, 16, torch.float32)
    assert torch.equal(gather_latent(found.pool, found.rows.view(-1)[[0, 2]], 192, 16, torch.float32), wanted)
    assert int(found.rows[0, 1]) < 0 and int(found.rows[0, 3]) < 0


def test_refuses_what_does_not_fit():
    given = problem(48, 16, 2, False)
    with pytest.raises(ValueError, match="rows is torch.int64"):
        sparse_attention(**{**given, "rows": given["rows"].long()}, scale=1.0)
    assert choose(given["q_latent"], given["q_rope"], given["pool"]).kernel == "tile"


def types(pool: str, **more: str) -> dict[str, str]:
    """Argument types of the kernels that are called with a list of rows."""
    pointers = {"q_latent": "*bf16", "q_tail": "*bf16", "rows": "*i32", "out": "*bf16", "lse": "*fp32"}
    numbers = dict.fromkeys(["n_rows", "width", "H", "q_token", "q_head", "tail_token", "tail_head"], "i32")
    return {**pointers, **numbers, "scale": "fp32", "pool": pool, **more}


ABSENT = dict.fromkeys(["n_keys", "sink", "units", "parts", "part_lse"])
SHAPE = {"C": 512, "R": 64, "SINK": False, "COUNTS": False, "PAGE": 0, "B": 1}
ALIGNED = ("q_latent", "q_tail", "pool", "rows", "out", "lse", "width", "q_token", "q_head", "tail_token", "tail_head")
PLACE = "rorqual.attention.kernels.sparse_prefill_"
FP8_TYPES = types("*i32", scales="*fp32")
SPECS = {
    "wide": Spec(
        fn=PLACE + "wide:sparse_prefill_wide_kernel",
        signature=types("*bf16"),
        constexprs={
            **ABSENT, **SHAPE, "scales": None, "tail_pool": None, "FP8": False, "stride": 576,
            "LATE": False, "VALUE_REGS": 192, "LOAD_REGS": 72,
        },
        aligned=ALIGNED,
        gluon=True,
        options={"num_warps": 4},
    ),
    "pair": Spec(
        fn=PLACE + "pair:sparse_prefill_pair_kernel",
        signature=types("*bf16"),
        constexprs={**ABSENT, **SHAPE, "M": 16, "stride": 576, "LOAD_WARPS": 4, "LOAD_REGS": 72, "REGS": 160},
        aligned=ALIGNED,
        gluon=True,
        options={"num_warps": 4},
    ),
    "few": Spec(
        fn=PLACE + "few:sparse_prefill_few_kernel",
        signature=FP8_TYPES,
        constexprs={**ABSENT, **SHAPE, "M": 16, "stride": 164, "FENCE": True, "LOAD_WARPS": 8, "LOAD_REGS": 128},
        aligned=(*ALIGNED, "scales"),
        gluon=True,
        options={"num_warps": 4},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return dict(zip(SPECS, compile_reports(list(SPECS.values())), strict=True))


def test_hopper_kernels_use_warpgroup_products_and_spill_nothing(reports):
    for name, report in reports.items():
        assert report.count("HGMMA") and not report.count("HMMA"), name
        assert report.spill_bytes == 0 and report.shared <= SMEM_LIMIT, name


def test_float_rows_are_copied_without_registers(reports):
    assert reports["wide"].count("LDGSTS") and reports["pair"].count("LDGSTS")
