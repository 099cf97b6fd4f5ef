"""Dense MLA decode over a paged cache of bf16 or FP8 rows; FlashMLA's dense kernel over bf16 rows is the peer."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from .case import Call, Case, Runs, Target

_LATENT, _ROPE, _PAGE, _SCALE = 512, 64, 64, 0.1352
_BYTES = {"fp8": 656, "bf16": 1152}


def cases() -> list[Case]:
    """Heads of a rank at TP 8, 2 and 1; many short and fewer long requests, one alone, and two tokens a request."""
    rows = [_case(batch, context, heads, "bf16") for batch, context in ((128, 4096), (32, 32_768)) for heads in (16, 64, 128)]
    rows += [_case(128, 4096, heads, "fp8") for heads in (16, 128)]
    return [*rows, _case(1, 4096, 16, "bf16"), _case(64, 4096, 16, "bf16", queries=2)]


def _case(batch: int, context: int, heads: int, pool: str, queries: int = 1) -> Case:
    tokens = batch * queries
    bf16 = pool == "bf16"
    return Case(
        op="dense_decode",
        name=f"dense decode {batch}x{context}, {heads} heads, {pool}" + (f", {queries} tokens each" if queries > 1 else ""),
        params={"batch": batch, "context": context, "heads": heads, "pool": pool, "queries": queries},
        build=partial(_build, batch, context, heads, pool, queries),
        n_bytes=float(batch * context * _BYTES[pool] + tokens * heads * (2 * _LATENT + _ROPE) * 2),
        flops=2.0 * tokens * heads * context * (2 * _LATENT + _ROPE),
        unit="bf16",
        target=Target(peer="flash_mla", ratio=1.0 if heads == 16 else 0.7) if bf16 else None,
        tune_shape={"rows": min(64, heads * queries), "heads": heads, "fp8": not bf16},
    )


def _build(batch: int, context: int, heads: int, kind: str, queries: int) -> Runs:
    from ....attention.kernels.dense_decode import DecodeLaunch, choose_decode, dense_decode
    from ....attention.kernels.dense_decode_torch import evaluate_dense
    from ....attention.kv.layout import encode_latent

    tokens, pages = batch * queries, context // _PAGE
    pool = _rows(batch * context)
    if kind == "fp8":
        pool = torch.cat([encode_latent(part, _LATENT) for part in torch.split(pool, 1 << 16)])
    latent = torch.randn(tokens, heads, _LATENT, device="cuda", dtype=torch.bfloat16) * 0.5
    rope = torch.randn(tokens, heads, _ROPE, device="cuda", dtype=torch.bfloat16) * 0.5
    table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    token_row = torch.arange(batch, device="cuda").repeat_interleave(queries)
    limit = context - queries + 1 + torch.arange(queries, device="cuda", dtype=torch.int32).repeat(batch)
    where: dict[str, Any] = {"page_size": _PAGE, "scale": _SCALE, "max_context": context}

    def call(launch: DecodeLaunch | None = None) -> Call:
        return lambda: dense_decode(latent, rope, pool, table, token_row, limit, **where, max_query=queries, launch=launch)

    def check() -> None:
        few = slice(0, min(tokens, 4))
        found, found_lse = call()()
        some = (latent[few], rope[few], pool, table, token_row[few], limit[few], _PAGE, _SCALE, context)
        wanted, lse = evaluate_dense(*some, torch.float64)
        error = (found[few] - wanted).norm() / wanted.norm()
        assert error < 1e-2, f"relative error {error:.1e}"
        torch.testing.assert_close(found_lse[few].double(), lse, rtol=1e-4, atol=1e-2)

    usual = choose_decode(latent, rope, pool, queries)
    variants = [replace(usual, programs=n, fence=fence) for n in (132, 264) for fence in (False, True)]
    query = torch.cat((latent, rope), -1).view(batch, queries, heads, -1)
    return Runs(
        ours=call(),
        peers=_peers(query, pool, table, limit[queries - 1 :: queries].contiguous()) if kind == "bf16" else {},
        variants={json.dumps(asdict(launch)): call(launch) for launch in variants},
        check=check,
    )


def _rows(count: int) -> torch.Tensor:
    """bf16 rows, made piece by piece: torch's normal numbers pass through fp32."""
    pool = torch.empty(count, _LATENT + _ROPE, device="cuda", dtype=torch.bfloat16)
    for part in torch.split(pool, 1 << 16):
        part.normal_()
    return pool


def _peers(query: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> dict[str, Call]:
    try:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata
    except ImportError:
        return {}
    cache = pool.view(-1, _PAGE, 1, pool.shape[1])
    meta, _ = get_mla_metadata()
    options = {"softmax_scale": _SCALE, "causal": query.shape[1] > 1, "use_legacy": True}
    return {"flash_mla": lambda: flash_mla_with_kvcache(query, cache, table, lengths, _LATENT, meta, **options)}
