"""Which kernel runs sparse attention, by heads, queries and row format: variants for ``bench tune`` alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from .case import Call, Case, Runs

_KEYS, _POOL = 2048, 1 << 20


def cases() -> list[Case]:
    """Every shape at which another kernel may win."""
    shapes = [(h, t, f) for h in (16, 64, 128) for t in (1, 8, 32, 64, 128, 256, 512, 2048) for f in (True, False)]
    return [_case(heads, tokens, fp8) for heads, tokens, fp8 in shapes]


def _case(heads: int, tokens: int, fp8: bool) -> Case:
    shape = {"heads": heads, "tokens": tokens, "fp8": fp8}
    return Case(
        op="sparse_attention",
        name=f"h{heads} {tokens} queries {'fp8' if fp8 else 'bf16'}",
        params=shape,
        build=lambda: _runs(heads, tokens, fp8),
        n_bytes=tokens * _KEYS * (656.0 if fp8 else 1152.0),
        tune_shape=shape,
        tune_only=True,
    )


def _runs(heads: int, tokens: int, fp8: bool) -> Runs:
    from ....attention.kernels import sparse_decode, sparse_prefill
    from ....attention.kernels.sparse_attention import fastest

    latent = torch.randn(tokens, heads, 512, device="cuda", dtype=torch.bfloat16)
    rope = torch.randn(tokens, heads, 64, device="cuda", dtype=torch.bfloat16)
    pool = _pool(fp8)
    spread = _POOL if tokens <= 256 else 1 << 16  # neighbouring queries of a long prompt share their rows
    rows = torch.randint(0, spread, (tokens, _KEYS), device="cuda", dtype=torch.int32)

    def call(run: Callable[..., Any]) -> Call:
        return lambda: run(latent, rope, pool, rows, scale=0.07)

    names: dict[str, Callable[..., Any]] = {"decode": sparse_decode.sparse_attention, "prefill": sparse_prefill.sparse_attention}
    if find_spec("flash_mla") is not None:
        from ....attention.kernels.flash_mla import sparse_attention as theirs

        names["flash_mla"] = theirs
    return Runs(ours=call(fastest), variants={json.dumps({"kernel": name}): call(run) for name, run in names.items()})


def _pool(fp8: bool) -> torch.Tensor:
    if not fp8:
        return torch.randn(_POOL, 576, device="cuda", dtype=torch.bfloat16)
    from ....attention.kv.layout import encode_latent

    pool = torch.empty(_POOL, 656, device="cuda", dtype=torch.uint8)
    for start in range(0, _POOL, 1 << 16):
        pool[start : start + (1 << 16)] = encode_latent(torch.randn(1 << 16, 576, device="cuda"), 512)
    return pool
