"""Grouped products of DeepSeek-V3's experts: FP8 beside DeepGEMM at the same rows, padding included; bf16 beside torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .case import Call, Case, Runs, Target
from .experts_input import HIDDEN, INNER, TOP_K, expert_weights, skewed_slots, used_slots

SHAPES = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}


@dataclass(frozen=True, kw_only=True)
class _Shape:
    name: str
    tokens: int
    n_slots: int
    block: int
    fp8: bool = True


def _operands(shape: _Shape) -> tuple[Any, ...]:
    """(a, its scales, b, its scales, layout); padding rows are zeros."""
    from ....moe.kernels.permute import permute
    from ....moe.kernels.permute_rows import permute_rows

    n, k = SHAPES[shape.name]
    layout = permute(skewed_slots(shape.tokens, shape.n_slots).cuda(), shape.n_slots, block=shape.block)
    a, a_scales = permute_rows(torch.randn(shape.tokens, k, device="cuda", dtype=torch.bfloat16), layout, quantise=shape.fp8)
    a.view(torch.uint8)[layout.sorted_index < 0] = 0
    if not shape.fp8:
        return a, None, torch.randn(shape.n_slots, n, k, device="cuda", dtype=torch.bfloat16), None, layout
    assert a_scales is not None
    a_scales[layout.sorted_index < 0] = 1
    experts = expert_weights(shape.n_slots)
    b, b_scales = (experts.gate_up, experts.gate_up_scales) if shape.name == "gate_up" else (experts.down, experts.down_scales)
    return a, a_scales, b, b_scales, layout


def _deep_gemm(a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, layout: Any) -> dict[str, Call]:
    try:
        import deep_gemm
    except ImportError:
        return {}
    n = int(layout.n_blocks) * layout.block
    slots = layout.block_slot.repeat_interleave(layout.block)[:n].contiguous()
    scales = deep_gemm.get_mn_major_tma_aligned_tensor(a_scales[:n].contiguous())
    out = torch.empty((n, b.shape[1]), dtype=torch.bfloat16, device=a.device)
    return {"deep_gemm": lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a[:n], scales), (b, b_scales), out, slots)}


def _torch(a: torch.Tensor, b: torch.Tensor, layout: Any) -> dict[str, Call]:
    n = int(layout.n_blocks) * layout.block
    ends = layout.offsets[1:].contiguous()
    call = partial(torch._grouped_mm, a[:n], b.transpose(1, 2), offs=ends)
    try:
        call()
    except (RuntimeError, ValueError):
        return {}
    return {"torch": call}


def _build(shape: _Shape) -> Callable[[], Runs]:
    def build() -> Runs:
        from ....moe.kernels import grouped_gemm, grouped_gemm_torch

        a, a_scales, b, b_scales, layout = _operands(shape)

        def run() -> torch.Tensor:
            return grouped_gemm.grouped_gemm(a, b, layout, a_scales=a_scales, b_scales=b_scales)

        def check() -> None:
            tables = {name: getattr(layout, name)[:16] for name in ("block_slot", "block_row", "block_rows")}
            few = replace(layout, **tables)
            real = (layout.sorted_index >= 0).nonzero()[:, 0]
            real = real[real < int(tables["block_row"].max()) + shape.block]
            expected = grouped_gemm_torch.grouped_gemm(a, b, few, a_scales=a_scales, b_scales=b_scales)[real].float()
            assert float((run()[real].float() - expected).norm() / expected.norm()) < 1e-2

        peers: dict[str, Call] = {}
        if shape.block == 128:
            peers = _deep_gemm(a, a_scales, b, b_scales, layout) if shape.fp8 else _torch(a, b, layout)
        return Runs(ours=run, peers=peers, check=check)

    return build


def _case(shape: _Shape) -> Case:
    n, k = SHAPES[shape.name]
    target = Target(roof=0.75)
    if shape.block == 128:
        target = Target(peer="deep_gemm", ratio=0.6) if shape.fp8 else Target(peer="torch", ratio=0.6)
    return Case(
        op="grouped_gemm",
        name=f"{shape.name} {shape.tokens} tokens over {shape.n_slots}" + ("" if shape.fp8 else " bf16"),
        params={"tokens": shape.tokens, "slots": shape.n_slots, "N": n, "K": k, "block": shape.block},
        build=_build(shape),
        n_bytes=used_slots(shape.tokens, shape.n_slots) * n * k * (1 if shape.fp8 else 2),
        flops=2.0 * shape.tokens * TOP_K * n * k,
        unit="fp8" if shape.fp8 else "bf16",
        graph=shape.block < 128,
        target=target,
    )


def cases() -> list[Case]:
    """Prefill of 4096 tokens at 128-row blocks, and decode."""
    made = [_case(_Shape(name="gate_up", tokens=4096, n_slots=32, block=128, fp8=False))]
    for name in SHAPES:
        made += [
            _case(_Shape(name=name, tokens=4096, n_slots=256, block=128)),
            _case(_Shape(name=name, tokens=64, n_slots=256, block=16)),
            _case(_Shape(name=name, tokens=64, n_slots=32, block=64)),
        ]
    return made
