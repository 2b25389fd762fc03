"""Where operands lie, and typed loads and stores at plain 64-bit addresses.

Numba's array arguments carry seven words each and are inspected at every launch; an address is one
word and is not. A value is loaded into the accumulator's type (float32, float64, int32) and stored
with ONE rounding: float64 to a 16-bit type goes through float32 rounded to odd, which makes the
second rounding exact. bfloat16 lives as its 16 bits, so no array library has to know it.
In Numba's simulator the same names read and write host memory through ctypes.
"""

# mypy: ignore-errors
from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from multigemm.backends.numba.arguments import JAGGED_K, JAGGED_M, JAGGED_N
from multigemm.backends.numba.kernels.runtime import SIMULATED, device
from multigemm.planning.operands import TABLE

if not SIMULATED:
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    from multigemm.backends.numba.kernels.ptx import assembly, store_global_u32x4
    from multigemm.backends.numba.kernels.ptx import unforeseen_wide as unforeseen

BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "i8": 1, "u8": 1, "i32": 4, "i64": 8}
BYTES |= {"e4m3": 1, "e5m2": 1, "e8m0": 1}
ACCUMULATOR = {"f16": "f32", "bf16": "f32", "f32": "f32", "f64": "f64", "i8": "i32", "u8": "i32"}
GLOBAL_SPACE = 1


def numpy_type(name):
    """The NumPy type that holds an accumulator (the simulator sums int32 in 64 bits and wraps at the end)."""
    if name == "i32" and SIMULATED:
        return np.int64
    return {"f32": np.float32, "f64": np.float64, "i32": np.int32}[name]


if SIMULATED:
    _C = {"f16": ctypes.c_uint16, "bf16": ctypes.c_uint16, "f32": ctypes.c_float, "f64": ctypes.c_double,
          "i8": ctypes.c_int8, "u8": ctypes.c_uint8, "i32": ctypes.c_int32, "i64": ctypes.c_int64}  # fmt: skip
    _BITS = np.arange(65536, dtype=np.uint32)
    _WIDE = {
        "f16": _BITS.astype(np.uint16).view(np.float16).astype(np.float32),
        "bf16": (_BITS << 16).view(np.float32),
    }

    @cache
    def loader(name):
        """load(address, index) -> the element, in the accumulator's type."""
        ctype, size, table = _C[name], BYTES[name], _WIDE.get(name)

        def load(address, index):
            value = ctype.from_address(int(address + index * size)).value
            return table[value] if table is not None else value

        return load

    def _to_odd(value):
        """float64 to float32, rounded to odd: exact under a later rounding to 16 bits."""
        with np.errstate(all="ignore"):
            single = np.float32(value)
            if np.isnan(single) or float(single) == float(value):
                return single
            if abs(float(single)) > abs(float(value)):
                single = np.nextafter(single, np.float32(0))
        return (single.view(np.uint32) | np.uint32(1)).view(np.float32)

    def _bits16(name, value):
        single = _to_odd(value)
        if name == "f16":
            with np.errstate(all="ignore"):
                return int(single.astype(np.float16).view(np.uint16))
        bits = int(single.view(np.uint32))
        return 0x7FFF if np.isnan(single) else (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16

    def _wrap(value):
        return (int(value) + 2**31) % 2**32 - 2**31

    @cache
    def storer(name, source):
        """store(address, index, value) with one rounding from the accumulator type `source`."""
        ctype, size = _C[name], BYTES[name]

        def store(address, index, value):
            where = ctype.from_address(int(address + index * size))
            if name in _WIDE:
                where.value = _bits16(name, value)
            elif source == "i32":
                where.value = _wrap(value)
            elif name == "f32":
                with np.errstate(all="ignore"):
                    where.value = float(np.float32(value))
            else:
                where.value = float(value)

        return store

    def caster(name):
        """A Python number as the accumulator type."""
        return {"f32": np.float32, "f64": np.float64, "i32": int}[name]

    def wrap_int32(value):
        return _wrap(value)

    def zero_16(address):
        """16 bytes of zeros."""
        ctypes.memset(int(address), 0, 16)

    def unforeseen(value):
        return value

else:
    _LLVM = {"f16": ir.HalfType(), "bf16": ir.IntType(16), "f32": ir.FloatType(), "f64": ir.DoubleType(),
             "i8": ir.IntType(8), "u8": ir.IntType(8), "i32": ir.IntType(32), "i64": ir.IntType(64)}  # fmt: skip
    _NUMBA = {"f32": types.float32, "f64": types.float64, "i32": types.int32, "i64": types.int64}

    def element_pointer(builder, name, address, index):
        """A typed pointer into global memory."""
        base = builder.inttoptr(address, ir.PointerType(_LLVM[name], GLOBAL_SPACE))
        return builder.gep(base, [index])

    def _widen(builder, name, value):
        if name == "f16":
            return builder.fpext(value, ir.FloatType())
        if name == "bf16":
            bits = builder.shl(builder.zext(value, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
            return builder.bitcast(bits, ir.FloatType())
        if name == "u8":
            return builder.zext(value, ir.IntType(32))
        return builder.sext(value, ir.IntType(32)) if name == "i8" else value

    @cache
    def loader(name):
        """load(address, index) -> the element, in the accumulator's type."""
        wide = _NUMBA[ACCUMULATOR.get(name, name)]

        @intrinsic
        def load(typingctx, address, index):
            def codegen(context, builder, signature, args):
                return _widen(builder, name, builder.load(element_pointer(builder, name, *args)))

            return wide(types.int64, types.int64), codegen

        return load

    def _round_to_odd(builder, value):
        """float64 to float32: truncated, with the last bit set where something was cut off."""
        single = assembly(builder, "cvt.rz.f32.f64 $0, $1;", [value], [ir.FloatType()], effects=False)[0]
        inexact = builder.fcmp_unordered("!=", builder.fpext(single, ir.DoubleType()), value)
        bits = builder.bitcast(single, ir.IntType(32))
        return builder.bitcast(builder.or_(bits, builder.zext(inexact, ir.IntType(32))), ir.FloatType())

    def narrow(builder, name, source, value):
        """The value in the output's type, by one rounding."""
        if name in ("f16", "bf16"):
            single = _round_to_odd(builder, value) if source == "f64" else value
            if name == "f16":
                return builder.fptrunc(single, ir.HalfType())
            return assembly(builder, "cvt.rn.bf16.f32 $0, $1;", [single], [ir.IntType(16)], effects=False)[0]
        if name == "f32" and source == "f64":
            return builder.fptrunc(value, ir.FloatType())
        if name == "f64" and source == "f32":
            return builder.fpext(value, ir.DoubleType())
        return value

    @cache
    def storer(name, source):
        """store(address, index, value) with one rounding from the accumulator type `source`."""

        @intrinsic
        def store(typingctx, address, index, value):
            def codegen(context, builder, signature, args):
                pointer = element_pointer(builder, name, args[0], args[1])
                builder.store(narrow(builder, name, source, args[2]), pointer)

            return types.void(types.int64, types.int64, _NUMBA[source]), codegen

        return store

    def caster(name):
        """A Python number as the accumulator type."""
        return _NUMBA[name]

    @device
    def wrap_int32(value):
        """Numba adds int32 in 64 bits; what looks at the sign next must see the 32 that are kept."""
        return types.int32(value)

    @device
    def zero_16(address):
        """16 bytes of zeros."""
        store_global_u32x4(address, (0, 0, 0, 0))


# Where a group's operands begin, for any form: the packed formula or the table of a list.

_load_i64 = loader("i64")
COLUMNS, A, B, C, OUT, BIAS = (int(TABLE[name]) for name in ("COLUMNS", "A", "B", "C", "OUT", "BIAS"))
STRIDES, BIAS_COL = int(TABLE.A_ROW), int(TABLE.BIAS_COL)
"""Of A, B, C and OUT, a row stride and a column stride each."""


@cache
def make_operands(in_size):
    """Device functions (group, start) -> base address and strides of A, B, C, out and bias."""

    @device
    def operand(p, g, start, which, base, group, row, col, size):
        """(address, row stride, column stride) of A, B, C or OUT."""
        if p.table != 0:
            at = g * COLUMNS
            base, at = _load_i64(p.table, at + which), at + (STRIDES + 2 * which)
            row, col = _load_i64(p.table, at), _load_i64(p.table, at + 1)
        else:
            along_row = (which != B and p.jagged == JAGGED_M) or (which == B and p.jagged == JAGGED_K)
            along_col = (which != A and p.jagged == JAGGED_N) or (which == A and p.jagged == JAGGED_K)
            offset = g * group
            if along_row:
                offset += start * row
            elif along_col:
                offset += start * col
            base += offset * size
        return base, row, col

    @device
    def operand_a(p, g, start):
        return operand(p, g, start, A, p.a, p.a_group, p.a_row, p.a_col, in_size)

    @device
    def operand_b(p, g, start):
        return operand(p, g, start, B, p.b, p.b_group, p.b_row, p.b_col, in_size)

    @device
    def operand_c(p, g, start):
        return operand(p, g, start, C, p.c, p.c_group, p.c_row, p.c_col, p.c_size)

    @device
    def operand_out(p, g, start):
        return operand(p, g, start, OUT, p.out, p.out_group, p.out_row, p.out_col, p.out_size)

    @device
    def operand_bias(p, g, start):
        """(address, stride)."""
        base, col = p.bias, p.bias_col
        if p.table != 0:
            base, col = _load_i64(p.table, g * COLUMNS + BIAS), _load_i64(p.table, g * COLUMNS + BIAS_COL)
        else:
            offset = g * p.bias_group
            if p.jagged == JAGGED_N:
                offset += start * col
            base += offset * p.bias_size
        return base, col

    return operand_a, operand_b, operand_c, operand_out, operand_bias
