"""Attention over selected latent rows, in plain PyTorch: what the sparse decode and sparse prefill kernels compute."""

from __future__ import annotations

import torch

from ..kv.layout import decode_latent, fp8_latent_bytes

_BUDGET = 1 << 26  # elements of gathered rows held at a time
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def sparse_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    *,
    scale: float,
    sink: torch.Tensor | None = None,
    n_keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every query attends the pool rows it names: (out [T, H, C] in q's dtype, lse fp32 [T, H]).

    Args:
        q_latent: [T, H, C] bf16, fp16 or fp32, absorbed queries; last dimension contiguous.
        q_rope: [T, H, R] of the same dtype, rotated.
        pool: FP8 rows, uint8 [n_rows, C + 4 * ceil(C / 128) + 2 * R] (e4m3 latent, fp32 scales, bf16 RoPE key), or
            [n_rows, C + R] bf16, fp16 or fp32. The first C values of a row are key and value.
        rows: int32 [T, k]; a value < 0 or >= n_rows is no key and may stand anywhere.
        scale: factor of the scores.
        sink: fp32 [H], a logit per head that joins the denominator only.
        n_keys: int32 [T]; columns of ``rows`` from n_keys[t] on are no keys.

    lse is the natural log of the sum of exp(scale * score), without the sink; a query without keys has -inf, and output 0.
    Rows that no query names have no influence, whatever they hold.

    Raises:
        ValueError: shapes or dtypes do not fit each other.

    Source: absorbed multi-head latent attention, arXiv:2405.04434 section 2.1; sparse selection, arXiv:2512.02556.
    """
    out, lse = evaluate(q_latent, q_rope, pool, rows, scale=scale, sink=sink, n_keys=n_keys, compute=torch.float32)
    return out.to(q_latent.dtype), lse


def evaluate(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    *,
    scale: float,
    sink: torch.Tensor | None,
    n_keys: torch.Tensor | None,
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sparse_attention`` computed in ``compute`` (float32 or float64), which is also the dtype of both results."""
    check_arguments(q_latent, q_rope, pool, rows, sink=sink, n_keys=n_keys)
    tokens, heads, latent = q_latent.shape
    step = max(1, _BUDGET // max(1, rows.shape[1] * (latent + q_rope.shape[2] + heads)))
    out = torch.empty((tokens, heads, latent), dtype=compute, device=q_latent.device)
    lse = torch.empty((tokens, heads), dtype=compute, device=q_latent.device)
    for start in range(0, tokens, step):
        here = slice(start, start + step)
        valid = (rows[here] >= 0) & (rows[here] < len(pool))
        if n_keys is not None:
            valid &= torch.arange(rows.shape[1], device=rows.device) < n_keys[here, None]
        keys = _gather(pool, rows[here], valid, latent, compute)
        queries = torch.cat((q_latent[here], q_rope[here]), -1).to(compute)
        scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scale).masked_fill_(~valid[:, None], float("-inf"))
        lse[here] = torch.logsumexp(scores, -1)
        total = lse[here] if sink is None else torch.logaddexp(lse[here], sink.to(compute)[None])
        weights = (scores - total.masked_fill(total == float("-inf"), 0.0)[..., None]).exp()
        out[here] = torch.bmm(weights, keys[:, :, :latent])
    return out, lse


def _gather(pool: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, latent: int, compute: torch.dtype) -> torch.Tensor:
    """[t, k, C + R] of the valid rows, 0 for the others."""
    tokens, k = rows.shape
    pool = pool if len(pool) else pool.new_zeros((1, pool.shape[1]))
    taken = pool[rows.clamp(0, len(pool) - 1).long().reshape(-1)]
    wide = decode_latent(taken, latent) if pool.dtype == torch.uint8 else taken
    return wide.to(compute).view(tokens, k, wide.shape[1]).masked_fill_(~valid[..., None], 0.0)


def check_arguments(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    *,
    sink: torch.Tensor | None,
    n_keys: torch.Tensor | None,
) -> None:
    """Refuse arguments of ``sparse_attention`` that do not fit each other; reads shapes, dtypes and strides only.

    Raises:
        ValueError: naming the argument, what was found and what would be valid.
    """
    tokens, heads, latent = q_latent.shape
    rope = q_rope.shape[2]
    if q_latent.dtype not in _FLOATS or q_rope.dtype != q_latent.dtype:
        raise ValueError(
            f"q_latent and q_rope are {q_latent.dtype} and {q_rope.dtype}; both must be the same of float32, bfloat16, float16"
        )
    if q_rope.shape[:2] != (tokens, heads):
        raise ValueError(f"q_rope is {list(q_rope.shape)}, q_latent {list(q_latent.shape)}; give both the same tokens and heads")
    if q_latent.stride(2) != 1 or q_rope.stride(2) != 1:
        raise ValueError("the last dimension of q_latent and q_rope must be contiguous; call .contiguous() on them")
    if rows.dtype != torch.int32 or rows.dim() != 2 or len(rows) != tokens or (rows.shape[1] > 1 and rows.stride(1) != 1):
        raise ValueError(f"rows is {rows.dtype} {list(rows.shape)}; give int32 [{tokens}, k] with a contiguous last dimension")
    width = fp8_latent_bytes(latent, rope) if pool.dtype == torch.uint8 else latent + rope
    if pool.dtype not in (torch.uint8, *_FLOATS) or pool.dim() != 2 or pool.shape[1] != width:
        raise ValueError(
            f"pool is {pool.dtype} {list(pool.shape)}; give uint8 [n_rows, {fp8_latent_bytes(latent, rope)}] "
            f"or float32, bfloat16, float16 [n_rows, {latent + rope}]"
        )
    if pool.shape[1] > 0 and pool.stride(1) != 1:
        raise ValueError("the last dimension of pool must be contiguous; call .contiguous() on it")
    if sink is not None and (sink.dtype != torch.float32 or sink.shape != (heads,)):
        raise ValueError(f"sink is {sink.dtype} {list(sink.shape)}; give float32 [{heads}]")
    if n_keys is not None and (n_keys.dtype != torch.int32 or n_keys.shape != (tokens,)):
        raise ValueError(f"n_keys is {n_keys.dtype} {list(n_keys.shape)}; give int32 [{tokens}]")
