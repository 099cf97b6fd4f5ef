"""Block-FP8 products in Triton's interpreter (few rows) and compiled for Hopper without a GPU (all)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.parallel.kernels import fp8_gemm, fp8_gemm_config, fp8_gemm_share, fp8_gemm_split, fp8_gemm_torch, quantise_torch  # noqa: E402
from tests.kernels.interpreter import repair  # noqa: E402
from tests.kernels.offline import SMEM_LIMIT, Spec, compile_reports  # noqa: E402

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is imported for the GPU")
BLOCK = 128
repair()


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


def _operands(n_rows: int, n_features: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random operands with scales over six decades, no powers of two."""
    generator = torch.Generator().manual_seed(n_rows + n_features + width)
    a, scale = quantise_torch.quantise_activation(torch.randn(n_rows, width, generator=generator))
    scale.mul_(10 ** (6 * torch.rand(scale.shape, generator=generator) - 3))
    b = (60 * torch.randn(n_features, width, generator=generator)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return a, scale, b, 10 ** (6 * torch.rand(_blocks(n_features), _blocks(width), generator=generator) - 3)


def _exact(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """The product of the dequantised operands in float64."""
    wide = a_scale.double().repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
    weight = b_scale.double().repeat_interleave(BLOCK, 0)[: b.shape[0]].repeat_interleave(BLOCK, 1)[:, : b.shape[1]]
    return (a.double() * wide) @ (b.double() * weight).T


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got.double() - want).abs().amax(1) / want.abs().amax(1)).max())


@interpreted
@pytest.mark.parametrize("shape", [(1, 64, 256), (3, 24, 130), (17, 144, 272), (33, 32, 144), (100, 48, 128), (130, 64, 160)])
def test_sum_of_scaled_blocks(shape) -> None:
    operands = _operands(*shape)
    out = torch.full(shape[:2], float("nan"))
    assert fp8_gemm.fp8_gemm(*operands, out_dtype=torch.float32, out=out) is out
    assert _error(out, _exact(*operands)) < 1e-5
    assert _error(fp8_gemm_torch.fp8_gemm(*operands, out_dtype=torch.float32), _exact(*operands)) < 1e-5


@interpreted
@pytest.mark.parametrize("splits", [1, 2, 3, 5])
def test_ranges_of_k_add_up(splits) -> None:
    operands = _operands(5, 80, 5 * 128 - 16)
    out = torch.full((5, 80), float("nan"))
    bias = torch.randn(80)
    for _ in range(2):  # the second launch finds the counters as the first one left them
        fp8_gemm_split.launch(*operands, bias, out, rows=16, features=64, splits=splits, stages=3, warps=4)
        assert _error(out, _exact(*operands) + bias) < 1e-5


@interpreted
@pytest.mark.parametrize(
    ("rows", "tiles", "programs", "n_whole"), [(16, (1, 3), 7, 0), (128, (2, 2), 5, 0), (128, (2, 3), 4, 1), (16, (1, 5), 3, 1)]
)
def test_parts_of_shared_tiles_add_up(rows, tiles, programs, n_whole) -> None:
    """Parts as the programs would leave them, one a unit's sum each, poison wherever no part belongs."""
    n_blocks, group = 5, 1
    shape = tiles[0] * rows - 3, tiles[1] * 128 - 8
    unit = torch.randn(tiles[0] * tiles[1], n_blocks, rows, 128, generator=torch.Generator().manual_seed(0))
    partial = torch.full((programs, 2, rows, 128), float("nan"))
    out, bias = torch.full(shape, 7.0), torch.randn(shape[1])
    shared = tiles[0] * tiles[1] - n_whole * programs
    units = shared * n_blocks
    sharers = [set() for _ in range(shared)]
    for p in range(programs):
        mine = range(p * units // programs, (p + 1) * units // programs)
        for tile in {u // n_blocks for u in mine}:
            blocks = [u % n_blocks for u in mine if u // n_blocks == tile]
            partial[p, int(blocks[0] == 0)] = unit[n_whole * programs + tile, blocks].sum(0)
            sharers[tile].add(p)
    fp8_gemm_share.add_parts(partial, bias, out, rows=rows, group=group, tiles=tiles, n_blocks=n_blocks, n_whole=n_whole, programs=programs)
    for index in range(tiles[0] * tiles[1]):
        row, column = (index // tiles[1]) * rows, (index % tiles[1]) * 128
        got = out[row : row + rows, column : column + 128]
        want = (unit[index].sum(0)[: len(got), : got.shape[1]]) + bias[column : column + 128]
        shared_here = index >= n_whole * programs and len(sharers[index - n_whole * programs]) > 1
        torch.testing.assert_close(got, want if shared_here else torch.full_like(got, 7.0), rtol=1e-5, atol=1e-5)


@interpreted
def test_more_ranges_than_blocks() -> None:
    operands = _operands(2, 16, 48)
    out = torch.full((2, 16), float("nan"))
    fp8_gemm_split.launch(*operands, None, out, rows=16, features=64, splits=8, stages=3, warps=4)
    assert _error(out, _exact(*operands)) < 1e-5


@interpreted
def test_rows_do_not_see_each_other() -> None:
    a, a_scale, b, b_scale = _operands(16, 64, 1024)
    whole = fp8_gemm.fp8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32)
    alone = fp8_gemm.fp8_gemm(a[3:4], a_scale[3:4], b, b_scale, out_dtype=torch.float32)
    assert torch.equal(whole[3:4], alone)
    a.view(torch.uint8)[4:] = 0x7F  # NaN
    assert torch.equal(fp8_gemm.fp8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32)[:4], whole[:4])


@interpreted
def test_strides() -> None:
    """Rows of a wider matrix on both sides, row-major scales, an output inside a wider one."""
    a, a_scale, b, b_scale = _operands(6, 64, 256)
    wide_a, wide_b = torch.zeros(6, 512).to(torch.float8_e4m3fn), torch.zeros(64, 400).to(torch.float8_e4m3fn)
    wide_a[:, 128:384] = a
    wide_b[:, 16:272] = b
    out = torch.full((6, 128), float("nan"))
    fp8_gemm.fp8_gemm(wide_a[:, 128:384], a_scale.contiguous(), wide_b[:, 16:272], b_scale, out_dtype=torch.float32, out=out[:, 32:96])
    assert _error(out[:, 32:96], _exact(a, a_scale, b, b_scale)) < 1e-5
    assert out[:, :32].isnan().all() and out[:, 96:].isnan().all()


@interpreted
def test_no_rows() -> None:
    operands = _operands(0, 64, 256)
    assert fp8_gemm.fp8_gemm(*operands).shape == fp8_gemm_torch.fp8_gemm(*operands).shape == (0, 64)


def test_linear_of_the_twin() -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    _, _, b, b_scale = _operands(4, 48, 256)
    bias = torch.randn(48)
    got = fp8_gemm_torch.fp8_linear(x, b, b_scale, bias=bias)
    assert got.dtype == x.dtype
    assert _error(got, _exact(*quantise_torch.quantise_activation(x), b, b_scale) + bias) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, s, b, t: (a.float(), s, b, t), "float8_e4m3fn"),
        (lambda a, s, b, t: (a, s, b.t(), t), "untransposed"),
        (lambda a, s, b, t: (a, s, b[:0], t), "must be positive"),
        (lambda a, s, b, t: (a, s[:, :1], b, t), "scales must be float32 of shapes"),
        (lambda a, s, b, t: (a, s, b, t.double()), "scales must be float32 of shapes"),
        (lambda a, s, b, t: (a, s, b, t.t().contiguous().t()), "contiguous"),
    ],
)
def test_refusals(change, message) -> None:
    operands = change(*_operands(3, 160, 256))
    for module in (fp8_gemm, fp8_gemm_torch):
        with pytest.raises(ValueError, match=message):
            module.fp8_gemm(*operands)


def test_refusals_of_the_output() -> None:
    operands = _operands(3, 64, 256)
    with pytest.raises(ValueError, match="out_dtype must be one of"):
        fp8_gemm.fp8_gemm(*operands, out_dtype=torch.float64)
    with pytest.raises(ValueError, match="out must be"):
        fp8_gemm.fp8_gemm(*operands, out=torch.empty(3, 64))
    with pytest.raises(ValueError, match="bias must be"):
        fp8_gemm.fp8_gemm(*operands, bias=torch.empty(65))


def test_choice_of_launch() -> None:
    assert [fp8_gemm_config.bucket(m) for m in (1, 16, 17, 33, 128, 129, 256, 257)] == [16, 16, 32, 64, 128, 256, 256, 512]
    for n_features, width in ((2112, 7168), (24576, 1536), (7168, 16384), (576, 7168), (24, 7168), (36864, 7168), (64, 64)):
        for rows in (16, 32, 64, 128, 256, 512, 4096):
            assert fp8_gemm_config.default_config(rows, n_features, width)["kind"] in ("split", "narrow", "tiles")
            assert 1 <= fp8_gemm_config.split_config(rows, n_features, width)["splits"] <= _blocks(width)
    assert fp8_gemm_config.default_config(4096, 7168, 16384)["kind"] == "tiles"
    assert fp8_gemm_config.default_config(64, 2112, 7168)["columns"] == 16  # 132 tiles


def _split_spec(rows: int, features: int, splits: int, stages: int, warps: int, whole: bool) -> Spec:
    signature = {
        "a": "*fp8e4nv",
        "a_scale": "*fp32",
        "b": "*fp8e4nv",
        "b_scale": "*fp32",
        "out": "*bf16",
        "partial": "*fp32",
        "arrived": "*i32",
    }
    aligned = ("n_features", "width", "a_stride", "a_scale_block", "b_stride", "out_stride")
    signature |= dict.fromkeys((*aligned, "n_rows", "b_scale_stride"), "i32")
    constants = {"FEATURES": features, "ROWS": rows, "SPLITS": splits, "BIAS": False, "WHOLE": whole, "STAGES": stages, "EARLY": True}
    return Spec(
        fn="rorqual.parallel.kernels.fp8_gemm_split:fp8_gemm_split_kernel",
        signature=signature,
        constexprs={"bias": None, "a_scale_row": 1, **constants},
        aligned=("a", "a_scale", "b", "b_scale", "out", "partial", "arrived", *aligned),
        options={"num_warps": warps},
    )


def _descriptor(dtype: str, shape: list[int], bits: int) -> str:
    """Type of a TMA descriptor: swizzled matrices, plain lines."""
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128 if len(shape) == 2 else 0, element_bitwidth=bits, rank=len(shape))
    return f"tensordesc<{dtype}{shape},{layout!r}>"


def _tiles_spec(rows: int, stages: int, out: str, bias: bool) -> Spec:
    integers = ("scale_pitch", "b_scale_stride", "n_columns", "n_row_tiles", "n_column_tiles", "n_blocks", "n_whole")
    return Spec(
        fn="rorqual.parallel.kernels.fp8_gemm_tiles:fp8_gemm_tiles_kernel",
        signature={
            "a": _descriptor("fp8e4nv", [rows, 128], 8),
            "a_scale": _descriptor("fp32", [rows], 32),
            "b": _descriptor("fp8e4nv", [128, 128], 8),
            "b_scale": "*fp32",
            "bias": "*bf16",
            "partial": "*fp32",
            "c": _descriptor(out, [64, 64], 16 if out == "bf16" else 32),
            **dict.fromkeys(integers, "i32"),
        },
        constexprs={"ROWS": rows, "STAGES": stages, "GROUP": 8, "BIAS": bias},
        aligned=("b_scale", "bias", "partial", "scale_pitch", "n_columns"),
        gluon=True,
        options={"num_warps": 4},
    )


def _narrow_spec(rows: int, columns: int, out: str, bias: bool, read: int | None = None) -> Spec:
    from rorqual.parallel.kernels.fp8_gemm_narrow import room

    integers = ("scale_pitch", "b_scale_stride", "out_stride", "n_rows", "n_columns", "n_row_tiles", "n_tiles", "n_blocks", "ahead")
    return Spec(
        fn="rorqual.parallel.kernels.fp8_gemm_narrow:fp8_gemm_narrow_kernel",
        signature={
            "a": _descriptor("fp8e4nv", [read or rows, 128], 8),
            "a_scale": _descriptor("fp32", [rows], 32),
            "b": _descriptor("fp8e4nv", [columns, 128], 8),
            **{"b_scale": "*fp32", "bias": "*bf16", "out": f"*{out}"},
            **dict.fromkeys(integers, "i32"),
        },
        constexprs={"ROWS": rows, "COLUMNS": columns, "STAGES": room(rows, columns, 2 if out == "bf16" else 4), "BIAS": bias},
        aligned=("b_scale", "bias", "out", "out_stride", "n_columns"),
        gluon=True,
        options={"num_warps": 4},
    )


@pytest.fixture(scope="module")
def reports():
    specs = [
        _split_spec(16, 64, 6, 5, 4, True),
        _split_spec(64, 64, 6, 5, 4, False),
        _split_spec(128, 128, 2, 4, 8, True),
        _narrow_spec(64, 16, "bf16", False, read=32),
        _narrow_spec(64, 128, "fp32", True),
        _narrow_spec(128, 64, "bf16", False),
        _narrow_spec(128, 128, "bf16", True),
        _narrow_spec(128, 128, "fp32", False),
        _tiles_spec(256, 4, "bf16", False),
        _tiles_spec(256, 3, "fp32", True),
    ]
    return compile_reports(specs)


def test_compiled_kernels(reports) -> None:
    for report in reports:
        assert report.spill_bytes == 0 and report.shared <= SMEM_LIMIT
        assert report.count("QGMMA") and not report.count("HMMA")


def test_every_product_is_promoted(reports) -> None:
    """No chain of wgmma is longer than 128 of K: each starts from zero (RZ) and runs over four instructions."""
    for report in reports:
        products = [line for line in report.sass.splitlines() if "QGMMA" in line]
        assert len(products) == 4 * sum("RZ, !UPT" in line for line in products)
