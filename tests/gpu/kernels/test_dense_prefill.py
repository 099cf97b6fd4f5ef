"""Expanded attention and the gather before it on a GPU, against the plain versions in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import dense_prefill_torch
from rorqual.attention.kernels.dense_prefill import gather_latent, varlen_attention
from rorqual.attention.kv.layout import encode_latent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BF16 = torch.bfloat16


def problem(queries: list[int], keys: list[int], heads: int, dtype: torch.dtype, nope: int = 128) -> dict[str, Any]:
    """Operands as the engine has them: keys and values interleaved, RoPE keys the end of gathered rows."""
    torch.manual_seed(sum(keys))
    rows = sum(keys)
    both = torch.randn(rows, heads, nope + 128, device="cuda", dtype=dtype)
    return {
        "q": torch.randn(sum(queries), heads, nope + 64, device="cuda", dtype=dtype),
        "k_nope": both[..., :nope],
        "k_rope": torch.randn(rows, 576, device="cuda", dtype=dtype)[:, 512:],
        "v": both[..., nope:],
        "query_start": torch.tensor([0, *queries], device="cuda").cumsum(0).int(),
        "key_start": torch.tensor([0, *keys], device="cuda").cumsum(0).int(),
        "scale": 0.1,
    }


def agree(given: dict[str, Any], causal: bool, queries: int, keys: int, tolerance: float = 1e-2) -> None:
    out, lse = varlen_attention(**given, causal=causal, max_query=queries, max_key=keys)
    wanted, wanted_lse = dense_prefill_torch.evaluate_varlen(**given, causal=causal, compute=torch.float64)
    error = (out - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)
    assert torch.isfinite(out).all() and error.max() <= tolerance, f"relative error {error.max():.1e}"
    assert torch.equal(torch.isinf(lse), torch.isinf(wanted_lse))
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("causal", [True, False])
def test_equals_the_plain_version(causal):
    agree(problem([5, 0, 333, 700, 1, 128], [5, 3, 1000, 700, 0, 300], 3, BF16), causal, 800, 1100)


def test_fp32_keeps_its_precision():
    agree(problem([40, 3], [70, 3], 2, torch.float32, nope=32), True, 40, 70, tolerance=1e-4)


def test_equal_in_every_replay():
    given = problem([300, 45], [800, 45], 4, BF16)
    first = varlen_attention(**given, causal=True, max_query=300, max_key=800)
    for _ in range(25):
        again = varlen_attention(**given, causal=True, max_query=300, max_key=800)
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_gathered_rows_are_the_plain_versions(fp8):
    values = torch.randn(4_000, 576, device="cuda")
    few = encode_latent(values, 512) if fp8 else values.to(BF16)
    pool = torch.zeros((3_900_000, few.shape[1]), dtype=few.dtype, device="cuda")  # past 2^31 bytes
    pool[-4_000:] = few
    rows = torch.randint(-5, 4_010, (5_003,), device="cuda", dtype=torch.int32) + len(pool) - 4_000
    assert torch.equal(gather_latent(pool, rows, 512, 64, BF16), dense_prefill_torch.gather_latent(pool, rows, 512, 64, BF16))
