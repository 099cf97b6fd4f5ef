"""Products of a few rows with a small weight: the kernel in the interpreter, and compiled."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.offline import Spec, compile_reports

pytest.importorskip("triton")

from rorqual.parallel.kernels import wide_product, wide_product_torch  # noqa: E402


@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 64, 7168), (4, 5, 1000), (3, 1, 1), (2, 7, 1025), (0, 3, 16), (2, 0, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_is_the_twin(rows, columns, width, dtype):
    x, weight = torch.randn(rows, width + 3).to(dtype)[:, :width], torch.randn(columns, width + 5).to(dtype)[:, :width]
    got, expected = wide_product.wide_product(x, weight), wide_product_torch.wide_product(x, weight)
    assert got.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * width**0.5)


def test_a_row_does_not_depend_on_the_others():
    x, weight = torch.randn(4, 3000), torch.randn(9, 3000)
    whole = wide_product.wide_product(x, weight)
    assert torch.equal(torch.cat([wide_product.wide_product(row[None], weight) for row in x]), whole)


def test_refusals():
    for product in (wide_product.wide_product, lambda x, w: wide_product_torch.check_operands(x, w)):
        with pytest.raises(ValueError, match=r"\[T, K\] and \[N, K\], got \(2, 8\) and \(3, 9\)"):
            product(torch.zeros(2, 8), torch.zeros(3, 9))
        with pytest.raises(ValueError, match="adjacent values"):
            product(torch.zeros(2, 8), torch.zeros(8, 3).t())


def test_compiles_without_spills():
    names = ("x", "weight")
    report = compile_reports(
        [
            Spec(
                fn="rorqual.parallel.kernels.wide_product:wide_product_kernel",
                signature=dict.fromkeys(names, "*bf16") | {"out": "*fp32", "n_columns": "i32", "x_stride": "i32", "weight_stride": "i32"},
                constexprs={"WIDTH": 7168, "CHUNK": 1024, "EARLY": True},
                aligned=(*names, "out", "x_stride", "weight_stride"),
                options={"num_warps": 4},
            )
        ]
    )[0]
    assert report.spill_bytes == 0 and report.registers <= 128
    assert report.count("LDG") == 14 and report.sass.count("LDG.E.128") == 14  # every operand is under way at once
