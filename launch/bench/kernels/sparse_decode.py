"""Sparse MLA decode: 2048 rows a token, drawn at random from a pool of several GB; FlashMLA is the peer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from .case import Call, Case, Runs, Target

K, LATENT, ROPE, SCALE = 2048, 512, 64, 0.135
_N_ROWS = 1 << 23  # 5.5 GB of FP8 rows
_DISTINCT = 1 << 16  # rows of the pool are these over and over: making them all takes too long
_BYTES = {"fp8": 656, "bf16": 1152}
Queries = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # latent, rope, rows


def cases() -> list[Case]:
    """Heads of a rank at TP 8, 2 and 1, batches of 1 to 128 tokens; bf16 rows at a few of them."""
    fp8 = [_case(tokens, heads, "fp8") for heads in (16, 64, 128) for tokens in (1, 8, 32, 64, 128)]
    return fp8 + [_case(tokens, heads, "bf16") for heads in (16, 128) for tokens in (8, 64, 128)]


def _target(tokens: int, heads: int, pool: str) -> Target | None:
    if pool != "fp8":
        return None
    if heads == 16:
        return Target(peer="flash_mla", ratio=1.2) if tokens <= 32 else Target(roof=0.5)
    return Target(peer="flash_mla")


def _case(tokens: int, heads: int, pool: str) -> Case:
    return Case(
        op="sparse_decode",
        name=f"decode {tokens}x{K}, {heads} heads, {pool}",
        params={"tokens": tokens, "heads": heads, "k": K, "pool": pool},
        build=partial(_build, tokens, heads, pool),
        n_bytes=float(tokens * (K * (_BYTES[pool] + 4) + heads * (2 * LATENT + ROPE) * 2)),
        flops=2.0 * tokens * heads * K * (2 * LATENT + ROPE),
        unit="bf16",
        target=_target(tokens, heads, pool),
        tune_shape={"tokens": tokens, "heads": heads, "k": K, "width": LATENT, "pool": "uint8" if pool == "fp8" else "bfloat16"},
    )


def _build(tokens: int, heads: int, kind: str) -> Runs:
    from ....attention.kernels import sparse_attention_torch as plain
    from ....attention.kernels.sparse_decode import DecodeConfig, plan, sparse_attention
    from ....attention.kv.layout import encode_latent

    values = torch.randn(_DISTINCT, LATENT + ROPE, device="cuda")
    some = encode_latent(values, LATENT) if kind == "fp8" else values.to(torch.bfloat16)
    pool = some.repeat(_N_ROWS // _DISTINCT, 1)
    sets = [_queries(tokens, heads) for _ in range(max(2, min(8, 256 // tokens)))]

    def call(queries: Queries, config: DecodeConfig | None = None) -> Call:
        return lambda: sparse_attention(queries[0], queries[1], pool, queries[2], scale=SCALE, config=config)

    def check() -> None:
        found, found_lse = call(sets[0])()
        few = [tensor[:4] for tensor in sets[0]]
        wanted, lse = plain.sparse_attention(few[0], few[1], pool, few[2], scale=SCALE)
        error = (found[:4].double() - wanted.double()).norm() / wanted.double().norm()
        assert error < 1e-2, f"relative error {error:.1e}"
        torch.testing.assert_close(found_lse[:4], lse, rtol=1e-4, atol=1e-2)

    usual = plan(tokens, heads, K, LATENT, ROPE, torch.bfloat16, pool.dtype, True)
    return Runs(
        ours=call(sets[0]),
        peers=_peers(sets[0], pool) if kind == "fp8" else {},
        variants={json.dumps(asdict(config)): call(sets[0], config) for config in _configs(usual)},
        check=check,
        rotate=[call(queries) for queries in sets[1:]],
    )


def _queries(tokens: int, heads: int) -> Queries:
    latent = torch.randn(tokens, heads, LATENT, device="cuda", dtype=torch.bfloat16)
    rope = torch.randn(tokens, heads, ROPE, device="cuda", dtype=torch.bfloat16)
    return latent.mul_(0.3), rope.mul_(0.3), torch.randint(0, _N_ROWS, (tokens, K), device="cuda").int()


def _configs(usual: Any) -> list[Any]:
    """The usual launch, with other numbers of splits."""
    splits = sorted({1, 2, 4, 8, 16, 32} | {usual.splits})
    near = [split for split in splits if usual.splits // 2 <= split <= usual.splits * 2]
    return [replace(usual, splits=split) for split in near]


def _peers(queries: Queries, pool: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """FlashMLA with the same inputs; fewer than 64 heads are padded to 64, which is the least it takes."""
    try:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata
    except ImportError:
        return {}
    query = torch.cat(queries[:2], -1)
    query = torch.nn.functional.pad(query, (0, 0, 0, max(0, 64 - query.shape[1])))[:, None].contiguous()
    cache = pool.view(-1, 64, 1, pool.shape[1])
    rows = queries[2][:, None].contiguous()
    meta, _ = get_mla_metadata()
    options = {"softmax_scale": SCALE, "is_fp8_kvcache": True, "indices": rows, "use_legacy": True}
    return {"flash_mla": lambda: flash_mla_with_kvcache(query, cache, None, None, LATENT, meta, **options)}
