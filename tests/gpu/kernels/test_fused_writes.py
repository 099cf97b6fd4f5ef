"""The fused cache writes and queries on the GPU, against their twins on the CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from rorqual.attention.kernels import (
    index_query,
    index_query_torch,
    index_write,
    index_write_torch,
    latent_write,
    latent_write_torch,
    query_rope,
    query_rope_torch,
)
from rorqual.attention.kernels.device import quotient
from rorqual.attention.kv.layout import decode_latent
from tests.attention.kernels.fused import codes_agree, gains, noise, places, turns

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
TOKENS = [1, 300]
EPS = 1e-6


def cuda(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies on the GPU with the strides kept, so that gaps stay NaN."""
    out = []
    for tensor in tensors:
        fill = float("nan") if tensor.dtype.is_floating_point else -1
        wide = torch.full((tensor.untyped_storage().nbytes() // tensor.element_size(),), fill, dtype=tensor.dtype, device="cuda")
        view = wide.as_strided(tensor.shape, tensor.stride())
        view.copy_(tensor)
        out.append(view)
    return out


@triton.jit
def _quotients(x, divisor, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    value = quotient(tl.load(x + at)[None, :], tl.load(divisor + tl.program_id(0) + tl.arange(0, 1))[:, None])
    tl.store(out + at[None, :], value)


def test_the_short_division_is_ieee_s():
    generator = torch.Generator().manual_seed(1)
    divisor = 10 ** (70 * torch.rand(1024, generator=generator) - 40)  # subnormal ones too
    divisor[:3] = torch.tensor([1e-12 / 448, 1.0, 2.0**-126])
    x = (2 * torch.rand(1024, 512, generator=generator) - 1) * 448 * divisor[:, None]
    out = torch.empty(1024, 512, device="cuda")
    _quotients[(1024,)](x.cuda(), divisor.cuda(), out, N=512)
    expected = x / divisor[:, None]
    whole = divisor >= 2.0**-126  # a subnormal divisor has few bits, but the quotient is right all the same
    assert float((out.cpu() != expected)[whole].float().mean()) < 1e-6
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", ["fp8", "bfloat16"])
@pytest.mark.parametrize(("latent", "rope", "interleaved"), [(512, 64, True), (128, 32, True), (192, 16, False)])
def test_latent_rows_are_the_twin_s(tokens, kind, latent, rope, interleaved):
    n_rows, width = 512, latent + rope
    kv, weight, turn = noise(tokens, width, dtype=torch.bfloat16, gap=32), gains(latent, dtype=torch.bfloat16), turns(tokens, rope)
    rows = places(tokens, n_rows, skip=7 if tokens > 1 else 0)
    if kind == "fp8":
        pool = torch.full((n_rows, width + rope + 4 * -(-latent // 128)), 0xFF, dtype=torch.uint8)
    else:
        pool = torch.full((n_rows, width), float("nan"), dtype=torch.bfloat16)
    got = pool.cuda()
    latent_write.write_latent(*cuda(kv, weight), EPS, *cuda(turn, rows), got, interleaved=interleaved)
    latent_write_torch.write_latent(kv, weight, EPS, turn, rows, pool, interleaved=interleaved)
    got = got.cpu()
    if kind == "fp8":
        codes_agree(got[:, :latent], pool[:, :latent], share=0.02)
        untouched = torch.ones(n_rows, dtype=torch.bool)
        untouched[rows[rows >= 0]] = False
        assert bool((got[untouched] == 0xFF).all())
        got, pool = decode_latent(got, latent), decode_latent(pool, latent)
        one, other = got[~untouched][:, :latent], pool[~untouched][:, :latent]
        assert float((one - other).norm() / other.norm()) < 1e-2
        got, pool = got[:, latent:], pool[:, latent:]
    torch.testing.assert_close(got, pool, rtol=2**-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("width", "rope", "kind", "page_size"), [(128, 64, "fp8", 64), (64, 32, "fp8", 16), (128, 64, "bfloat16", 64)])
@pytest.mark.parametrize("interleaved", [True, False])
def test_index_rows_are_the_twin_s(tokens, width, rope, kind, page_size, interleaved):
    n_rows = 512
    k, turn = noise(tokens, width, dtype=torch.bfloat16, gap=32), turns(tokens, rope)
    weight, bias, rows = gains(width), gains(width, seed=3) - 1, places(tokens, n_rows, skip=7 if tokens > 1 else 0)
    if kind == "fp8":
        pool = torch.full((n_rows // page_size, page_size * (width + 4)), 0xFF, dtype=torch.uint8)
    else:
        pool = torch.full((n_rows, width), float("nan"), dtype=torch.bfloat16)
    options = {"page_size": page_size, "interleaved": interleaved, "rotate": kind == "fp8"}
    got = pool.cuda()
    index_write.write_index(*cuda(k, weight, bias), EPS, *cuda(turn, rows), got, **options)
    index_write_torch.write_index(k, weight, bias, EPS, turn, rows, pool, **options)
    if kind == "fp8":
        codes_agree(got.cpu()[:, : page_size * width], pool[:, : page_size * width], share=0.02)
        scales = [each[:, page_size * width :].contiguous().view(torch.float32) for each in (got.cpu(), pool)]
        torch.testing.assert_close(*scales, rtol=1e-4, atol=0, equal_nan=True)
    else:
        torch.testing.assert_close(got.cpu(), pool, rtol=2**-7, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("heads", "width", "rope", "fp8"), [(64, 128, 64, True), (4, 64, 32, True), (32, 128, 64, False)])
@pytest.mark.parametrize("interleaved", [True, False])
def test_index_queries_are_the_twin_s(tokens, heads, width, rope, fp8, interleaved):
    q, weights, turn = noise(tokens, heads, width, dtype=torch.bfloat16), noise(tokens, heads, seed=5, gap=8), turns(tokens, rope)
    q[0, 1] = 0
    options = {"interleaved": interleaved, "rotate": fp8, "fp8": fp8, "scale": 0.011}
    got, got_w = index_query.index_query(*cuda(q, weights, turn), **options)
    expected, expected_w = index_query_torch.index_query(q, weights, turn, **options)
    torch.testing.assert_close(got_w.cpu(), expected_w, rtol=1e-5, atol=0)
    if fp8:
        codes_agree(got.cpu().view(torch.uint8), expected.view(torch.uint8))
    else:
        torch.testing.assert_close(got.cpu(), expected, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotated_queries_are_the_twin_s(tokens, interleaved, dtype):
    for heads, nope, rope in ((128, 128, 64), (8, 32, 32)):
        q, turn = noise(tokens, heads, nope + rope, dtype=torch.bfloat16), turns(tokens, rope)
        got = query_rope.query_rope(*cuda(q, turn), interleaved=interleaved, dtype=dtype)
        expected = query_rope_torch.query_rope(q, turn, interleaved=interleaved, dtype=dtype)
        torch.testing.assert_close(got.cpu(), expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)


def test_rows_past_two_gigabytes():
    latent, rope, width, tokens = 512, 64, 128, 4
    n_rows = (1 << 31) // 656 + 4096
    turn = turns(tokens, rope)
    rows = n_rows - 1 - places(tokens, 64)
    kv, weight = noise(tokens, latent + rope, dtype=torch.bfloat16), gains(latent, dtype=torch.bfloat16)
    pool, small = torch.zeros(n_rows, 656, dtype=torch.uint8, device="cuda"), torch.zeros(64, 656, dtype=torch.uint8, device="cuda")
    latent_write.write_latent(*cuda(kv, weight), EPS, *cuda(turn, rows), pool, interleaved=True)
    latent_write.write_latent(*cuda(kv, weight), EPS, *cuda(turn, rows - (n_rows - 64)), small, interleaved=True)
    assert torch.equal(pool[-64:], small) and bool((pool[:64] == 0).all())
    del pool
    n_pages = (1 << 31) // 8448 + 64
    rows = (n_pages - 1) * 64 + places(tokens, 64)
    k, pages = noise(tokens, width, dtype=torch.bfloat16), torch.zeros(n_pages, 8448, dtype=torch.uint8, device="cuda")
    small = torch.zeros(1, 8448, dtype=torch.uint8, device="cuda")
    options = {"page_size": 64, "interleaved": False, "rotate": True}
    index_write.write_index(*cuda(k, gains(width), gains(width, seed=3)), EPS, *cuda(turn, rows), pages, **options)
    index_write.write_index(*cuda(k, gains(width), gains(width, seed=3)), EPS, *cuda(turn, rows % 64), small, **options)
    assert torch.equal(pages[-1:], small) and bool((pages[0] == 0).all())


def test_replays_are_equal():
    tokens, heads = 64, 64
    q, weights, turn = cuda(noise(tokens, heads, 128, dtype=torch.bfloat16), noise(tokens, heads, seed=5), turns(tokens, 64))
    kv, weight, rows = cuda(noise(tokens, 576, dtype=torch.bfloat16), gains(512, dtype=torch.bfloat16), places(tokens, 128))
    pool, pages = torch.zeros(128, 656, dtype=torch.uint8, device="cuda"), torch.zeros(2, 8448, dtype=torch.uint8, device="cuda")
    gain = gains(128, device=kv.device)

    def step() -> list[torch.Tensor]:
        latent_write.write_latent(kv, weight, EPS, turn, rows, pool, interleaved=True)
        index_write.write_index(kv[:, :128], gain, gain, EPS, turn, rows, pages, page_size=64, interleaved=False, rotate=True)
        codes, w = index_query.index_query(q, weights, turn, interleaved=False, rotate=True, fp8=True, scale=0.01)
        return [pool, pages, codes.view(torch.uint8), w, query_rope.query_rope(q, turn, interleaved=True, dtype=torch.bfloat16)]

    expected = [tensor.clone() for tensor in step()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(25):
        for tensor in captured:
            tensor.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
