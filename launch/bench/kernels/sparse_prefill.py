"""Sparse MLA prefill: 2048 queries over 2048 random rows of 65,536 each; FlashMLA is the peer, over the same rows in bf16."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from .case import Call, Case, Runs, Target

_TOKENS, _K, _N_ROWS, _LATENT, _ROPE, _SCALE = 2048, 2048, 65_536, 512, 64, 0.1352
_BYTES = {"fp8": 656, "bf16": 1152}


def cases() -> list[Case]:
    """Heads of a rank at TP 16, 8, 2 and 1. FlashMLA takes 64 or 128 heads and is given padded queries below that."""
    goals = {8: 1.5, 16: 1.5, 64: 0.5, 128: 0.5}
    return [_case(heads, pool, goal) for pool in ("bf16", "fp8") for heads, goal in goals.items() if (heads, pool) != (8, "fp8")]


def _case(heads: int, pool: str, goal: float) -> Case:
    return Case(
        op="sparse_prefill",
        name=f"prefill {_TOKENS}x{_K}, {heads} heads, {pool}",
        params={"tokens": _TOKENS, "heads": heads, "k": _K, "rows": _N_ROWS, "pool": pool},
        build=partial(_build, heads, pool),
        n_bytes=float(_N_ROWS * _BYTES[pool] + _TOKENS * (4 * _K + heads * (2 * _LATENT + _ROPE) * 2)),
        flops=2.0 * _TOKENS * heads * _K * (2 * _LATENT + _ROPE),
        unit="bf16",
        target=Target(peer="flash_mla", ratio=goal),
        tune_shape={"heads": heads, "fp8": False} if pool == "bf16" else None,
    )


def _build(heads: int, kind: str) -> Runs:
    from ....attention.kernels.sparse_attention_torch import evaluate
    from ....attention.kernels.sparse_prefill import Launch, choose, sparse_attention
    from ....attention.kv.layout import encode_latent

    values = torch.randn(_N_ROWS, _LATENT + _ROPE, device="cuda")
    plain = values.to(torch.bfloat16)
    pool = encode_latent(values, _LATENT) if kind == "fp8" else plain
    latent = torch.randn(_TOKENS, heads, _LATENT, device="cuda", dtype=torch.bfloat16) * 0.5
    rope = torch.randn(_TOKENS, heads, _ROPE, device="cuda", dtype=torch.bfloat16) * 0.5
    rows = torch.randint(0, _N_ROWS, (_TOKENS, _K), device="cuda", dtype=torch.int32).sort(-1).values

    def call(launch: Launch | None = None) -> Call:
        return lambda: sparse_attention(latent, rope, pool, rows, scale=_SCALE, launch=launch)

    def check() -> None:
        found, found_lse = call()()
        wanted, lse = evaluate(latent[:4], rope[:4], pool, rows[:4], scale=_SCALE, sink=None, n_keys=None, compute=torch.float64)
        error = (found[:4] - wanted).norm() / wanted.norm()
        assert error < 1e-2, f"relative error {error:.1e}"
        torch.testing.assert_close(found_lse[:4].double(), lse, rtol=1e-4, atol=1e-2)

    usual = choose(latent, rope, pool)
    return Runs(
        ours=call(),
        peers=_peers(torch.cat((latent, rope), -1), plain, rows),
        variants={json.dumps(asdict(launch)): call(launch) for launch in _launches(usual)} if kind == "bf16" else {},
        check=check,
    )


def _launches(usual: Any) -> list[Any]:
    """The usual launch and its neighbours; no other kernel was faster on the shapes these take."""
    if usual.kernel == "tile":
        return [replace(usual, key_block=block, stages=stages) for block in (32, 64) for stages in (2, 3)]
    return [replace(usual, fence=fence) for fence in (False, True)]


def _peers(query: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor) -> dict[str, Call]:
    try:
        from flash_mla import flash_mla_sparse_fwd
    except ImportError:
        return {}
    padded = torch.nn.functional.pad(query, (0, 0, 0, max(0, 64 - query.shape[1]))).contiguous()
    return {"flash_mla": lambda: flash_mla_sparse_fwd(padded, pool[:, None], rows[:, None], _SCALE, _LATENT, use_legacy=True)}
