"""Small tables of one program: a set of positions as bits with ranks, and lists, in shared memory or in global memory.

Triton has no scattered access to shared memory, and in global memory a multiprocessor gets one scattered word a cycle: the
accesses here are a line of PTX each. Where ``SHARED`` is off (long contexts, the interpreter) the same tables lie in global memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shared_base(BYTES: tl.constexpr):
    """Address of the tables. Declares them, so once in a kernel."""
    return tl.inline_asm_elementwise(
        ".shared .align 16 .b8 resolve_tables[" + BYTES + "]; mov.u32 $0, resolve_tables;",
        "=r", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def put_word(table, at, x, mask, SHARED: tl.constexpr):
    """table[at] = x, 32 bits."""
    if SHARED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,r,r,r", [table + 4 * at, x, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(table + at, x, mask=mask)


@triton.jit
def get_word(table, at, mask, SHARED: tl.constexpr):
    """table[at], 32 bits; anything where ``mask`` is off."""
    if SHARED:
        x = tl.inline_asm_elementwise(
            "ld.shared.b32 $0, [$1];", "=r,r", [table + 4 * tl.where(mask, at, 0)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        x = tl.load(table + at, mask=mask, other=0)
    return x


@triton.jit
def put_short(table, at, x, mask, SHARED: tl.constexpr):
    """table[at] = x, 16 bits with a sign."""
    if SHARED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.b16 [$1], $2; mov.b32 $0, 0; }",
            "=r,r,r,r", [table + 2 * at, x, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(table + at, x, mask=mask)


@triton.jit
def get_short(table, at, mask, SHARED: tl.constexpr):
    """table[at], 16 bits with a sign; anything where ``mask`` is off."""
    if SHARED:
        x = tl.inline_asm_elementwise(
            "ld.shared.s16 $0, [$1];", "=r,r", [table + 2 * tl.where(mask, at, 0)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        x = tl.load(table + at, mask=mask, other=0)
    return x


@triton.jit
def add_to_set(bits, p, mask, SHARED: tl.constexpr):
    """Set bit ``p``."""
    if SHARED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p red.shared.or.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,r,r,r", [bits + 4 * (p >> 5), one_bit(p), mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.atomic_or(bits + (p >> 5), one_bit(p), mask=mask, sem="relaxed")


@triton.jit
def one_bit(p):
    """int32 with the bit of position ``p`` in its word."""
    return (tl.full(p.shape, 1, tl.uint32) << (p & 31).to(tl.uint32)).to(tl.int32, bitcast=True)


@triton.jit
def count_bits(x):
    """Bits set in each int32."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return ((((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def group_size(bits, group, mask, SHARED: tl.constexpr):
    """How many of the 64 positions of each group are in the set."""
    if SHARED:
        n = tl.inline_asm_elementwise(
            "{ .reg .b64 w; ld.shared.b64 w, [$1]; popc.b64 $0, w; }",
            "=r,r", [bits + 8 * tl.where(mask, group, 0)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        n = tl.where(mask, n, 0)
    else:
        low, high = tl.load(bits + 2 * group, mask=mask, other=0), tl.load(bits + 2 * group + 1, mask=mask, other=0)
        n = count_bits(low) + count_bits(high)
    return n


@triton.jit
def look_up(bits, p, mask, SHARED: tl.constexpr):
    """Twice the number of members below ``p`` in its group of 64, plus 1 if ``p`` is a member; anything where ``mask`` is off."""
    p = tl.where(mask, p, 0)
    if SHARED:
        found = tl.inline_asm_elementwise(
            "{ .reg .b64 w, t; .reg .b32 n, m; ld.shared.b64 w, [$1]; shr.u64 t, w, $2; cvt.u32.u64 m, t; and.b32 m, m, 1;"
            " mov.b64 t, 1; shl.b64 t, t, $2; sub.s64 t, t, 1; and.b64 w, w, t; popc.b64 n, w; shl.b32 n, n, 1; or.b32 $0, n, m; }",
            "=r,r,r", [bits + 8 * (p >> 6), p & 63], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        low, high = tl.load(bits + 2 * (p >> 6), mask=mask, other=0), tl.load(bits + 2 * (p >> 6) + 1, mask=mask, other=0)
        own = tl.where((p & 32) == 0, low, high)
        below = (one_bit(p).to(tl.uint32, bitcast=True) - 1).to(tl.int32, bitcast=True)
        n = count_bits(own & below) + tl.where((p & 32) == 0, 0, count_bits(low))
        found = 2 * n + ((own & one_bit(p)) != 0).to(tl.int32)
    return found
