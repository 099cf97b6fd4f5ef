"""Expanded attention over ragged requests and the gather before it, in the interpreter against the plain versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import dense_prefill_torch  # noqa: E402
from rorqual.attention.kernels.dense_prefill import VarlenLaunch, gather_latent, varlen_attention  # noqa: E402
from rorqual.attention.kv.layout import encode_latent  # noqa: E402
from tests.kernels.interpreter import repair  # noqa: E402
from tests.kernels.offline import SMEM_LIMIT, Spec, compile_report  # noqa: E402

repair()

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero|overflow:RuntimeWarning")


def problem(queries: list[int], keys: list[int], nope: int, rope: int, value: int, heads: int) -> dict[str, Any]:
    torch.manual_seed(nope)
    tokens, rows = sum(queries), sum(keys)
    both = torch.randn(rows, heads, nope + value)
    return {
        "q": torch.randn(tokens, heads, nope + rope),
        "k_nope": both[..., :nope],
        "k_rope": torch.randn(rows, 9 + rope)[:, 9:],
        "v": both[..., nope:],
        "query_start": torch.tensor([0, *queries]).cumsum(0).int(),
        "key_start": torch.tensor([0, *keys]).cumsum(0).int(),
        "scale": 0.2,
        "max_query": max(queries) + 3,
        "max_key": max(keys) + 3,
    }


@interpreted
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("widths", [(32, 16, 32), (24, 8, 40)], ids=["powers", "others"])
def test_equals_the_plain_version(widths, causal):
    given = problem([5, 0, 33, 40, 1, 4], [5, 3, 71, 40, 0, 2], *widths, heads=2)
    out, lse = varlen_attention(**given, causal=causal, launch=VarlenLaunch(queries=32, keys=16, warps=4))
    wanted, wanted_lse = dense_prefill_torch.varlen_attention(**given, causal=causal)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


@interpreted
def test_keys_past_a_request_have_no_influence():
    given = problem([20], [36], 32, 16, 32, 1)
    out, _ = varlen_attention(**given, causal=True)
    for tensor in (given["k_nope"], given["v"]):
        tensor[17:] = float("nan")
    shorter = {**given, "q": given["q"][:1], "query_start": torch.tensor([0, 1]).int(), "key_start": torch.tensor([0, 17]).int()}
    again, _ = varlen_attention(**shorter, causal=True)
    assert torch.isfinite(again).all()
    torch.testing.assert_close(again[0], out[0], rtol=1e-5, atol=1e-6)


@interpreted
@pytest.mark.parametrize("fp8", [False, True], ids=["float", "fp8"])
@pytest.mark.parametrize(("latent", "rope"), [(128, 32), (192, 16), (48, 8)])
def test_gathered_rows_are_the_plain_versions(latent, rope, fp8):
    torch.manual_seed(latent)
    values = torch.randn(30, latent + rope)
    pool = encode_latent(values, latent) if fp8 else values
    rows = torch.tensor([3, -1, 29, 30, 0, 7, 2**31 - 1] * 5, dtype=torch.int32)
    got = gather_latent(pool, rows, latent, rope, torch.float32)
    assert torch.equal(got, dense_prefill_torch.gather_latent(pool, rows, latent, rope, torch.float32))
    assert gather_latent(pool, rows[:0], latent, rope, torch.float32).shape == (0, latent + rope)


def test_refuses_what_does_not_fit():
    given = problem([2], [3], 32, 16, 32, 2)
    with pytest.raises(ValueError, match="k_rope is"):
        varlen_attention(**{**given, "k_rope": given["k_rope"][:1]}, causal=True)
    with pytest.raises(ValueError, match="rows is torch.int64"):
        gather_latent(torch.zeros(4, 48), torch.zeros(4, dtype=torch.int64), 32, 16, torch.float32)


def test_compiles_to_warpgroup_products_without_spills():
    pointers = dict.fromkeys(["q_all", "k_nope", "k_rope", "v", "out"], "*bf16")
    numbers = dict.fromkeys(["H", "q_token", "q_head", "k_token", "k_head", "rope_token", "v_token", "v_head"], "i32")
    launch = VarlenLaunch()
    sizes = {"D": 128, "R": 64, "V": 128, "DP": 128, "RP": 64, "VP": 128, "M": launch.queries, "N": launch.keys}
    spec = Spec(
        fn="rorqual.attention.kernels.dense_prefill_kernels:varlen_attention_kernel",
        signature={**pointers, **numbers, "query_start": "*i32", "key_start": "*i32", "lse": "*fp32", "scale": "fp32"},
        constexprs={**sizes, "CAUSAL": True, "PRECISION": "tf32", "STAGES": launch.stages},
        aligned=(*pointers, *(n for n in numbers if n != "H")),
        options={"num_warps": launch.warps, "num_stages": launch.stages},
    )
    report = compile_report(spec.fn, spec.signature, spec.constexprs, aligned=spec.aligned, options=spec.options)
    assert report.count("HGMMA") and not report.count("HMMA") and report.count("LDGSTS")
    assert report.spill_bytes == 0 and report.shared <= SMEM_LIMIT
