"""Experts from tokens to tokens, in the interpreter, against plain PyTorch and the engine's own experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rorqual.comm.fp8 import dequantise, quantise
from rorqual.moe.experts import Experts
from rorqual.moe.kernels import fused_experts as kernels
from rorqual.moe.kernels import fused_experts_torch as plain
from rorqual.moe.kernels.fused_experts_torch import ExpertWeights

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, about padding rows, which hold anything


def experts(n_slots: int, hidden: int, inner: int) -> ExpertWeights:
    torch.manual_seed(n_slots)
    return ExpertWeights(gate_up=torch.randn(n_slots, 2 * inner, hidden) * 0.2, down=torch.randn(n_slots, hidden, inner) * 0.2)


def by_hand(x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, given: ExpertWeights) -> torch.Tensor:
    """Token by token, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for slot, weight in zip(slots[token].tolist(), weights[token].tolist(), strict=True):
            if slot >= 0:
                gate, up = (given.gate_up[slot].double() @ x[token].double()).chunk(2)
                out[token] += weight * (given.down[slot].double() @ (torch.nn.functional.silu(gate) * up))
    return out


@interpreted
@pytest.mark.parametrize(("tokens", "k", "n_slots"), [(1, 2, 3), (20, 2, 2), (3, 8, 9), (0, 2, 3)])
def test_fp32_is_exact_to_rounding(tokens: int, k: int, n_slots: int) -> None:
    given = experts(n_slots, 80, 48)
    x, weights = torch.randn(tokens, 80), torch.rand(tokens, k)
    slots = torch.randint(-1, n_slots, (tokens, k), dtype=torch.int32)
    slots[:1] = -1
    expected = by_hand(x, slots, weights, given)
    for module in (kernels, plain):
        out = module.fused_experts(x, slots, weights, given)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        assert bool((out[:1] == 0).all())


@interpreted
def test_a_token_does_not_depend_on_its_neighbours() -> None:
    given = experts(4, 64, 32)
    x, weights = torch.randn(6, 64), torch.rand(6, 3)
    slots = torch.randint(0, 4, (6, 3), dtype=torch.int32)
    together = kernels.fused_experts(x, slots, weights, given)
    alone = torch.cat([kernels.fused_experts(x[t : t + 1], slots[t : t + 1], weights[t : t + 1], given) for t in range(6)])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)  # equal on a GPU; NumPy's products depend on the row


@interpreted
@pytest.mark.parametrize("counts", [[0, 5, 20], [30, 0, 0], [0, 0, 0]])
def test_arrived_rows_equal_the_modules(counts: list[int]) -> None:
    module = Experts(3, 64, 32)
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.2)
    given = ExpertWeights(gate_up=module.gate_up.data.view(3, 64, 64), down=module.down.data)
    sizes = torch.tensor(counts)
    x = torch.randn(int(sizes.sum()), 64)
    expected = module(x, sizes)
    torch.testing.assert_close(kernels.grouped_swiglu_device(x, sizes, given), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain.grouped_swiglu_device(x, sizes, given), expected, rtol=1e-5, atol=1e-5)


@interpreted
def test_fp8_experts_take_any_float() -> None:
    """Roughly: the interpreter's e4m3 rounding is off by a factor of two where the mantissa carries; values are compared on the GPU."""
    torch.manual_seed(1)
    shapes = {"gate_up": (3, 256, 128), "down": (3, 128, 128)}
    values = {name: (torch.randn(shape) * 30).to(torch.float8_e4m3fn) for name, shape in shapes.items()}
    scales = {name + "_scales": torch.rand(3, shape[1] // 128, shape[2] // 128) * 0.01 for name, shape in shapes.items()}
    given = ExpertWeights(**values, **scales)
    x, slots, weights = torch.randn(6, 128), torch.randint(-1, 3, (6, 2), dtype=torch.int32), torch.rand(6, 2)
    out, expected = kernels.fused_experts(x, slots, weights, given), plain.fused_experts(x, slots, weights, given)
    assert (out - expected).norm() < 0.5 * expected.norm()


@interpreted
@pytest.mark.parametrize("module", [kernels, plain], ids=["kernel", "plain"])
def test_tokens_that_arrive_as_fp8(module: Any) -> None:
    """Wide experts: the dequantised tokens' result. FP8 experts: what they make of the tokens when they quantise them themselves."""
    torch.manual_seed(3)
    x, slots, weights = torch.randn(7, 256), torch.randint(-1, 3, (7, 2), dtype=torch.int32), torch.rand(7, 2)
    values, steps = quantise(x)
    wide = experts(3, 256, 128)
    out = module.fused_experts(values, slots, weights, wide, x_scales=steps)
    expected = module.fused_experts(dequantise(values, steps, torch.float32), slots, weights, wide)
    assert out.dtype == torch.float32 and torch.equal(out, expected)
    narrow = fp8_experts(3, 256, 128)
    out = module.fused_experts(values, slots, weights, narrow, x_scales=steps, out_dtype=torch.float32)
    expected = plain.fused_experts(x, slots, weights, narrow)
    if module is plain:
        assert torch.equal(out, expected)
    else:  # the interpreter's e4m3 rounding of the gated unit is off where the mantissa carries
        assert (out - expected).norm() < 0.5 * expected.norm()
    with pytest.raises(ValueError, match="give out_dtype"):
        module.fused_experts(values, slots, weights, narrow, x_scales=steps)


@interpreted
@pytest.mark.parametrize("module", [kernels, plain], ids=["kernel", "plain"])
def test_rows_of_experts_are_what_is_summed(module: Any) -> None:
    given = experts(4, 80, 48)
    x, weights = torch.randn(20, 80), torch.rand(20, 3)
    slots = torch.randint(-1, 4, (20, 3), dtype=torch.int32)
    y, place = module.expert_rows(x, slots, given, n_rows=10)
    assert bool(((place < 0) == (slots < 0)).all()) and place.dtype == torch.int32
    out = torch.where((place >= 0)[..., None], weights[..., None] * y[place.long().clamp(min=0)], 0).sum(1)
    torch.testing.assert_close(out, module.fused_experts(x, slots, weights, given), rtol=1e-5, atol=1e-5)


def fp8_experts(n_slots: int, hidden: int, inner: int) -> ExpertWeights:
    shapes = {"gate_up": (n_slots, 2 * inner, hidden), "down": (n_slots, hidden, inner)}
    values = {name: (torch.randn(shape) * 30).to(plain.FP8) for name, shape in shapes.items()}
    steps = {name + "_scales": torch.rand(n_slots, shape[1] // 128, shape[2] // 128) * 0.01 for name, shape in shapes.items()}
    return ExpertWeights(**values, **steps)


def test_plain_fp8_equals_dequantised_experts() -> None:
    torch.manual_seed(2)
    values = {"gate_up": (torch.randn(3, 512, 256) * 30).to(plain.FP8), "down": (torch.randn(3, 256, 256) * 30).to(plain.FP8)}
    steps = {"gate_up": torch.rand(3, 4, 2) * 0.01, "down": torch.rand(3, 2, 2) * 0.01}
    wide = {name: values[name].float() * steps[name].repeat_interleave(128, 1).repeat_interleave(128, 2) for name in values}
    x, slots, weights = torch.randn(20, 256), torch.randint(0, 3, (20, 2), dtype=torch.int32), torch.rand(20, 2)
    given = ExpertWeights(**values, **{name + "_scales": step for name, step in steps.items()})
    out = plain.fused_experts(x, slots, weights, given)
    expected = plain.fused_experts(x, slots, weights, ExpertWeights(**wide))
    assert (out - expected).norm() < 0.05 * expected.norm()


def test_refusals_name_what_was_found() -> None:
    given = experts(2, 64, 32)
    with pytest.raises(ValueError, match="float16"):
        kernels.fused_experts(torch.zeros(2, 64).half(), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), given)
    with pytest.raises(ValueError, match="48"):
        kernels.grouped_swiglu_device(torch.zeros(2, 48), torch.tensor([1, 1]), given)
    with pytest.raises(ValueError, match="gate_up"):
        ExpertWeights(gate_up=torch.zeros(2, 64, 32), down=torch.zeros(2, 32, 64))
