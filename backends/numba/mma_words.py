"""Registers of mma.sync that `ldmatrix` alone cannot fill: float64, and 4 or 1 bytes that lie across k.

Lane l serves row (of A; column of B) l / 4 and k l % 4 of 8 x 4 elements. Bytes across k come by
`ldmatrix.trans`, which turns pairs of them: one register then holds two k of two neighbouring rows, and
two bytes of it belong elsewhere. So of 16 rows the even ones take the place of the first eight.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types

from multigemm.backends.numba import ptx
from multigemm.backends.numba.mma_shape import ROW_BYTES
from multigemm.backends.numba.ptx_asm import I32, instruction
from multigemm.backends.numba.runtime import synchronising

LLVM = {types.float32: ir.FloatType(), types.int32: ir.IntType(32), types.float64: ir.DoubleType()}
int32 = types.int32
_ld4t = ptx.make_ldmatrix(4, True)
_even = instruction("prmt.b32 $0, $1, $2, 0x6420;", I32, I32, I32, effects=False)
_odd = instruction("prmt.b32 $0, $1, $2, 0x7531;", I32, I32, I32, effects=False)


def make_twist(kind, across, width):
    """twist(row) -> what the number of a 16-byte chunk in this row is xor-ed with.

    What a warp reads at once then lies in different banks: 8 rows of a chunk each, 4 rows of two
    chunks (float64; tf32 across), or the 8 rows that `bytes_across` names.
    """

    @synchronising
    def by_eight(row):
        return row & 7

    @synchronising
    def by_four(row):
        return (row & 3) << 1

    @synchronising
    def by_pairs(row):
        return (row & 1) | (((row >> 2) & 3) << 1)

    @synchronising
    def by_quads(row):
        return (row >> 2) & 3

    @synchronising
    def none(row):
        return int32(0)

    if kind == "f32" and across:
        return none
    if kind == "f64" or (kind == "tf32" and across):
        return by_four
    if kind == "i8" and across:
        return by_pairs if width == 128 else by_quads
    return by_eight


@cache
def make_words(kind, across, left, width):
    """load(tile, step, first, lane) -> registers of 16 rows x 32 bytes of k; as `make_fragments`."""
    twist = make_twist(kind, across, width)

    @synchronising
    def double(tile, step, own, lane):
        deep = int32(step * 4 + (lane & 3))
        if across:
            return ptx.load_shared_f64(tile + deep * (width * 8) + (((own >> 1) ^ twist(deep)) << 4) + (own & 1) * 8)
        return ptx.load_shared_f64(tile + own * ROW_BYTES + (((deep >> 1) ^ twist(own)) << 4) + (deep & 1) * 8)

    @synchronising
    def doubles(tile, step, first, lane):
        own = int32(first + (lane >> 2))
        return double(tile, step, own, lane), double(tile, step, int32(own + 8), lane)

    @synchronising
    def single(tile, deep, own):
        return ptx.load_shared_u32(tile + deep * (width * 4) + (((own >> 2) ^ twist(deep)) << 4) + (own & 3) * 4)

    @synchronising
    def singles_across(tile, step, first, lane):
        own, deep = int32(first + (lane >> 2)), int32(step * 8 + (lane & 3))
        corner, other = single(tile, deep, own), single(tile, int32(deep + 4), int32(own + 8))
        beside, below = single(tile, deep, int32(own + 8)), single(tile, int32(deep + 4), own)
        if left:
            return corner, beside, below, other
        return corner, below, beside, other

    @synchronising
    def bytes_across(tile, step, first, lane):
        inner = lane & 7
        deep = int32(step * 32 + (lane >> 4) * 16 + (inner >> 1) * 4 + ((lane >> 3) & 1) * 2 + (inner & 1))
        w = _ld4t(tile + deep * width + (((first >> 4) ^ twist(deep)) << 4))
        low, high = _even(w[0], w[1]), _even(w[2], w[3])
        odd_low, odd_high = _odd(w[0], w[1]), _odd(w[2], w[3])
        if left:
            return low, odd_low, high, odd_high
        return low, high, odd_low, odd_high

    return {"f64": doubles, "tf32": singles_across, "i8": bytes_across}[kind]
