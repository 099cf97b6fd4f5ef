"""Experts from tokens to tokens on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rorqual.comm.fp8 import dequantise, quantise
from rorqual.moe.kernels import fused_experts as kernels
from rorqual.moe.kernels import fused_experts_torch as plain
from rorqual.moe.kernels.fused_experts_torch import ExpertWeights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
FP8 = torch.float8_e4m3fn


def experts(n_slots: int, hidden: int, inner: int, dtype: torch.dtype) -> ExpertWeights:
    torch.manual_seed(n_slots)
    shapes = {"gate_up": (n_slots, 2 * inner, hidden), "down": (n_slots, hidden, inner)}
    if dtype != FP8:
        return ExpertWeights(**{name: (torch.randn(shape, device="cuda") * 0.05).to(dtype) for name, shape in shapes.items()})
    values = {name: (torch.randn(shape, device="cuda") * 30).to(FP8) for name, shape in shapes.items()}
    scales = {name + "_scales": torch.rand(s[0], s[1] // 128, s[2] // 128, device="cuda") * 0.004 + 0.001 for name, s in shapes.items()}
    return ExpertWeights(**values, **scales)


def on_cpu(given: ExpertWeights) -> ExpertWeights:
    """The plain version quantises there: a CUDA tensor by a scalar is not divided to the last bit."""
    return ExpertWeights(**{name: None if value is None else value.cpu() for name, value in vars(given).items()})


def inputs(tokens: int, k: int, n_slots: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    slots = torch.randint(-1, n_slots, (tokens, k), dtype=torch.int32, device="cuda")
    slots[0] = -1
    slots[1:, 0] = 1
    return torch.randn(tokens, hidden, device="cuda").to(dtype), slots, torch.rand(tokens, k, device="cuda")


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("dtype", "config", "limit"),
    [
        (FP8, {"block": 64}, 1e-2),
        (FP8, {"block": 128}, 1e-2),
        (FP8, {"block": 16, "path": "tile"}, 1e-2),
        (torch.bfloat16, {}, 1e-2),
        (torch.float16, {}, 2e-3),
        (torch.float32, {}, 1e-5),
    ],
)
@pytest.mark.parametrize("tokens", [2, 300])
def test_equals_plain_version(tokens: int, dtype: torch.dtype, config: dict[str, Any], limit: float) -> None:
    """FP8: a value of the gated unit beside a tie of e4m3 may round to the other side, so the limit is not that of one product."""
    given = experts(6, 512, 256, dtype)
    x, slots, weights = inputs(tokens, 4, 6, 512, torch.bfloat16 if dtype == FP8 else dtype)
    expected = plain.fused_experts(x.cpu(), slots.cpu(), weights.cpu(), on_cpu(given), out_dtype=torch.float32).cuda()
    out = kernels.fused_experts(x, slots, weights, given, out_dtype=torch.float32, config=config)
    assert error(out, expected) < limit
    assert bool((out[0] == 0).all())
    for _ in range(25):
        assert torch.equal(kernels.fused_experts(x, slots, weights, given, out_dtype=torch.float32, config=config), out)


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float32])
def test_a_token_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    given = experts(6, 512, 256, dtype)
    x, slots, weights = inputs(200, 4, 6, 512, torch.bfloat16 if dtype == FP8 else dtype)
    together = kernels.fused_experts(x, slots, weights, given)
    for t in (0, 1, 63, 64, 199):
        assert torch.equal(kernels.fused_experts(x[t : t + 1], slots[t : t + 1], weights[t : t + 1], given)[0], together[t])


def test_slots_of_other_ranks_add_nothing_and_order_is_by_slot() -> None:
    """Columns in another order give the same bits."""
    given = experts(6, 512, 256, torch.bfloat16)
    x, slots, weights = inputs(40, 4, 6, 512, torch.bfloat16)
    slots = torch.rand(40, 6, device="cuda").argsort(dim=1)[:, :4].int()
    shuffle = torch.tensor([2, 0, 3, 1], device="cuda")
    out = kernels.fused_experts(x, slots, weights, given)
    assert torch.equal(out, kernels.fused_experts(x, slots[:, shuffle].contiguous(), weights[:, shuffle].contiguous(), given))
    here = torch.where(slots < 3, slots, -1)
    there = torch.where(slots >= 3, slots, -1)
    parts = [kernels.fused_experts(x, part.contiguous(), weights, given, out_dtype=torch.float32) for part in (here, there)]
    assert error(parts[0] + parts[1], out) < 1e-2


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [[0, 100, 1, 0, 64, 65], [230, 0, 0, 0, 0, 0]])
def test_arrived_rows(dtype: torch.dtype, sizes: list[int]) -> None:
    given = experts(6, 512, 256, dtype)
    counts = torch.tensor(sizes, device="cuda")
    x = torch.randn(230, 512, device="cuda").to(torch.bfloat16 if dtype == FP8 else dtype)
    expected = plain.grouped_swiglu_device(x.cpu(), counts.cpu(), on_cpu(given)).cuda()
    assert error(kernels.grouped_swiglu_device(x, counts, given), expected) < (1e-5 if dtype == torch.float32 else 1e-2)
    assert torch.equal(kernels.grouped_swiglu_device(x, counts.cpu(), given), kernels.grouped_swiglu_device(x, counts, given))


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
def test_tokens_that_arrive_as_fp8(dtype: torch.dtype) -> None:
    """In rows of a wire: FP8 experts give the bits they give when they quantise the same tokens themselves."""
    given = experts(6, 512, 256, dtype)
    x, slots, weights = inputs(130, 4, 6, 512, torch.bfloat16)
    values, scales = quantise(x)
    wire = torch.full((130, 544), 0x7F, dtype=torch.uint8, device="cuda")
    wire[:, :512], wire[:, 512:528] = values.view(torch.uint8), scales.view(torch.uint8)
    arrived, steps = wire[:, :512].view(torch.float8_e4m3fn), wire[:, 512:528].view(torch.float32)
    out = kernels.fused_experts(arrived, slots, weights, given, x_scales=steps, out_dtype=torch.bfloat16, n_rows=100)
    same = x if dtype == FP8 else dequantise(values, scales, torch.bfloat16)
    assert torch.equal(out, kernels.fused_experts(same, slots, weights, given, n_rows=100))


def test_captured_experts_follow_their_inputs() -> None:
    given = experts(6, 512, 256, FP8)
    x, slots, weights = inputs(64, 4, 6, 512, torch.bfloat16)
    kernels.fused_experts(x, slots, weights, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.fused_experts(x, slots, weights, given)
    for seed in range(3):
        torch.manual_seed(seed)
        fresh = inputs(64, 4, 6, 512, torch.bfloat16)
        for old, new in zip((x, slots, weights), fresh, strict=True):
            old.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, kernels.fused_experts(*fresh, given))
