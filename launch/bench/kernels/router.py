"""Cases of the MoE router, with the mapping to physical slots and the counts, at DeepSeek-V3's shape."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch

from .case import Call, Case, Runs, Target

_E = 256
_V3: dict[str, Any] = {
    "n_group": 8,
    "topk_group": 4,
    "top_k": 8,
    "scoring": "sigmoid",
    "method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def cases() -> list[Case]:
    """A decode batch and a prefill chunk."""
    return [_case(64, Target(us=8.0)), _case(5000, Target(us=32.0)), _case(5000, Target(us=32.0), ways=64)]


def _case(tokens: int, target: Target, ways: int = 1) -> Case:
    return Case(
        op="router",
        name=f"router {tokens} x {_E}" + (f", {ways} ways" if ways > 1 else ""),
        params={"tokens": tokens, "experts": _E} | ({"ways": ways} if ways > 1 else {}),
        build=lambda: _build(tokens, ways),
        n_bytes=tokens * (4.0 * _E + 12 * _V3["top_k"]),
        target=target,
        tune_shape={"tokens": tokens, "experts": _E},
    )


def _build(tokens: int, ways: int) -> Runs:
    from ....moe.kernels import router, router_torch

    logits, bias = torch.randn(tokens, _E, device="cuda"), torch.randn(_E, device="cuda") * 0.1
    mapping = torch.randperm(_E * ways, device="cuda").int().view(_E, ways)
    counts, n_valid = torch.zeros(_E, dtype=torch.int64, device="cuda"), torch.tensor([tokens], dtype=torch.int32, device="cuda")
    given: dict[str, Any] = {**_V3, "expert_to_slot": mapping, "counts": counts, "n_valid": n_valid}

    def ours(config: dict[str, int] | None = None) -> Any:
        return router.route(logits, bias, **given, config=config)

    def check() -> None:
        for got, wanted in zip(ours(), router_torch.route(logits, bias, **given), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)

    configs = [{"tokens": t, "warps": w} for t, w in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8), (16, 8))]
    variants: dict[str, Call] = {json.dumps(config): partial(ours, config) for config in configs}
    return Runs(ours=ours, peers={"torch": lambda: router_torch.route(logits, bias, **given)}, variants=variants, check=check)
