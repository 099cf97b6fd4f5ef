"""The out-of-place RoPE of the queries against its twin."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import query_rope, query_rope_torch
from tests.attention.kernels.fused import noise, turns
from tests.kernels import casts
from tests.kernels.offline import SMEM_LIMIT, Spec, compile_reports

casts.repair()
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")


@on_cpu
@pytest.mark.parametrize(
    ("tokens", "heads", "nope", "rope"), [(2, 128, 128, 64), (3, 8, 32, 32), (1, 5, 12, 6), (2, 1, 0, 2), (0, 4, 8, 8)]
)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("given", "dtype"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
)
def test_the_kernel_is_the_twin(tokens, heads, nope, rope, interleaved, given, dtype):
    q, turn = noise(tokens, heads, nope + rope, dtype=given, gap=2), turns(tokens, rope)
    got = query_rope.query_rope(q, turn, interleaved=interleaved, dtype=dtype)
    expected = query_rope_torch.query_rope(q, turn, interleaved=interleaved, dtype=dtype)
    assert got.dtype == dtype and got.is_contiguous()
    torch.testing.assert_close(got, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_compiles_for_hopper():
    pointers = {"q": "*bf16", "turn": "*fp32", "out": "*bf16"}
    strides = {"token_stride": "i32", "head_stride": "i32"}
    specs = [
        Spec(
            fn="rorqual.attention.kernels.query_rope:query_rope_kernel",
            signature={**pointers, **strides},
            constexprs={"H": 128, "NOPE": 128, "R": 64, "HEADS": 64, "PAIRS": 32, "INTERLEAVED": interleaved, "EARLY": True},
            aligned=(*pointers, *strides),
            options={"num_warps": 4},
        )
        for interleaved in (True, False)
    ]
    for report in compile_reports(specs):
        assert report.spill_bytes == 0 and report.shared <= SMEM_LIMIT
