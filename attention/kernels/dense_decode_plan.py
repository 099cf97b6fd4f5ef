"""How dense decode cuts its keys: a unit is a span of one request's keys for a few of its tokens, and one program a head block.

The cut is made on the device from the real lengths, so that a captured graph serves every length: the keys of all tokens,
divided by the programs wanted, give the aim for a span, and every request is cut into equal spans near that aim.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(8)  # of a unit: first token, tokens, first key, end of keys, -, request, part (-1: the only one)
SPAN = tl.constexpr(64)  # keys that are never separated


@triton.jit
def _leaders(token_row, limit, t, T, B: tl.constexpr):
    """Of tokens ``t``: those led, up to B of one request (0 for a token that is led), and the keys the last one sees."""
    mine = tl.load(token_row + t, mask=t < T, other=-1)
    before = tl.load(token_row + t - 1, mask=(t > 0) & (t < T), other=-1)
    leads = (t < T) & ((t % B == 0) | (mine != before))
    led = leads.to(tl.int32)
    keys = tl.load(limit + t, mask=t < T, other=0)
    same = leads
    for j in tl.static_range(1, B):
        same = same & (t % B + j < B) & (t + j < T)
        same = same & (tl.load(token_row + t + j, mask=same, other=-1) == mine)
        led += same.to(tl.int32)
        keys = tl.maximum(keys, tl.load(limit + t + j, mask=same, other=0))
    return led, tl.where(leads, tl.maximum(keys, 0), 0)


@triton.jit
def _cuts(led, keys, aim):
    """Spans of a unit's keys: near ``aim`` keys each; one for a unit without keys, none for tokens that are led."""
    return tl.where(led > 0, tl.maximum(1, tl.cdiv(keys - aim // 8, aim)), 0)


@triton.jit(do_not_specialize=["T", "n_units", "programs", "least"])
def dense_decode_plan_kernel(
    token_row, limit, units, of_token, T, n_units, programs, least, B: tl.constexpr, BT: tl.constexpr, U: tl.constexpr
):
    """Fill ``units`` int32 [n_units, FIELDS], zeros where there is none, and ``of_token`` int32 [T, 4].

    Of a token: its first part, its parts (1: none, the unit writes the result), its place in the unit.

    ``programs`` is the number of spans aimed at, ``least`` the keys that are worth a span.
    """
    total = 0
    for start in range(0, T, BT):
        led, keys = _leaders(token_row, limit, start + tl.arange(0, BT), T, B)
        total += tl.sum(tl.cdiv(keys, SPAN))
    aim = tl.maximum(tl.cdiv(total, programs), 1) * SPAN
    aim = tl.maximum(aim, least)

    unit = tl.program_id(0) * U + tl.arange(0, U)
    token = tl.zeros([U], tl.int32)
    first_unit = tl.zeros([U], tl.int32)
    first_part = tl.zeros([U], tl.int32)
    done = 0
    parted = 0
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        led, keys = _leaders(token_row, limit, t, T, B)
        cuts = _cuts(led, keys, aim)
        ends = done + tl.cumsum(cuts, 0)
        passed = (ends[None, :] <= unit[:, None]) & (t < T)[None, :]
        token += tl.sum(passed.to(tl.int32), 1)
        first_unit += tl.sum(tl.where(passed, cuts[None, :], 0), 1)
        parts = tl.where(cuts > 1, cuts, 0)
        first_part += tl.sum(tl.where(passed, parts[None, :], 0), 1)
        if tl.program_id(0) == 0:
            part_ends = parted + tl.cumsum(parts, 0)
            for j in tl.static_range(B):  # a leader speaks for those it leads
                tl.store(of_token + (t + j) * 4, part_ends - parts, mask=led > j)
                tl.store(of_token + (t + j) * 4 + 1, cuts, mask=led > j)
                tl.store(of_token + (t + j) * 4 + 2, j, mask=led > j)
        done += tl.sum(cuts)
        parted += tl.sum(parts)

    there = (unit < n_units) & (token < T)
    led, keys = _leaders(token_row, limit, tl.where(there, token, T), T, B)
    cuts = tl.maximum(_cuts(led, keys, aim), 1)
    size = tl.cdiv(tl.cdiv(keys, SPAN), cuts) * SPAN
    begin = (unit - first_unit) * size
    at = units + unit * FIELDS
    kept = unit < n_units
    tl.store(at, token, mask=kept)
    tl.store(at + 1, tl.where(there, led, 0), mask=kept)
    tl.store(at + 2, tl.where(there, tl.minimum(begin, keys), 0), mask=kept)
    tl.store(at + 3, tl.where(there, tl.minimum(begin + size, keys), 0), mask=kept)
    tl.store(at + 5, tl.load(token_row + token, mask=there, other=0).to(tl.int32), mask=kept)
    tl.store(at + 6, tl.where(there & (cuts > 1), first_part + unit - first_unit, -1), mask=kept)


@triton.jit
def dense_decode_combine_kernel(
    parts, part_lse, of_token, out, lse, H, ROWS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, HB: tl.constexpr
):
    """Join a token's spans in order. ``parts`` fp32 [parts, ROWS, C], normalised each; ``part_lse`` base 2 [parts, ROWS]."""
    token = tl.program_id(0)
    cuts = tl.load(of_token + token * 4 + 1)
    if cuts > 1:
        first = tl.load(of_token + token * 4)
        head = tl.program_id(1) * HB + tl.arange(0, HB)
        live = head < H
        row = tl.load(of_token + token * 4 + 2) * H + head
        column = tl.arange(0, CP)
        high = tl.full([HB], -1.0e30, tl.float32)
        total = tl.zeros([HB], tl.float32)
        acc = tl.zeros([HB, CP], tl.float32)
        for s in range(cuts):
            at = (first + s).to(tl.int64) * ROWS + row
            weight = tl.load(part_lse + at, mask=live, other=float("-inf"))
            part = tl.load(parts + at[:, None] * C + column[None, :], mask=live[:, None] & (column < C)[None, :], other=0.0)
            new = tl.maximum(high, weight)
            old = tl.exp2(high - new)
            share = tl.exp2(weight - new)
            total = total * old + share
            acc = acc * old[:, None] + part * share[:, None]
            high = new
        acc *= tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
        at = token.to(tl.int64) * H + head
        tl.store(out + at[:, None] * C + column[None, :], acc.to(out.dtype.element_ty), mask=live[:, None] & (column < C)[None, :])
        tl.store(lse + at, tl.where(total > 0.0, (high + tl.log2(total)) * 0.6931471805599453, float("-inf")), mask=live)
