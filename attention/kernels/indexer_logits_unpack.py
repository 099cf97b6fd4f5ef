"""FP4 index keys as the Hopper kernel of ``indexer_logits`` multiplies them: e4m3 in the registers of the matrix product.

The bytes of a key are in the order in which the lanes of a product hold its values (``kv/fp4.py``): 16 bytes a lane, which are a
block. All magnitudes times any multiplier are exact in e4m3, so eight bytes are the table of a block, and ``prmt`` looks up four
values at a time. Lane ``n`` of each 16 keeps the table of multiplier ``n``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# what a lane holds of [64 keys, 64 bytes] is what it holds of [64, 128] values of a product's first operand
_BYTES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
# the same as [64 keys, 4 blocks, 16 bytes]
_BLOCKS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 4, 16],
    )
)
_TABLE = gl.constexpr(gl.SliceLayout(2, _BLOCKS))  # of a table for each block: [64, 4]
_FETCH = gl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 31, -1;")  # $1 of the lane whose number, modulo 32, is $2
# $0, $1: four values each; $2: their word; then, each of them four times over: lower and upper half of the table
_LOOK_UP = gl.constexpr("""{
.reg .b32 index, found;
and.b32 index, $2, 0x77777777;
prmt.b32 found, $3, $7, index;
lop3.b32 $0, $2, 0x80808080, found, 0xEA;
shr.u32 index, index, 16;
prmt.b32 found, $3, $7, index;
shl.b32 index, $2, 4;
lop3.b32 $1, index, 0x80808080, found, 0xEA;
}""")
_OPERANDS = gl.constexpr("=r,=r,r,r,r,r,r,r,r,r,r")


@gluon.jit
def tables():
    """Both halves of the table that this lane keeps for all, int32 [64, 4]: the same in every element that it has.

    It is the e4m3 codes of the eight magnitudes times the lane's multiplier. Multiplier ``3 t + m`` is 1.5, 1.25 or 1 (``m`` = 0,
    1, 2) times ``2 ** (5 - t)``; an octave is 8 codes of e4m3.
    """
    key = gl.arange(0, 64, gl.SliceLayout(1, _TABLE))[:, None]
    block = gl.arange(0, 4, gl.SliceLayout(0, _TABLE))[None, :]
    number = key % 4 * 4 + block  # the lane, modulo 16
    octave = number // 3
    which = number % 3
    low = gl.where(which == 0, 0x11_0C_04_00, gl.where(which == 1, 0x0F_0A_02_00, 0x0C_08_00_00))
    high = gl.where(which == 0, 0x21_1C_19_14, gl.where(which == 1, 0x1F_1A_17_12, 0x1C_18_14_10))
    step = 11 - octave
    return low + step * 0x08080800, high + step * 0x08080808


@gluon.jit
def unpack(keys, words, low, high, PRODUCT: gl.constexpr):
    """e4m3 [64, 128] for the product's first operand, of keys in shared memory, uint8 [64, 64], and their words of scales, int32 [64]."""
    raw = gl.convert_layout(keys.load(_BYTES).reshape([64, 4, 16]), _BLOCKS, assert_trivial=True)
    number = words.load(gl.SliceLayout(1, _TABLE))[:, None] >> (4 * gl.arange(0, 4, gl.SliceLayout(0, _TABLE))[None, :])
    low = gl.inline_asm_elementwise(_FETCH, "=r,r,r", [low, number], gl.int32, is_pure=False, pack=1)
    high = gl.inline_asm_elementwise(_FETCH, "=r,r,r", [high, number], gl.int32, is_pure=False, pack=1)
    first, second = gl.inline_asm_elementwise(
        _LOOK_UP, _OPERANDS, [raw, low[:, :, None], high[:, :, None]], (gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4
    )
    both = gl.join(first, second).reshape([64, 4, 4, 4, 2]).permute((0, 2, 4, 1, 3)).reshape([64, 128])
    return gl.convert_layout(both, gl.DotOperandLayout(0, PRODUCT, 4), assert_trivial=True)


@gluon.jit
def key_scale(words):
    """The bf16 scales in the upper halves of ``words`` int32, as fp32."""
    return (words & -65536).to(gl.float32, bitcast=True)
