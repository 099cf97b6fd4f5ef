"""Grouped products on the GPU against the float64 evaluation of the dequantised operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rorqual.moe.kernels import grouped_gemm as kernels
from rorqual.moe.kernels import grouped_gemm_torch as plain
from rorqual.moe.kernels.permute import permute, segment_blocks
from rorqual.moe.kernels.permute_rows import permute_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NAN = float("nan")
FP8 = torch.float8_e4m3fn


def weights(n_slots: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    if dtype == FP8:
        scales = torch.rand(n_slots, -(-n // 128), -(-k // 128), device="cuda") * 0.01 + 0.001  # no powers of two
        return (torch.randn(n_slots, n, k, device="cuda") * 30).to(FP8), scales
    return (torch.randn(n_slots, n, k, device="cuda") * k**-0.5).to(dtype), None


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


CASES: list[tuple[torch.dtype, int, dict[str, Any]]] = [
    (FP8, 64, {}),
    (FP8, 128, {}),
    (FP8, 16, {}),
    (FP8, 64, {"path": "tile"}),
    (torch.bfloat16, 128, {}),
    (torch.bfloat16, 16, {}),
    (torch.float16, 64, {}),
    (torch.float32, 32, {}),
]


@pytest.mark.parametrize(("dtype", "block", "config"), CASES)
def test_skewed_rows(dtype: torch.dtype, block: int, config: dict[str, Any]) -> None:
    """A slot with most rows, one with one, some with none; padding rows of A and rows of no block hold NaN."""
    torch.manual_seed(0)
    slots = torch.randint(-1, 7, (150, 2), dtype=torch.int32, device="cuda")
    slots[:130, 0] = 2
    slots[(slots == 1) | (slots == 4)] = 3
    slots[3, 1] = 4
    layout = permute(slots, 7, block=block)
    x = torch.randn(150, 512, device="cuda", dtype=torch.bfloat16 if dtype == FP8 else dtype)
    a, a_scales = permute_rows(x, layout, quantise=dtype == FP8)
    b, b_scales = weights(7, 768, 512, dtype)
    real = layout.sorted_index >= 0
    a.view(torch.uint8)[~real] = 0x7F
    if a_scales is not None:
        a_scales[~real] = NAN
    more = {"a_scales": a_scales, "b_scales": b_scales}
    expected = plain.grouped_gemm(a, b, layout, out_dtype=torch.float64, **more)[real]
    out = kernels.grouped_gemm(a, b, layout, out_dtype=torch.float32, config=config, **more)
    assert error(out[real], expected) < (1e-3 if dtype == FP8 else 1e-5 if dtype == torch.float32 else 1e-4)
    assert error(kernels.grouped_gemm(a, b, layout, config=config, **more)[real], expected) < 1e-2
    for _ in range(25):
        assert torch.equal(kernels.grouped_gemm(a, b, layout, out_dtype=torch.float32, config=config, **more)[real], out[real])


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
def test_rows_read_through_the_layout(dtype: torch.dtype) -> None:
    slots = torch.randint(-1, 5, (60, 3), dtype=torch.int32, device="cuda")
    layout = permute(slots, 5, block=16)
    x = torch.randn(60, 512, device="cuda", dtype=torch.bfloat16)
    rows, row_scales = permute_rows(x, layout, quantise=dtype == FP8)
    b, b_scales = weights(5, 768, 512, dtype)
    if dtype == FP8:
        from rorqual.parallel.kernels.quantise import quantise_activation

        a, a_scales = quantise_activation(x)
    else:
        a, a_scales = x, None
    real = layout.sorted_index >= 0
    out = kernels.grouped_gemm(a, b, layout, a_scales=a_scales, b_scales=b_scales, gather=True)
    same = kernels.grouped_gemm(rows, b, layout, a_scales=row_scales, b_scales=b_scales)
    assert torch.equal(out[real], same[real])


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("counts", [[0, 70, 3], [150, 0, 0], [0, 0, 0], [1, 64, 65]])
def test_masked_rows_leave_the_rest_alone(counts: list[int], block: int) -> None:
    """150 rows a slot is no whole number of blocks: the last block of a slot must not touch the next slot's rows."""
    a = torch.randn(3, 150, 512, device="cuda", dtype=torch.bfloat16)
    b, _ = weights(3, 768, 512, torch.bfloat16)
    sizes = torch.tensor(counts, device="cuda")
    masked = torch.arange(150, device="cuda") >= sizes[:, None]
    a[masked] = NAN
    out = kernels.grouped_gemm_masked(a, b, sizes, block=block)
    if sum(counts):
        expected = torch.einsum("smk,snk->smn", a.double(), b.double())
        assert error(out[~masked], expected[~masked]) < 1e-2


def test_captured_product_follows_device_counts() -> None:
    a = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16)
    b, _ = weights(4, 768, 512, torch.bfloat16)
    counts = torch.tensor([100, 0, 150, 50], device="cuda")
    kernels.grouped_gemm(a, b, segment_blocks(counts, 300, 64))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.grouped_gemm(a, b, segment_blocks(counts, 300, 64))
    for sizes in ([300, 0, 0, 0], [1, 1, 1, 297], [0, 64, 128, 108]):
        counts.copy_(torch.tensor(sizes))
        out.fill_(NAN)
        graph.replay()
        slot = torch.repeat_interleave(torch.arange(4, device="cuda"), counts)
        expected = torch.cat([a[slot == s].double() @ b[s].double().t() for s in range(4)])
        assert error(out, expected) < 1e-2


@pytest.mark.parametrize("config", [{}, {"path": "tile"}])
def test_offsets_past_two_gigabytes(config: dict[str, Any]) -> None:
    """The last slot's weights and the last rows of the output lie more than 2^31 elements in."""
    rows, n, k = 150_000, 8192, 512
    b = torch.empty(600, n, k, dtype=torch.bfloat16, device="cuda")  # 2.5e9 elements
    b[0].normal_(0, 0.05)
    b[599].normal_(0, 0.05)
    counts = torch.zeros(600, dtype=torch.int32, device="cuda")
    counts[0] = rows * 2 - 3
    counts[599] = 3
    a = torch.empty(rows * 2, k, dtype=torch.bfloat16, device="cuda")
    a.normal_()
    out = kernels.grouped_gemm(a, b, segment_blocks(counts, rows * 2, 64), config=config)  # 2.5e9 elements
    for row, slot in ((0, 0), (rows * 2 - 4, 0), (rows * 2 - 3, 599), (rows * 2 - 1, 599)):
        assert error(out[row], b[slot].double() @ a[row].double()) < 1e-2
