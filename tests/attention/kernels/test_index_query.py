"""The fused index queries against their twin, and the twin against the indexer."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.hadamard import hadamard
from rorqual.attention.kernels import index_query, index_query_torch
from rorqual.attention.rope import rotate
from tests.attention.kernels.fused import codes_agree, noise, turns
from tests.kernels import casts
from tests.kernels.offline import SMEM_LIMIT, Spec, compile_reports

casts.repair()
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_twin_scores_as_the_indexer_does(interleaved):
    tokens, heads, width, rope = 5, 4, 32, 16
    q, weights, turn = noise(tokens, heads, width), noise(tokens, heads, seed=5), turns(tokens, rope)
    values = torch.cat((rotate(q[..., :rope], torch.view_as_complex(turn), interleaved=interleaved), q[..., rope:]), -1)
    keys = torch.randn(7, width, generator=torch.Generator().manual_seed(9))
    scale = width**-0.5 * heads**-0.5
    expected = ((values @ keys.T).relu() * weights[..., None]).sum(1) * scale
    for rotated in (False, True):
        for fp8 in (False, True):
            options = {"interleaved": interleaved, "rotate": rotated, "fp8": fp8, "scale": scale}
            got_q, got_w = index_query_torch.index_query(q, weights, turn, **options)
            scores = ((got_q.float() @ (hadamard(keys) if rotated else keys).T).relu() * got_w[..., None]).sum(1)
            largest = expected.abs().amax(-1, keepdim=True)
            assert float(((scores - expected) / largest).abs().max()) < (0.15 if fp8 else 1e-5)


@on_cpu
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "rope", "rotated", "fp8", "given"),
    [
        (2, 64, 128, 64, True, True, torch.bfloat16),
        (3, 4, 64, 32, True, True, torch.float32),
        (2, 5, 16, 8, True, True, torch.float32),
        (2, 3, 4, 2, True, True, torch.float32),
        (1, 3, 256, 64, True, False, torch.float32),
        (2, 5, 48, 16, False, False, torch.float32),
        (2, 32, 128, 64, False, False, torch.bfloat16),
        (2, 4, 128, 64, False, True, torch.float32),
    ],
)
@pytest.mark.parametrize("interleaved", [True, False])
def test_the_kernel_is_the_twin(tokens, heads, width, rope, rotated, fp8, given, interleaved):
    q = noise(tokens, heads, width, dtype=given, gap=16)
    q[0, 1] = 0
    weights, turn = noise(tokens, heads, seed=5, gap=3), turns(tokens, rope)
    options = {"interleaved": interleaved, "rotate": rotated, "fp8": fp8, "scale": 0.011}
    got, got_w = index_query.index_query(q, weights, turn, **options)
    expected, expected_w = index_query_torch.index_query(q, weights, turn, **options)
    torch.testing.assert_close(got_w, expected_w, rtol=2e-6, atol=0)
    assert got.shape == expected.shape and got.dtype == expected.dtype and got.is_contiguous()
    if fp8:
        codes_agree(got.view(torch.uint8), expected.view(torch.uint8))
        assert float(got_w[0, 1]) == pytest.approx(0.011 * float(weights[0, 1]))
    else:
        torch.testing.assert_close(got, expected, rtol=2**-8 if given == torch.bfloat16 else 1e-5, atol=1e-5)


@on_cpu
def test_no_tokens_and_a_width_that_does_not_fit():
    options = {"interleaved": True, "rotate": True, "fp8": True, "scale": 1.0}
    q, w = index_query.index_query(torch.empty(0, 4, 16), torch.empty(0, 4), turns(0, 8), **options)
    assert q.shape == (0, 4, 16) and w.shape == (0, 4)
    with pytest.raises(ValueError, match="power of two, got 24"):
        index_query.index_query(torch.empty(0, 4, 24), torch.empty(0, 4), turns(0, 8), **options)


def test_compiles_for_hopper():
    pointers = {"q": "*bf16", "weights": "*fp32", "turn": "*fp32", "out": "*fp8e4nv", "out_weights": "*fp32"}
    strides = {"token_stride": "i32", "head_stride": "i32", "weight_stride": "i32"}
    shape = {"H": 64, "D": 128, "R": 64, "BLOCK": 128, "LOW": 4, "HIGH": 3, "TRANSFORM": True, "FP8": True, "NORM": 128**-0.5}
    specs = [
        Spec(
            fn="rorqual.attention.kernels.index_query:index_query_kernel",
            signature={**pointers, **strides, "scale": "fp32"},
            constexprs={**shape, "HEADS": heads, "INTERLEAVED": interleaved, "EARLY": True},
            aligned=(*pointers, *strides),
            options={"num_warps": warps},
        )
        for heads, warps, interleaved in ((8, 2, False), (32, 4, False), (32, 4, True))
    ]
    for report in compile_reports(specs):
        assert report.spill_bytes == 0 and report.shared <= SMEM_LIMIT
        assert report.count("SHFL") <= 40, "the transform exchanges values between threads once, not at every stage"
