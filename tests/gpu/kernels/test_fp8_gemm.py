"""Block-FP8 products and activation quantisation on the GPU: exact formats, promoted sums, replays, edges."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from rorqual.comm import fp8  # noqa: E402
from rorqual.parallel.kernels import fp8_gemm, fp8_gemm_torch, quantise, quantise_torch  # noqa: E402

BLOCK = 128
SHAPES = [(2112, 7168), (24, 1024), (2112, 400), (16, 16)]  # N, K: whole blocks, short blocks, one short block
ROWS = [1, 17, 64, 100, 300]


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def _operands(n_rows: int, n_features: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random operands with scales over six decades, no powers of two."""
    a, scale = quantise.quantise_activation(_random(n_rows, width))
    scale.mul_(10 ** _random(*scale.shape, seed=1).clamp(-3, 3))
    b = (60 * _random(n_features, width, seed=2)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return a, scale, b, 10 ** _random(-(-n_features // BLOCK), -(-width // BLOCK), seed=3).clamp(-3, 3)


def _exact(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    wide = a_scale.double().repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
    weight = b_scale.double().repeat_interleave(BLOCK, 0)[: b.shape[0]].repeat_interleave(BLOCK, 1)[:, : b.shape[1]]
    return (a.double() * wide) @ (b.double() * weight).T


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error of a row's values over the row's largest value."""
    return float(((got.double() - want).abs().amax(1) / want.abs().amax(1)).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 7168), (300, 2000), (2000, 2048), (40, 16)])
def test_quantise_has_the_bits_of_the_dispatch_format(shape, dtype) -> None:
    x = (_random(*shape) * torch.exp(_random(shape[0], 1, seed=1))).to(dtype)
    x[0, :128] = 0
    values, scales = quantise.quantise_activation(x)
    expected, expected_scales = fp8.quantise(x.cpu())  # PyTorch divides by a number exactly on the CPU only
    assert torch.equal(_bits(values.cpu()), _bits(expected)) and torch.equal(scales.cpu(), expected_scales)
    twin, twin_scales = quantise_torch.quantise_activation(x)
    assert torch.equal(_bits(twin), _bits(values)) and torch.equal(twin_scales, scales)
    product = quantise.silu_mul(torch.cat([x, x], 1))
    torch.testing.assert_close(
        product, quantise_torch.silu_mul(torch.cat([x, x], 1)), rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-6
    )
    fused, fused_scales = quantise.silu_mul_quantise(torch.cat([x, x], 1))
    values, scales = quantise.quantise_activation(product)
    assert torch.equal(_bits(fused), _bits(values)) and torch.equal(fused_scales, scales)


@pytest.mark.parametrize("size", [1e-36, 1e-30, 1e30, 3e38])
def test_quotients_at_the_ends_of_the_range(size) -> None:
    x = torch.linspace(-1, 1, 1 << 16, device="cuda").view(-1, 128) * size
    values, scales = quantise.quantise_activation(x)
    expected, expected_scales = fp8.quantise(x.cpu())
    assert torch.equal(_bits(values.cpu()), _bits(expected)) and torch.equal(scales.cpu(), expected_scales)


def test_quantise_beyond_two_gigabytes() -> None:
    x = torch.zeros((1 << 31) // 16384 + 64, 16384, dtype=torch.bfloat16, device="cuda")  # element and byte offsets pass 2^31
    x[-1] = _random(16384).to(x.dtype)
    values, scales = quantise.quantise_activation(x)
    expected, expected_scales = fp8.quantise(x[-1:].cpu())
    assert torch.equal(_bits(values[-1:].cpu()), _bits(expected)) and torch.equal(scales[-1:].cpu(), expected_scales)


@pytest.mark.parametrize("n_rows", ROWS)
def test_sum_of_scaled_blocks(n_rows) -> None:
    for n_features, width in SHAPES:
        operands = _operands(n_rows, n_features, width)
        want = _exact(*operands)
        out = torch.full((n_rows, n_features), float("nan"), device="cuda")
        fp8_gemm.fp8_gemm(*operands, out_dtype=torch.float32, out=out)
        assert _error(out, want) < 1e-3, (n_features, width)
        if n_features == 24 or n_rows == 300:
            half = fp8_gemm.fp8_gemm(*operands)
            assert half.dtype == torch.bfloat16 and _error(half, want) < 1e-2, (n_features, width)
        for _ in range(25):
            assert torch.equal(fp8_gemm.fp8_gemm(*operands, out_dtype=torch.float32), out)


@pytest.mark.parametrize("chosen", [
    {"kind": "tiles", "rows": 256, "stages": 4, "group": 4, "share": False},
    {"kind": "tiles", "rows": 256, "stages": 4, "group": 4, "share": True},
    {"kind": "narrow", "rows": 128, "columns": 128, "stages": 10},
    {"kind": "split", "rows": 128, "features": 128, "splits": 1, "stages": 3, "warps": 8},
])  # fmt: skip
@pytest.mark.parametrize("shape", [(300, 2112, 1104), (4000, 2112, 512)])
def test_every_launch_of_many_rows(shape, chosen) -> None:
    """34 tiles of 256 x 128, which fill no round of 132, and 272, which fill two and leave some."""
    operands = _operands(*shape)
    bias = 1e3 * _random(shape[1], seed=5)
    want = _exact(*operands) + bias.double()
    results = []
    for _ in range(25):
        results.append(torch.full(shape[:2], float("nan"), device="cuda"))
        fp8_gemm.run(*operands, bias, results[-1], chosen)
    assert _error(results[0], want) < 1e-3
    assert all(torch.equal(result, results[0]) for result in results)
    half = torch.full(shape[:2], float("nan"), device="cuda", dtype=torch.bfloat16)
    fp8_gemm.run(*operands, bias, half, chosen)
    assert torch.equal(half, results[0].bfloat16())


@pytest.mark.parametrize("n_rows", [5, 200])
def test_linear_with_bias(n_rows) -> None:
    x = _random(n_rows, 1024).bfloat16()
    _, _, b, b_scale = _operands(1, 384, 1024)
    bias = (1e3 * _random(384, seed=5)).bfloat16()
    want = _exact(*quantise_torch.quantise_activation(x), b, b_scale) + bias.double()
    assert _error(fp8_gemm.fp8_linear(x, b, b_scale, out_dtype=torch.float32, bias=bias), want) < 1e-3
    assert fp8_gemm.fp8_linear(x[:0], b, b_scale).shape == (0, 384)
    assert _error(fp8_gemm_torch.fp8_linear(x, b, b_scale, out_dtype=torch.float32, bias=bias), want) < 1e-3


@pytest.mark.parametrize("n_rows", [9, 128, 300])
def test_rows_do_not_see_each_other(n_rows) -> None:
    a, a_scale, b, b_scale = _operands(n_rows, 576, 1536)
    whole = fp8_gemm.fp8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32)
    fewer = n_rows - 3  # of the same bucket
    part = fp8_gemm.fp8_gemm(a[:fewer], a_scale[:fewer], b, b_scale, out_dtype=torch.float32)
    assert torch.equal(part, whole[:fewer])
    _bits(a)[4:] = 0x7F  # NaN
    assert torch.equal(fp8_gemm.fp8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32)[:4], whole[:4])


@pytest.mark.parametrize("n_rows", [6, 200])
def test_strides(n_rows) -> None:
    a, a_scale, b, b_scale = _operands(n_rows, 256, 1024)
    wide_a = torch.zeros(n_rows, 2048, device="cuda").to(torch.float8_e4m3fn)
    wide_b = torch.zeros(256, 1200, device="cuda").to(torch.float8_e4m3fn)
    wide_a[:, 512:1536], wide_b[:, 16:1040] = a, b
    out = torch.full((n_rows, 512), float("nan"), device="cuda")
    fp8_gemm.fp8_gemm(wide_a[:, 512:1536], a_scale.contiguous(), wide_b[:, 16:1040], b_scale, out_dtype=torch.float32, out=out[:, 128:384])
    assert torch.equal(out[:, 128:384], fp8_gemm.fp8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32))
    assert out[:, :128].isnan().all() and out[:, 384:].isnan().all()


def test_weight_beyond_two_gigabytes() -> None:
    width, n_features = 16384, (1 << 31) // 16384 + 128
    b = torch.zeros(n_features, width, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    a, a_scale, last, last_scale = _operands(200, 128, width)
    b[-128:] = last
    b_scale = torch.ones(n_features // 128, width // 128, device="cuda")
    b_scale[-1:] = last_scale
    want = _exact(a, a_scale, last, last_scale)
    for n_rows in (16, 200):
        got = fp8_gemm.fp8_gemm(a[:n_rows], a_scale[:n_rows], b, b_scale, out_dtype=torch.float32)
        assert _error(got[:, -128:], want[:n_rows]) < 1e-3 and not got[:, :-128].any()


@pytest.mark.parametrize("n_rows", [16, 30, 64, 300])
def test_replays_of_a_graph(n_rows) -> None:
    _, _, b, b_scale = _operands(1, 2112, 7168)
    x = _random(n_rows, 7168).bfloat16()
    want = fp8_gemm.fp8_linear(x, b, b_scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fp8_gemm.fp8_linear(x, b, b_scale)
    for _ in range(25):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)


@triton.jit
def _unpromoted(a, b, out, width: tl.constexpr):
    """64 x 64 products in the tensor cores' own accumulator from end to end."""
    rows, lanes = tl.arange(0, 64), tl.arange(0, 128)
    total = tl.zeros([64, 64], tl.float32)
    for k in range(0, width, 128):
        total = tl.dot(
            tl.load(a + rows[:, None] * width + k + lanes[None, :]), tl.load(b + rows[None, :] * width + k + lanes[:, None]), total
        )
    tl.store(out + rows[:, None] * 64 + rows[None, :], total)


@pytest.mark.parametrize("n_rows", [64, 256])
def test_a_sum_without_promotion_would_not_pass(n_rows) -> None:
    """Positive values over K = 16384: what the accumulator drops adds up, and the bound of the other tests notices it."""
    width = 16384
    a = (1 + _random(n_rows, width).abs()).clamp(max=4).to(torch.float8_e4m3fn)
    b = (1 + _random(64, width, seed=1).abs()).clamp(max=4).to(torch.float8_e4m3fn)
    a_scale, b_scale = quantise_torch.empty_scales(n_rows, width, a.device).fill_(1), torch.ones(1, width // BLOCK, device="cuda")
    want = _exact(a, a_scale, b, b_scale)
    planted = torch.empty(64, 64, device="cuda")
    _unpromoted[(1,)](a, b, planted, width)
    assert _error(planted, want[:64]) > 1e-3
    assert _error(fp8_gemm.fp8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32), want) < 2e-4


def test_captured_products_share_no_counters_and_leave_them_zero() -> None:
    """Two products that run at the same time in one graph, over and over; none sets its counters to zero in a replay."""
    from rorqual.parallel.kernels import fp8_gemm_split

    operands = [_operands(3, 2112, 7168), _operands(2, 4096, 7168)]
    expected = [fp8_gemm.fp8_gemm(*each) for each in operands]  # makes the counters that captures take
    left, side = len(fp8_gemm_split._captured[0]), torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            first = fp8_gemm.fp8_gemm(*operands[0])
        second = fp8_gemm.fp8_gemm(*operands[1])
        torch.cuda.current_stream().wait_stream(side)
    taken = left - len(fp8_gemm_split._captured[0])
    assert taken >= -(-2112 // 64) + 4096 // 64
    for _ in range(20):
        first.fill_(float("nan"))
        second.fill_(float("nan"))
        graph.replay()
        assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])


def test_captures_go_on_when_no_counters_are_left(monkeypatch) -> None:
    from rorqual.parallel.kernels import fp8_gemm_split

    operands = _operands(3, 2112, 7168)
    expected = fp8_gemm.fp8_gemm(*operands)
    monkeypatch.setitem(fp8_gemm_split._captured, 0, torch.zeros(4, dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fp8_gemm.fp8_gemm(*operands)
    for _ in range(3):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, expected)
