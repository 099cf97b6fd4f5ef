"""Activation quantisation in Triton's interpreter: the format's exact bits, the gated unit, what is written and what is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from rorqual.comm import fp8  # noqa: E402
from rorqual.parallel.kernels import quantise, quantise_torch  # noqa: E402
from tests.kernels.interpreter import repair  # noqa: E402
from tests.kernels.offline import SMEM_LIMIT, Spec, compile_reports  # noqa: E402

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is imported for the GPU")


@pytest.fixture(autouse=True)
def exact_arithmetic(monkeypatch):
    """The interpreter's cast to e4m3 drops the carry into the exponent (127 becomes 64) and its fma rounds twice: mend both."""
    import triton.language as tl
    from triton.runtime import interpreter

    repair()
    original = interpreter._convert_float

    def convert(data, source, target, rounding):
        if (source, target) == (tl.float32, tl.float8e4nv):
            return torch.from_numpy(data.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return original(data, source, target, rounding)

    def fma(self, x, y, z):
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(exact.astype(np.float32), z.dtype.scalar)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def _activations(n_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n_rows * 1000 + width)
    x = torch.randn(n_rows, width, generator=generator) * torch.exp(3 * torch.randn(n_rows, 1, generator=generator))
    if n_rows > 2:
        x[2] = 0
    return x.to(dtype)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 300), (37, 256), (1, 16), (0, 256)])
def test_same_bits_as_the_dispatch_format(shape, dtype) -> None:
    x = _activations(*shape, dtype)
    values, scales = quantise.quantise_activation(x)
    expected, expected_scales = fp8.quantise(x)
    assert torch.equal(_bits(values), _bits(expected)) and torch.equal(scales, expected_scales)
    twin, twin_scales = quantise_torch.quantise_activation(x)
    assert torch.equal(_bits(twin), _bits(expected)) and torch.equal(twin_scales, expected_scales)
    assert scales.stride() == twin_scales.stride() == (1, max(-(-shape[0] // 16), 1) * 16)


@interpreted
def test_ties_go_to_even_and_the_largest_is_448() -> None:
    x = torch.zeros(1, 128)
    x[0, :6] = torch.tensor([448.0, 17.0, 19.0, -17.0, 2**-10, 3 * 2**-10])  # 17, 19: halfway between 16, 18, 20
    values, scales = quantise.quantise_activation(x)
    assert scales.item() == 1.0
    assert values[0, :6].float().tolist() == [448.0, 16.0, 20.0, -16.0, 0.0, 2**-8]


@interpreted
@pytest.mark.parametrize("size", [1e-36, 1e-30, 1e30, 3e38])
def test_quotients_at_the_ends_of_the_range(size) -> None:
    x = torch.linspace(-1, 1, 256).view(2, 128) * size
    values, scales = quantise.quantise_activation(x)
    expected, expected_scales = fp8.quantise(x)
    assert torch.equal(_bits(values), _bits(expected)) and torch.equal(scales, expected_scales)


@interpreted
def test_strided_rows() -> None:
    wide = _activations(9, 512, torch.float32)
    values, scales = quantise.quantise_activation(wide[::2, 128:384])
    expected, expected_scales = fp8.quantise(wide[::2, 128:384].contiguous())
    assert torch.equal(_bits(values), _bits(expected)) and torch.equal(scales, expected_scales)


@interpreted
def test_nan_stays_nan() -> None:
    x = torch.ones(2, 128)
    x[0, 5] = float("nan")
    values, _ = quantise.quantise_activation(x)
    assert values[0, 5].float().isnan() and not values[1].float().isnan().any()


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gated_unit_fused_equals_unfused(dtype) -> None:
    gate_up = _activations(7, 2 * 208, dtype)
    product = quantise.silu_mul(gate_up)
    torch.testing.assert_close(product, quantise_torch.silu_mul(gate_up), rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-6)
    fused, fused_scales = quantise.silu_mul_quantise(gate_up)
    values, scales = quantise.quantise_activation(product)
    assert torch.equal(_bits(fused), _bits(values)) and torch.equal(fused_scales, scales)


@interpreted
def test_gate_far_from_zero_gives_no_nan() -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 90.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    assert quantise.silu_mul(gate_up).tolist() == [[0.0, 0.0, 90.0, 1e4]]


@interpreted
@pytest.mark.parametrize("count", [0, 3, 40])
def test_rows_beyond_the_count_are_not_computed(count) -> None:
    x = _activations(40, 128, torch.float32)
    x[count:] = float("nan")
    values, scales = quantise.quantise_activation(x, count=torch.tensor([count], dtype=torch.int32))
    expected, expected_scales = fp8.quantise(x[:count])
    assert torch.equal(_bits(values[:count]), _bits(expected)) and torch.equal(scales[:count], expected_scales)


def test_refusals() -> None:
    for module in (quantise, quantise_torch):
        with pytest.raises(ValueError, match="contiguous columns"):
            module.quantise_activation(torch.ones(4, 8).t())
        with pytest.raises(ValueError, match="float64"):
            module.quantise_activation(torch.ones(4, 8, dtype=torch.float64))
        with pytest.raises(ValueError, match="even number of columns"):
            module.silu_mul_quantise(torch.ones(4, 7))


def test_compiles_without_spill() -> None:
    signature = {
        "x": "*bf16", "values": "*fp8e4nv", "scales": "*fp32", "n_rows": "i32", "width": "i32", "x_stride": "i32", "scale_stride": "i32",
    }  # fmt: skip
    specs = [
        Spec(
            fn="rorqual.parallel.kernels.quantise:quantise_kernel",
            signature=signature,
            constexprs={"count": None, "GATED": gated, "COUNTED": False, "ROWS": rows, "BLOCK": 128, "EARLY": True},
            aligned=("x", "values", "scales", "width", "x_stride", "scale_stride"),
            options={"num_warps": warps},
        )
        for gated in (False, True)
        for rows, warps in ((4, 1), (32, 4))
    ]
    for report in compile_reports(specs):
        assert report.spill_bytes == 0 and report.shared <= SMEM_LIMIT
        assert "LDG.E.128" in report.sass  # 16 bytes a thread
