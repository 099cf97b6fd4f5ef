"""Choice of experts in one Triton launch: scores, group limit, top-k, weights, physical slots and counts (``moe/router.py``).

Scores are compared as int32 keys in the order of the floats. A program takes a few tokens, as many experts wide as there are,
so that every maximum is found inside a warp. The chosen experts are a mask over experts; their rank in it is their place in
the output, which puts ids in ascending order without a sort.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from ...parallel.kernels.overlap import early_start, enter
from ...parallel.kernels.tuned import config_for

_NONE = tl.constexpr(-(2**31))  # below the key of every score
_KEY_OF_NEG_INF = tl.constexpr(-(2**31) + 0x7FFFFF)


@triton.jit
def _keys(x):
    """int32 in the order of fp32: -0.0 like 0.0, NaN above everything (as torch sorts it)."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(key == -1, 0, key)
    return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit
def _value(key):
    """The score of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _scores(logits, real, SIGMOID: tl.constexpr, LIBDEVICE: tl.constexpr):
    """Scores of logits [T, E], to the last bit those of ``torch.sigmoid`` where ``LIBDEVICE`` can be had."""
    if SIGMOID:
        e = libdevice.exp(-logits) if LIBDEVICE else tl.exp(-logits)
        return tl.math.div_rn(1.0, 1.0 + e)
    logits = tl.where(real, logits, float("-inf"))
    x = logits - tl.max(logits, 1)[:, None]
    e = libdevice.exp(x) if LIBDEVICE else tl.exp(x)
    return tl.math.div_rn(e, tl.sum(e, 1)[:, None])


@triton.jit
def _way(row, WAYS: tl.constexpr):
    """``moe.ways.way_of_rows``."""
    mixed = row.to(tl.uint32) * 0x9E3779B1
    return ((mixed >> 16) * WAYS >> 16).to(tl.int32)


@triton.jit
def _limit_groups(keys, fill, GROUPS: tl.constexpr, PADDED: tl.constexpr, KEPT: tl.constexpr, TWO_BEST: tl.constexpr):
    """Keys [T, PADDED groups of experts], those outside the ``KEPT`` best groups replaced by ``fill``.

    A group counts its best expert or the sum of its two best.
    """
    tokens: tl.constexpr = keys.shape[0]
    size: tl.constexpr = keys.shape[1] // PADDED
    grouped = tl.reshape(keys, (tokens, PADDED, size))
    best = tl.max(grouped, 2)
    if TWO_BEST:
        place = tl.arange(0, size)[None, None, :]
        first = tl.min(tl.where(grouped == best[:, :, None], place, size), 2)
        second = tl.max(tl.where(place == first[:, :, None], _NONE, grouped), 2)
        best = _keys(_value(best) + _value(second))
    group = tl.arange(0, PADDED)
    best = tl.where((group < GROUPS)[None, :], best, _NONE)
    better = best[:, None, :] > best[:, :, None]
    earlier = (best[:, None, :] == best[:, :, None]) & (group[None, None, :] < group[None, :, None])
    rank = tl.sum((better | earlier).to(tl.int32), 2)
    return tl.reshape(tl.where((rank < KEPT)[:, :, None] | (grouped == _NONE), grouped, fill), (tokens, keys.shape[1]))


@triton.jit(do_not_specialize=["n_tokens"])
def route_kernel(
    logits, logits_stride, bias, expert_to_slot, counts, n_valid, ids, weights, slots, n_tokens, factor,
    E: tl.constexpr, TOKENS: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr, KEPT: tl.constexpr,
    SIGMOID: tl.constexpr, TWO_BEST: tl.constexpr, NORM: tl.constexpr, LIBDEVICE: tl.constexpr, WAYS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T / TOKENS)). ``TWO_BEST`` is ``noaux_tc``; GROUPS == 1 means no limit by groups."""
    enter(EARLY)
    # Experts stand in PADDED groups of a power of two of places, ids still in ascending order.
    SIZE: tl.constexpr = E // GROUPS
    PLACES: tl.constexpr = triton.next_power_of_2(SIZE)
    E_BLOCK: tl.constexpr = PADDED * PLACES
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.arange(0, E_BLOCK)
    e = place // PLACES * SIZE + place % PLACES
    valid = n_tokens
    if n_valid is not None:
        valid = tl.minimum(tl.load(n_valid), n_tokens)
    is_expert = (place % PLACES < SIZE) & (e < E)
    real = (t < valid)[:, None] & is_expert[None, :]
    x = tl.load(logits + t.to(tl.int64)[:, None] * logits_stride + e[None, :], mask=real, other=0.0)
    scores = _scores(x, real, SIGMOID, LIBDEVICE)
    steer = scores
    if bias is not None:
        steer = scores + tl.load(bias + e, mask=is_expert, other=0.0)[None, :]
    keys = tl.where(real, _keys(steer), _NONE)
    if GROUPS > 1:
        # Under noaux_tc biased scores can be negative: what is masked is -inf there, and 0.0 otherwise.
        fill = _KEY_OF_NEG_INF if TWO_BEST else 0
        keys = _limit_groups(keys, fill, GROUPS, PADDED, KEPT, TWO_BEST)
    chosen = tl.zeros((TOKENS, E_BLOCK), tl.int1)
    for _ in tl.static_range(K):
        best = tl.max(keys, 1)
        first = tl.min(tl.where(keys == best[:, None], place[None, :], E_BLOCK), 1)
        taken = place[None, :] == first[:, None]
        chosen = chosen | taken
        keys = tl.where(taken, _NONE, keys)
    chosen = chosen & real
    weight = scores
    if NORM:
        weight = tl.math.div_rn(scores, tl.sum(tl.where(chosen, scores, 0.0), 1)[:, None] + 1e-20)
    at = t.to(tl.int64)[:, None] * K + tl.cumsum(chosen.to(tl.int32), 1) - 1
    tl.store(ids + at, tl.broadcast_to(e[None, :], (TOKENS, E_BLOCK)), mask=chosen)
    tl.store(weights + at, weight * factor, mask=chosen)
    slot = tl.broadcast_to(e[None, :], (TOKENS, E_BLOCK))
    if expert_to_slot is not None:
        if WAYS == 1:
            slot = tl.broadcast_to(tl.load(expert_to_slot + e, mask=is_expert, other=-1).to(tl.int32)[None, :], (TOKENS, E_BLOCK))
        else:  # only what is chosen is read
            slot = tl.load(expert_to_slot + e[None, :] * WAYS + _way(t, WAYS)[:, None], mask=chosen, other=-1).to(tl.int32)
    tl.store(slots + at, slot, mask=chosen)
    if counts is not None:
        of_expert = tl.sum(chosen.to(tl.int32), 0)
        tl.atomic_add(counts + e, of_expert.to(tl.int64), mask=of_expert > 0, sem="relaxed")
    if n_valid is not None:
        k = tl.arange(0, triton.next_power_of_2(K))
        padding = ((t >= valid) & (t < n_tokens))[:, None] & (k < K)[None, :]
        at_pad = t.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(ids + at_pad, -1, mask=padding)
        tl.store(weights + at_pad, 0.0, mask=padding)
        tl.store(slots + at_pad, -1, mask=padding)


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    n_group: int,
    topk_group: int,
    top_k: int,
    scoring: Literal["sigmoid", "softmax"],
    method: Literal["noaux_tc", "greedy", "group_limited_greedy"],
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    expert_to_slot: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    n_valid: torch.Tensor | None = None,
    config: dict[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose ``top_k`` experts for every token, with their weights and physical slots.

    The choice is that of ``moe.router.Router`` (DeepSeek-V3, section 2.1.2): ``noaux_tc`` adds the bias to the scores for the
    choice only and counts the two best of a group; the lowest id wins a tie.

    Args:
        logits: fp32 [T, E], E up to 512, in ``n_group`` equal groups.
        bias: fp32 [E] for ``noaux_tc``.
        n_group, topk_group, top_k, scoring, method, norm_topk_prob, routed_scaling_factor: as in ``MoEConfig``.
        expert_to_slot: int32 or int64 [E], physical slot of every logical expert, or [E, W], of which each row takes the one that
            ``moe.ways.way_of_rows`` says; contiguous. Slots are ids without it.
        counts: int64 [E], to which the tokens of every logical expert are added.
        n_valid: int32 [1], how many of the rows are tokens; the later ones get ids and slots -1, weights 0, no count.
        config: ``tokens`` a program and ``warps``.

    Returns:
        ids int32 [T, k] ascending in each row, weights fp32 [T, k], slots int32 [T, k].

    Raises:
        ValueError: a shape or method the kernel does not know.
    """
    count, experts = logits.shape
    groups = n_group if topk_group < n_group and method != "greedy" else 1
    _check(logits, bias, n_group, top_k, method)
    ways = 1 if expert_to_slot is None else _ways(expert_to_slot, experts)
    ids = torch.empty((count, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((count, top_k), dtype=torch.float32, device=logits.device)
    slots = torch.empty((count, top_k), dtype=torch.int32, device=logits.device)
    if count == 0:
        return ids, weights, slots
    # One token a program is fastest while tokens spread over the experts; more of them share the updates of a count.
    default = {"tokens": 1, "warps": 1} if count < 1024 else {"tokens": 2, "warps": 2}
    config = config_for("router", default, tokens=count, experts=experts) if config is None else config
    route_kernel[(triton.cdiv(count, config["tokens"]),)](
        logits, logits.stride(0), bias if method == "noaux_tc" else None, expert_to_slot, counts, n_valid, ids, weights, slots, count,
        routed_scaling_factor, E=experts, TOKENS=config["tokens"], K=top_k,
        GROUPS=groups, PADDED=triton.next_power_of_2(groups), KEPT=topk_group, SIGMOID=scoring == "sigmoid", TWO_BEST=method == "noaux_tc",
        NORM=norm_topk_prob, LIBDEVICE=not triton.knobs.runtime.interpret, WAYS=ways, num_warps=config["warps"],
        **early_start(logits.device),
    )  # fmt: skip
    return ids, weights, slots


def _ways(expert_to_slot: torch.Tensor, experts: int) -> int:
    shape = tuple(expert_to_slot.shape)
    if shape[:1] != (experts,) or len(shape) > 2 or not expert_to_slot.is_contiguous() or not 1 <= expert_to_slot[0].numel() <= 1 << 15:
        raise ValueError(f"expert_to_slot must be contiguous, [{experts}] or [{experts}, ways], 1 to 32768 ways; found {list(shape)}")
    return expert_to_slot[0].numel()


def _check(logits: torch.Tensor, bias: torch.Tensor | None, n_group: int, top_k: int, method: str) -> None:
    experts = logits.shape[1]
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"the router kernel takes fp32 logits with adjacent experts, got {logits.dtype} strides {logits.stride()}")
    if not 1 <= top_k <= experts <= 512 or experts % n_group:
        raise ValueError(
            f"{top_k} of {experts} experts in {n_group} groups: the router kernel chooses 1 to E, of at most 512 in equal groups"
        )
    if method == "noaux_tc" and bias is None:
        raise ValueError("noaux_tc steers the choice by a bias [E]; none was given")
