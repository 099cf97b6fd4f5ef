"""Expanded attention over ragged requests, and the rows it is expanded from, in plain PyTorch."""

from __future__ import annotations

import torch

from ..kv.layout import decode_latent, fp8_latent_bytes

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def varlen_attention(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    max_query: int,
    max_key: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of every request's queries over its own keys: (out [T, H, v] in q's dtype, lse fp32 [T, H]).

    Args:
        q: [T, H, nope + rope] bf16, fp16 or fp32; RoPE values last. Of all operands only the last dimension must be contiguous.
        k_nope: [S, H, nope] of the same dtype.
        k_rope: [S, rope], shared by the heads.
        v: [S, H, v].
        query_start, key_start: int32 [R + 1], where each request's queries and keys begin, and where the last ones end.
        scale: factor of the scores, positive.
        causal: query i of a request with m queries and n keys sees its first n - m + i + 1 keys; else all.
        max_query, max_key: host bounds of a request's queries and keys.

    lse is the natural log of the sum of exp(scale * score); a query without keys has -inf, and output 0.

    Raises:
        ValueError: shapes or dtypes do not fit each other.

    Source: multi-head latent attention in expanded form, arXiv:2405.04434 section 2.1.
    """
    out, lse = evaluate_varlen(q, k_nope, k_rope, v, query_start, key_start, scale=scale, causal=causal, compute=torch.float32)
    return out.to(q.dtype), lse


def evaluate_varlen(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``varlen_attention`` computed in ``compute`` (float32 or float64), which is also the dtype of both results."""
    check_varlen(q, k_nope, k_rope, v, query_start, key_start)
    out = torch.zeros((q.shape[0], q.shape[1], v.shape[2]), dtype=compute, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=compute, device=q.device)
    nope = k_nope.shape[2]
    queries, keys = query_start.tolist(), key_start.tolist()
    for r in range(len(queries) - 1):
        mine, theirs = slice(queries[r], queries[r + 1]), slice(keys[r], keys[r + 1])
        m, n = queries[r + 1] - queries[r], keys[r + 1] - keys[r]
        if m == 0 or n == 0:
            continue
        wide = q[mine].to(compute).transpose(0, 1)
        scores = torch.bmm(wide[..., :nope], k_nope[theirs].to(compute).permute(1, 2, 0))
        scores = (scores + wide[..., nope:] @ k_rope[theirs].to(compute).T) * scale
        if causal:
            hidden = torch.arange(n, device=q.device) > torch.arange(n - m, n, device=q.device)[:, None]
            scores.masked_fill_(hidden, float("-inf"))
        total = torch.logsumexp(scores, -1)
        weights = (scores - total.masked_fill(total == float("-inf"), 0.0)[..., None]).exp()
        out[mine] = torch.bmm(weights, v[theirs].to(compute).transpose(0, 1)).transpose(0, 1)
        lse[mine] = total.T
    return out, lse


def check_varlen(
    q: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, v: torch.Tensor, query_start: torch.Tensor, key_start: torch.Tensor
) -> None:
    """Refuse operands of ``varlen_attention`` that do not fit each other; reads shapes, dtypes and strides only.

    Raises:
        ValueError: naming the argument, what was found and what would be valid.
    """
    if q.dtype not in _FLOATS or any(t.dtype != q.dtype for t in (k_nope, k_rope, v)):
        found = [str(t.dtype) for t in (q, k_nope, k_rope, v)]
        raise ValueError(f"q, k_nope, k_rope and v are {', '.join(found)}; give all the same of float32, bfloat16, float16")
    keys, heads, nope = k_nope.shape
    if q.dim() != 3 or q.shape[1:] != (heads, nope + k_rope.shape[-1]):
        raise ValueError(f"q is {list(q.shape)}; k_nope and k_rope ask for [T, {heads}, {nope + k_rope.shape[-1]}]")
    if k_rope.dim() != 2 or len(k_rope) != keys or v.dim() != 3 or v.shape[:2] != (keys, heads):
        raise ValueError(f"k_rope is {list(k_rope.shape)}, v {list(v.shape)}; k_nope asks for [{keys}, rope] and [{keys}, {heads}, v]")
    if any(t.stride(-1) != 1 for t in (q, k_nope, k_rope, v)):
        raise ValueError("the last dimension of q, k_nope, k_rope and v must be contiguous; call .contiguous() on them")
    for name, start in (("query_start", query_start), ("key_start", key_start)):
        if start.dtype != torch.int32 or start.dim() != 1 or start.shape != query_start.shape or len(start) < 1:
            raise ValueError(f"{name} is {start.dtype} {list(start.shape)}; give int32 [requests + 1], the same for queries and keys")


def gather_latent(pool: torch.Tensor, rows: torch.Tensor, latent: int, rope: int, dtype: torch.dtype) -> torch.Tensor:
    """Pool rows as [S, latent + rope] in ``dtype``, FP8 rows multiplied by their scales.

    ``pool`` is uint8 [n_rows, fp8 bytes] or [n_rows, latent + rope] float; ``rows`` int32 [S], and a value < 0 or >= n_rows gives zeros.

    Raises:
        ValueError: the pool's width does not fit ``latent`` and ``rope``, or ``rows`` is not int32 [S].
    """
    check_gather(pool, rows, latent, rope)
    there = (rows >= 0) & (rows < len(pool))
    if len(pool) == 0:
        return torch.zeros((len(rows), latent + rope), dtype=dtype, device=pool.device)
    taken = pool[torch.where(there, rows, 0).long()]
    wide = decode_latent(taken, latent) if pool.dtype == torch.uint8 else taken
    return wide.masked_fill(~there[:, None], 0.0).to(dtype)


def check_gather(pool: torch.Tensor, rows: torch.Tensor, latent: int, rope: int) -> None:
    """Refuse a pool or row list that does not fit; reads shapes and dtypes only.

    Raises:
        ValueError: naming the argument, what was found and what would be valid.
    """
    width = fp8_latent_bytes(latent, rope) if pool.dtype == torch.uint8 else latent + rope
    if pool.dtype not in (torch.uint8, *_FLOATS) or pool.dim() != 2 or pool.shape[1] != width:
        raise ValueError(
            f"pool is {pool.dtype} {list(pool.shape)}; give uint8 [n_rows, {fp8_latent_bytes(latent, rope)}] "
            f"or float32, bfloat16, float16 [n_rows, {latent + rope}]"
        )
    if pool.stride(1) != 1:
        raise ValueError("the last dimension of pool must be contiguous; call .contiguous() on it")
    if rows.dtype != torch.int32 or rows.dim() != 1:
        raise ValueError(f"rows is {rows.dtype} {list(rows.shape)}; give int32 [S]")
