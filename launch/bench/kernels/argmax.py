"""Cases of greedy sampling over DeepSeek-V3's vocabulary. The floor is one read of the logits."""

from __future__ import annotations

import json
from itertools import product

import torch

from .case import Call, Case, Runs, Target

_VOCAB = 129_280


def cases() -> list[Case]:
    """One row to a large decode batch, fp32 and bf16."""
    targets = {1: Target(us=8.0), 64: Target(roof=0.6), 256: Target(roof=0.7)}
    return [_case(n, dtype, target) for n, target in targets.items() for dtype in (torch.float32, torch.bfloat16)]


def _case(n: int, dtype: torch.dtype, target: Target) -> Case:
    name = str(dtype).removeprefix("torch.")
    return Case(
        op="argmax",
        name=f"argmax {n} x {_VOCAB} {name}",
        params={"rows": n, "vocab": _VOCAB, "dtype": name},
        build=lambda: _build(n, dtype),
        n_bytes=float(n * _VOCAB * dtype.itemsize),
        target=target,
        tune_shape={"rows": n, "vocab": _VOCAB, "bits": dtype.itemsize * 8},
    )


def _build(n: int, dtype: torch.dtype) -> Runs:
    from ....engine.sampling.kernels import argmax, argmax_torch

    copies = max(1, min(16, (192 << 20) // (n * _VOCAB * dtype.itemsize)))  # past the L2
    rows = [torch.randn(n, _VOCAB, device="cuda").to(dtype) for _ in range(copies)]

    def call(x: torch.Tensor, config: dict[str, int] | None = None) -> Call:
        return lambda: argmax.greedy_tokens(x, config=config)

    def check() -> None:
        assert torch.equal(argmax.greedy_tokens(rows[0]), argmax_torch.greedy_tokens(rows[0].cpu()).cuda()), "not the first highest logit"

    shapes = product((528, 1056, 2112), ((1024, 4), (2048, 4), (4096, 8)))
    configs = [{"programs": p, "block": b, "warps": w} for p, (b, w) in shapes]
    variants = {json.dumps(config): call(rows[0], config) for config in configs}
    peers: dict[str, Call] = {"torch": lambda: torch.argmax(rows[0], dim=-1)}
    return Runs(ours=call(rows[0]), peers=peers, variants=variants, check=check, rotate=[call(x) for x in rows[1:]])
