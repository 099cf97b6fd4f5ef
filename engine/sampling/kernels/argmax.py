"""Greedy sampling as Triton kernels: the likeliest token of every row of logits.

A row is cut into parts, so that a few rows of a large vocabulary occupy the whole GPU; a second launch compares the parts.
Value and token travel as one int64: the value's order in the upper half, the complement of the token in the lower, so that
the maximum is the highest logit and among equal ones the lowest token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ....parallel.kernels.tuned import config_for


@triton.jit
def _keep_best(x, token, best, best_token):
    """Elementwise the higher of x and the best so far; the first NaN stays."""
    x = x.to(tl.float32)
    better = (x > best) | ((x != x) & (best == best))
    return tl.where(better, x, best), tl.where(better, token, best_token)


@triton.jit
def _packed(x, token):
    """int64 in the order of (x, -token): -0.0 like 0.0, NaN above every number."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(key == -1, 0, key)
    key = tl.where(x != x, 0x7FFFFFFF, key)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def argmax_part_kernel(
    logits, stride, vocab, part_size, n_parts, best, tokens,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid (n * n_parts): the best of one part of a row, to ``tokens`` if the part is the whole row, else to ``best``."""
    row = (tl.program_id(0) // n_parts).to(tl.int64)
    part = tl.program_id(0) % n_parts
    begin = part * part_size
    end = tl.minimum(begin + part_size, vocab)
    logits += row * stride
    lane = tl.arange(0, BLOCK)
    best_x = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_token = begin + lane
    # Whole blocks are read without a mask: one that ends anywhere would make the loads narrow. Four are on their way at once.
    size = (end - begin) // BLOCK * BLOCK
    fours = size // (4 * BLOCK) * (4 * BLOCK)
    whole = begin + size
    for start in range(0, fours, 4 * BLOCK):
        token = begin + start + lane
        x0 = tl.load(logits + token)
        x1 = tl.load(logits + token + BLOCK)
        x2 = tl.load(logits + token + 2 * BLOCK)
        x3 = tl.load(logits + token + 3 * BLOCK)
        best_x, best_token = _keep_best(x0, token, best_x, best_token)
        best_x, best_token = _keep_best(x1, token + BLOCK, best_x, best_token)
        best_x, best_token = _keep_best(x2, token + 2 * BLOCK, best_x, best_token)
        best_x, best_token = _keep_best(x3, token + 3 * BLOCK, best_x, best_token)
    for start in range(fours, size, BLOCK):
        token = begin + start + lane
        best_x, best_token = _keep_best(tl.load(logits + token), token, best_x, best_token)
    if whole < end:
        token = whole + lane
        x = tl.load(logits + token, mask=token < end, other=float("-inf"))
        best_x, best_token = _keep_best(x, token, best_x, best_token)
    packed = _packed(best_x, best_token)
    found = tl.max(tl.where(best_token < end, packed, -(2**63)), 0)
    if WHOLE:
        tl.store(tokens + row, 0x7FFFFFFF - (found & 0x7FFFFFFF))
    else:
        tl.store(best + row * n_parts + part, found)


@triton.jit
def argmax_join_kernel(best, n_parts, tokens, WIDTH: tl.constexpr):
    """Grid (n): the best of a row's parts."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, WIDTH)
    found = tl.max(tl.load(best + row * n_parts + part, mask=part < n_parts, other=-(2**63)), 0)
    tl.store(tokens + row, 0x7FFFFFFF - (found & 0x7FFFFFFF))


def greedy_tokens(logits: torch.Tensor, *, config: dict[str, int] | None = None) -> torch.Tensor:
    """The highest logit of every row, the lowest token on ties. NaN is above every number, the first NaN wins (as in numpy).

    Args:
        logits: fp32, bf16 or fp16 [n, V], elements of a row adjacent, rows any number of elements apart.
        config: ``programs`` wanted in all, ``block`` logits read at a time, ``warps``.

    Returns:
        int64 [n].

    Raises:
        ValueError: elements of a row are not adjacent, or there are none.
    """
    n, vocab = logits.shape
    if vocab == 0 or (logits.stride(1) != 1 and vocab > 1):
        raise ValueError(f"greedy tokens need rows of adjacent logits, got {tuple(logits.shape)} strides {logits.stride()}")
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n == 0:
        return tokens
    if config is None:
        config = config_for("argmax", {"programs": 1056, "block": 1024, "warps": 4}, rows=n, vocab=vocab, bits=logits.element_size() * 8)
    blocks = triton.cdiv(vocab, config["block"])
    each = triton.cdiv(blocks, min(blocks, max(1, config["programs"] // n)))  # blocks a part
    n_parts = triton.cdiv(blocks, each)
    whole = n_parts == 1
    best = tokens if whole else torch.empty((n, n_parts), dtype=torch.int64, device=logits.device)
    argmax_part_kernel[(n * n_parts,)](
        logits, logits.stride(0), vocab, each * config["block"], n_parts, best, tokens,
        BLOCK=config["block"], WHOLE=whole, num_warps=config["warps"],
    )  # fmt: skip
    if not whole:
        argmax_join_kernel[(n,)](best, n_parts, tokens, WIDTH=triton.next_power_of_2(n_parts), num_warps=1)
    return tokens
