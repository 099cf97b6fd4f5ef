"""Grouped products in the interpreter against plain PyTorch, and what they compile to for Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rorqual.moe.kernels import grouped_gemm as kernels
from rorqual.moe.kernels import grouped_gemm_torch as plain
from rorqual.moe.kernels import permute_torch
from rorqual.moe.kernels.permute_torch import permute, segment_blocks
from rorqual.parallel.kernels.quantise_torch import quantise_activation
from tests.kernels.offline import SMEM_LIMIT, Report, Spec, compile_reports

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
NAN = float("nan")


def weights(n_slots: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    values = torch.randn(n_slots, n, k)
    if dtype != torch.float8_e4m3fn:
        return (values * k**-0.5).to(dtype), None
    return (values * 30).to(dtype), torch.rand(n_slots, -(-n // 128), -(-k // 128)) * 0.01 + 0.001


@interpreted
@pytest.mark.parametrize(
    ("dtype", "n", "k", "block", "config"),
    [
        (torch.float32, 48, 80, 16, {}),
        (torch.float32, 64, 64, 32, {"swap": True, "block_n": 64}),
        (torch.float16, 72, 96, 16, {"block_n": 64}),
        (torch.float8_e4m3fn, 136, 200, 16, {"swap": False}),
        (torch.float8_e4m3fn, 128, 256, 16, {}),
    ],
)
@pytest.mark.parametrize("gather", [False, True])
def test_rows_meet_their_experts(dtype: torch.dtype, n: int, k: int, block: int, config: dict[str, Any], gather: bool) -> None:
    """Skewed counts: one slot with most rows, one with none; NaN in padding rows stays there."""
    torch.manual_seed(0)
    slots = torch.randint(-1, 4, (26, 2), dtype=torch.int32)
    slots[:20, 0] = 2
    slots[slots == 1] = 3
    layout = permute(slots, 4, block=block)
    x = torch.randn(26, k)
    b, b_scales = weights(4, n, k, dtype)
    if dtype == torch.float8_e4m3fn:
        a, a_scales = quantise_activation(x)
    else:
        a, a_scales = x.to(dtype), None
    token = layout.sorted_index.long().clamp(min=0) // 2
    real = layout.sorted_index >= 0
    if not gather:
        a = a[token]
        a_scales = None if a_scales is None else a_scales[token].t().contiguous().t()
        a.view(torch.uint8)[~real] = 0x7F
        if a_scales is not None:
            a_scales[~real] = NAN
    more = {"a_scales": a_scales, "b_scales": b_scales, "gather": gather, "out_dtype": torch.float32}
    out = kernels.grouped_gemm(a, b, layout, config=config, **more)
    expected = plain.grouped_gemm(a, b, layout, **{**more, "out_dtype": torch.float64})
    tolerance = 1e-5 if dtype != torch.float16 else 1e-3
    torch.testing.assert_close(out[real].double(), expected[real], rtol=tolerance, atol=tolerance)


@interpreted
@pytest.mark.parametrize("counts", [[0, 20, 3], [33, 0, 0], [0, 0, 0]])
def test_masked_rows(counts: list[int]) -> None:
    a, b = torch.randn(3, 33, 32), torch.randn(3, 48, 32)
    sizes = torch.tensor(counts, dtype=torch.int32)
    masked = torch.arange(33) >= sizes[:, None]
    a[masked] = NAN
    out = kernels.grouped_gemm_masked(a, b, sizes, block=16)
    expected = torch.einsum("smk,snk->smn", a.double(), b.double())
    torch.testing.assert_close(out[~masked].double(), expected[~masked], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain.grouped_gemm_masked(a, b, sizes)[~masked].double(), expected[~masked], rtol=1e-5, atol=1e-5)


@interpreted
def test_rows_without_padding_never_write_to_the_next_segment() -> None:
    counts = torch.tensor([5, 0, 17, 1])
    a, b = torch.randn(23, 32), torch.randn(4, 32, 32)
    layout = segment_blocks(counts, 23, 16)
    expected = torch.cat([a[:5] @ b[0].t(), a[5:22] @ b[2].t(), a[22:] @ b[3].t()])
    torch.testing.assert_close(kernels.grouped_gemm(a, b, layout), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain.grouped_gemm(a, b, layout), expected, rtol=1e-5, atol=1e-5)


def test_refusals_name_what_was_found() -> None:
    layout = permute(torch.zeros(2, 1, dtype=torch.int32), 1, block=16)
    a, b = torch.zeros(16, 32), torch.zeros(1, 8, 32)
    with pytest.raises(ValueError, match="float16"):
        kernels.grouped_gemm(a.half(), b, layout)
    with pytest.raises(ValueError, match="take both scales"):
        kernels.grouped_gemm(a, b, layout, b_scales=torch.ones(1, 1, 1))
    with pytest.raises(ValueError, match="scales must be"):
        kernels.grouped_gemm(a.to(plain.FP8), b.to(plain.FP8), layout, a_scales=torch.ones(16, 2), b_scales=torch.ones(1, 1, 1))
    with pytest.raises(ValueError, match="contiguous"):
        kernels.grouped_gemm(a, torch.zeros(1, 32, 8).transpose(1, 2), layout)
    with pytest.raises(ValueError, match="Permutation"):
        kernels.grouped_gemm(a, b, permute_torch.segment_blocks(torch.tensor([16]), 16, 16), gather=True)


def tile_spec(kind: str, block: int, gated: bool) -> Spec:
    fp8 = kind == "fp8e4nv"
    pointers = {"a": f"*{kind}", "b": f"*{kind}", "a_scales": "*fp32", "b_scales": "*fp32", "out_scales": "*fp32"}
    tables = dict.fromkeys(("sorted_index", "block_slot", "block_row", "block_rows", "n_blocks"), "*i32")
    sizes = ("n_tiles", "N", "K", "a_stride", "a_pitch", "b_stride", "b_scale_stride", "out_stride", "out_pitch")
    return Spec(
        fn="rorqual.moe.kernels.grouped_gemm_tile:grouped_tile_kernel",
        signature={**pointers, "out": f"*{kind}" if gated else "*bf16", **tables, **dict.fromkeys(sizes, "i32")},
        constexprs={
            "TOP_K": 0, "SWAP": True, "FP8": fp8, "GATED": gated, "QUANTISE": gated and fp8, "EVEN": True, "GROUP": 4,
            "BLOCK_M": block, "BLOCK_N": 128, "BLOCK_K": 128 if fp8 else 64, "EARLY": True,
        },
        aligned=("a", "b", "out", "N", "K", "a_stride", "b_stride", "out_stride"),
        options={"num_warps": 4, "num_stages": 3},
    )  # fmt: skip


def hopper_spec(kind: str, consumers: int, columns: int, parts: int, passes: int, stages: int, gated: bool) -> Spec:
    bits = 8 if kind == "fp8e4nv" else 16
    flags = "rank=2, transposed=False, fp4_padded=False, cga_layout=[]"
    shared = f"NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth={bits}, {flags})"
    tiles = {name: f"tensordesc<{kind}[{rows}, {1024 // bits}],{shared}>" for name, rows in (("a", 64), ("b", columns))}
    pointers = {"a_scales": "*fp32", "b_scales": "*fp32", "out": f"*{kind}" if gated else "*bf16", "out_scales": "*fp32"}
    tables = dict.fromkeys(("block_slot", "block_row", "block_rows", "n_blocks"), "*i32")
    sizes = dict.fromkeys(("n_tiles", "k_steps", "b_rows", "half", "a_pitch", "b_pitch", "out_pitch", "out_scale_pitch"), "i32")
    return Spec(
        fn="rorqual.moe.kernels.grouped_gemm_hopper_kernel:grouped_kernel",
        signature={**tiles, **pointers, **tables, **sizes},
        constexprs={
            "CONSUMERS": consumers, "PARTS": parts, "PASSES": passes, "STAGES": stages, "GROUP": 8, "ROWS": 64, "BLOCK_N": columns,
            "BLOCK_K": 1024 // bits, "GATED": gated, "QUANTISE": gated and bits == 8, "FP8": bits == 8,
        },
        aligned=("out", "b_rows", "half", "a_pitch", "out_pitch", "out_scale_pitch"),
        gluon=True,
        options={"num_warps": 4},
    )  # fmt: skip


TILES = [("fp8e4nv", 16, True), ("bf16", 16, False)]
HOPPER = [("fp8e4nv", 2, 64, 4, 1, 4, True), ("fp8e4nv", 2, 64, 4, 1, 4, False), ("bf16", 2, 128, 2, 1, 4, True)]


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return compile_reports([tile_spec(*case) for case in TILES] + [hopper_spec(*case) for case in HOPPER])


@pytest.mark.parametrize("index", range(len(TILES)))
def test_tile_kernel_multiplies_on_warpgroups(reports: list[Report], index: int) -> None:
    report, fp8 = reports[index], TILES[index][0] == "fp8e4nv"
    assert report.spill_bytes == 0 and report.shared <= SMEM_LIMIT and report.count("HMMA") == 0
    assert report.count("QGMMA" if fp8 else "HGMMA") > 0 and report.count("LDGSTS") > 0


@pytest.mark.parametrize("index", range(len(HOPPER)))
def test_hopper_kernel_streams_by_tma(reports: list[Report], index: int) -> None:
    """No spill: one in the registers of a running product makes all of them wait, and costs half the speed."""
    report, fp8 = reports[len(TILES) + index], HOPPER[index][0] == "fp8e4nv"
    assert report.spill_bytes == 0 and report.shared <= SMEM_LIMIT and report.count("HMMA") == 0
    assert report.count("QGMMA" if fp8 else "HGMMA") > 0 and report.count("UTMALDG") > 0
