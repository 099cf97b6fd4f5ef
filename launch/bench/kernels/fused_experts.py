"""All of a rank's experts, tokens in and tokens out, against the bytes of the experts that are asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .case import Call, Case, Runs, Target
from .experts_input import HIDDEN, INNER, TOP_K, expert_weights, skewed_slots, used_slots

CONFIGS: list[dict[str, Any]] = [{"block": 16, "first": {"num_stages": 2}}, {"block": 64}]


def _build(tokens: int, n_slots: int) -> Callable[[], Runs]:
    def build() -> Runs:
        from ....moe.kernels import fused_experts, fused_experts_torch

        experts = expert_weights(n_slots)
        slots = skewed_slots(tokens, n_slots).cuda()
        weights = torch.rand(tokens, TOP_K, device="cuda")
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)

        def run(config: dict[str, Any] | None = None) -> torch.Tensor:
            return fused_experts.fused_experts(x, slots, weights, experts, config=config)

        def check() -> None:
            few = slice(0, 8)
            expected = fused_experts_torch.fused_experts(x[few], slots[few], weights[few], experts).float()
            assert float((run()[few].float() - expected).norm() / expected.norm()) < 3e-2  # torch on CUDA quantises a last bit otherwise

        variants: dict[str, Call] = {json.dumps(config): partial(run, config) for config in CONFIGS}
        return Runs(ours=run, variants=variants, check=check)

    return build


def cases() -> list[Case]:
    """Decode of 1 to 128 tokens over all 256 experts or one rank's 32, and a prefill of 4096."""
    made = []
    for tokens, n_slots in ((1, 256), (8, 256), (64, 256), (128, 256), (4096, 256), (64, 32)):
        made.append(
            Case(
                op="fused_experts",
                name=f"{tokens} tokens over {n_slots}",
                params={"tokens": tokens, "slots": n_slots, "hidden": HIDDEN, "inner": INNER},
                build=_build(tokens, n_slots),
                n_bytes=used_slots(tokens, n_slots) * 3 * INNER * HIDDEN,
                flops=6.0 * tokens * TOP_K * INNER * HIDDEN,
                unit="fp8",
                graph=tokens < 1024,
                target=Target(roof=0.75) if tokens <= 128 else None,
                tune_shape={
                    "rows": tokens * TOP_K,
                    "slots": n_slots,
                    "hidden": HIDDEN,
                    "inner": INNER,
                    "dtype": "float8_e4m3fn",
                },  # fmt: skip
            )
        )
    return made
