"""How the Hopper kernel of ``indexer_logits`` shares out its work.

The work is counted in pages of keys over *units*: up to STEP tokens of one request that read its keys together. The units of a
step follow one another in the order of the tokens; a unit begins at every STEP-th token and wherever the request changes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PAGE = gl.constexpr(64)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def place(number, SIZE: gl.constexpr):
    """Buffer of a ring that the load of this number uses, and the parity of that use."""
    count = number.to(gl.uint32)
    return (count % SIZE).to(gl.int32), ((count // SIZE) & 1).to(gl.int32)


@gluon.jit
def pages_of(token, n_tokens, token_row, limit, start, STEP: gl.constexpr, HAS_START: gl.constexpr):
    """Pages of keys that the unit beginning at each of the tokens needs; 0 where none begins."""
    real = token < n_tokens
    row = gl.load(token_row + token, mask=real, other=-1).to(gl.int32)
    before = gl.load(token_row + token - 1, mask=real & (token > 0), other=-1).to(gl.int32)
    phase = token % STEP
    high = gl.zeros_like(token)
    low = gl.full_like(token, 0x7FFFFFFF)
    for j in gl.static_range(STEP):
        inside = (phase + j < STEP) & (token + j < n_tokens)
        other = gl.load(token_row + token + j, mask=inside, other=-1).to(gl.int32)
        end = gl.load(limit + token + j, mask=inside, other=0)
        end = gl.where(other == row, end, 0)
        high = gl.maximum(high, end)
        if HAS_START:
            first = gl.load(start + token + j, mask=inside, other=0)
            low = gl.minimum(low, gl.where(first < end, first, 0x7FFFFFFF))
    begins = real & (row >= 0) & ((phase == 0) | (row != before))
    if HAS_START:
        pages = gl.where(low < high, (high + PAGE - 1) // PAGE - low // PAGE, 0)
    else:
        pages = (high + PAGE - 1) // PAGE
    return gl.where(begins, pages, 0)


@gluon.jit
def unit_at(token, n_tokens, token_row, limit, start, STEP: gl.constexpr, STEP_WIDE: gl.constexpr, HAS_START: gl.constexpr):
    """The unit that begins at one token: its request, how many tokens it has, its first page and how many pages."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    j = gl.arange(0, STEP_WIDE, layout)
    inside = (j < STEP - token % STEP) & (token + j < n_tokens)
    row = gl.load(token_row + token).to(gl.int32)
    rows = gl.load(token_row + token + j, mask=inside, other=-1).to(gl.int32)
    ends = gl.load(limit + token + j, mask=inside, other=0)
    same = inside & (rows == row)
    ends = gl.where(same, ends, 0)
    count = gl.maximum(gl.sum(same.to(gl.int32), 0), 1)
    high = gl.max(ends, 0)
    first = 0
    pages = (high + PAGE - 1) // PAGE
    if HAS_START:
        begins = gl.load(start + token + j, mask=inside, other=0)
        low = gl.min(gl.where(begins < ends, begins, 0x7FFFFFFF), 0)
        first = low // PAGE
        pages = gl.where(low < high, pages - first, 0)
    pages = gl.where(row >= 0, pages, 0)
    return row, count, first, pages


@gluon.jit
def _share(total):
    """This program's part of ``total`` pages."""
    me, programs = gl.program_id(0), gl.num_programs(0)
    each, more = total // programs, total % programs
    return me * each + gl.minimum(me, more), (me + 1) * each + gl.minimum(me + 1, more)


@gluon.jit
def share_of_few(n_tokens, token_row, limit, start, STEP: gl.constexpr, HAS_START: gl.constexpr, VECTOR: gl.constexpr):
    """This program's part: the token its first unit begins at, pages to skip there, pages in all. For at most VECTOR tokens."""
    token = gl.arange(0, VECTOR, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    pages = pages_of(token, n_tokens, token_row, limit, start, STEP, HAS_START)
    low, high = _share(gl.sum(pages, 0))
    upto = gl.associative_scan(pages, 0, _add)
    mine = (upto > low) & (upto - pages <= low)
    return gl.sum(gl.where(mine, token, 0), 0), gl.sum(gl.where(mine, low - (upto - pages), 0), 0), high - low


@gluon.jit
def share_of_many(n_tokens, token_row, limit, start, STEP: gl.constexpr, HAS_START: gl.constexpr, VECTOR: gl.constexpr):
    """As ``share_of_few``, for any number of tokens."""
    lanes = gl.arange(0, VECTOR, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    total = gl.to_tensor(0)
    for base in range(0, n_tokens, VECTOR):
        total += gl.sum(pages_of(base + lanes, n_tokens, token_row, limit, start, STEP, HAS_START), 0)
    low, high = _share(total)
    token = gl.to_tensor(0)
    skip = gl.to_tensor(0)
    seen = gl.to_tensor(0)
    for base in range(0, n_tokens, VECTOR):
        pages = pages_of(base + lanes, n_tokens, token_row, limit, start, STEP, HAS_START)
        upto = gl.associative_scan(pages, 0, _add) + seen
        mine = (upto > low) & (upto - pages <= low)
        token += gl.sum(gl.where(mine, base + lanes, 0), 0)
        skip += gl.sum(gl.where(mine, low - (upto - pages), 0), 0)
        seen += gl.sum(pages, 0)
    return token, skip, high - low
