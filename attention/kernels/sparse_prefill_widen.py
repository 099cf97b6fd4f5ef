"""FP8 rows on their way to shared memory: four e4m3 of a word become two pairs of bf16."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .sparse_prefill_units import GROUP


@gluon.jit
def widen(codes):
    """Words of four e4m3 (int32 [N, W]) to pairs of bf16 (int32 [N, 2 W]), exactly.

    Seven low bits of a byte moved to the top of bf16's mantissa are its value divided by 2^120, subnormals included.
    """
    first, second = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, sign, lift;
        mov.b32 lift, 0x7b807b80;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        and.b32 sign, low, 0x80008000;
        shr.u32 low, low, 4;
        lop3.b32 low, low, 0x07f007f0, sign, 0xea;
        mul.bf16x2 $0, low, lift;
        and.b32 sign, high, 0x80008000;
        shr.u32 high, high, 4;
        lop3.b32 high, high, 0x07f007f0, sign, 0xea;
        mul.bf16x2 $1, high, lift;
        }
        """,
        "=r,=r,r",
        [codes],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.reshape(gl.join(first, second), [codes.shape[0], 2 * codes.shape[1]])


@gluon.jit
def split_scale(scale):
    """fp32 as a sum of two bf16, each twice in a word (int32): products with both, added, are rounded once."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 top;
        .reg .f32 rest;
        cvt.rn.bf16x2.f32 $0, $2, $2;
        and.b32 top, $0, 0xffff0000;
        sub.f32 rest, $2, top;
        cvt.rn.bf16x2.f32 $1, rest, rest;
        }
        """,
        "=r,=r,r",
        [scale],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def widen_scaled(codes, top, rest):
    """``widen`` times a scale per row, given by ``split_scale`` and broadcast to the shape of ``codes``; rounded once to bf16."""
    first, second = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, sign, lift, minor;
        mov.b32 lift, 0x7b807b80;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        and.b32 sign, low, 0x80008000;
        shr.u32 low, low, 4;
        lop3.b32 low, low, 0x07f007f0, sign, 0xea;
        mul.bf16x2 low, low, lift;
        mul.bf16x2 minor, low, $4;
        fma.rn.bf16x2 $0, low, $3, minor;
        and.b32 sign, high, 0x80008000;
        shr.u32 high, high, 4;
        lop3.b32 high, high, 0x07f007f0, sign, 0xea;
        mul.bf16x2 high, high, lift;
        mul.bf16x2 minor, high, $4;
        fma.rn.bf16x2 $1, high, $3, minor;
        }
        """,
        "=&r,=&r,r,r,r",
        [codes, top, rest],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.reshape(gl.join(first, second), [codes.shape[0], 2 * codes.shape[1]])


@gluon.jit
def load_words(pool, row, there, stride: gl.constexpr, cols):
    """Words ``cols`` of rows; 0 for rows that are not there."""
    return gl.load(pool + gl.expand_dims(row.to(gl.int64) * stride, 1) + cols, mask=gl.expand_dims(there, 1), other=0)


@gluon.jit
def load_scales(scales, row, there, stride: gl.constexpr, C: gl.constexpr, lay: gl.constexpr):
    """The four scales of each row, [N] each in ``row``'s layout, the slice of ``lay``; 0 for rows that are not there."""
    warps: gl.constexpr = lay.warps_per_cta[0]
    four: gl.constexpr = gl.BlockedLayout([1, 4], lay.threads_per_warp, [warps, 1], [1, 0])
    at = gl.convert_layout(row, gl.SliceLayout(1, four))
    kept = gl.convert_layout(there, gl.SliceLayout(1, four))
    cols = gl.expand_dims(C // 4 + gl.arange(0, 4, gl.SliceLayout(0, four)), 0)
    all4 = gl.load(scales + gl.expand_dims(at.to(gl.int64) * stride, 1) + cols, mask=gl.expand_dims(kept, 1), other=0.0)
    even, odd = gl.split(gl.reshape(all4, [row.shape[0], 2, 2]))
    f0, f2 = gl.split(even)
    f1, f3 = gl.split(odd)
    part: gl.constexpr = gl.SliceLayout(1, lay)
    return gl.convert_layout(f0, part), gl.convert_layout(f1, part), gl.convert_layout(f2, part), gl.convert_layout(f3, part)


@gluon.jit
def store_scaled(target, first: gl.constexpr, codes, scale):
    """Words [N, W] of one scale group, widened and scaled, into columns ``first`` on of a bf16 tile of shared memory."""
    pairs: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    top, rest = split_scale(scale)
    view = target._reinterpret(gl.int32, [target.shape[0], target.shape[1] // 2], pairs)
    view.slice(first // 2, GROUP // 2, 1).store(widen_scaled(codes, gl.expand_dims(top, 1), gl.expand_dims(rest, 1)))
