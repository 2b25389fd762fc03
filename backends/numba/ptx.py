"""PTX for Numba, part 1: what every GPU since sm_80 has. Fragments, matrix loads, mma.sync, cp.async.

Shared-memory addresses are 32-bit (see `ptx_asm.shared_address`), global ones 64-bit. A 32-bit word
of a fragment holds two 16-bit elements, the lower index in the lower half.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

from numba.cuda import types

from multigemm.backends.numba.ptx_asm import F32, F64, I32, I64, floats, instruction, registers, words

MMA = {
    "f16": ("m16n8k16.row.col.f32.f16.f16.f32", 4, 2),
    "bf16": ("m16n8k16.row.col.f32.bf16.bf16.f32", 4, 2),
    "tf32": ("m16n8k8.row.col.f32.tf32.tf32.f32", 4, 2),
    "i8": ("m16n8k32.row.col.s32.s8.s8.s32", 4, 2),
    "f64": ("m16n8k4.row.col.f64.f64.f64.f64", 2, 1),
}
"""The instruction by the kind of product, and registers of A and of B; float64 takes sm_90."""
SUMS = {"f16": F32, "bf16": F32, "tf32": F32, "f32": F32, "i8": I32, "f64": F64}
"""The type of a sum; "f32" is the product without tensor cores."""


@cache
def make_mma(kind):
    """mma(acc[4], a, b) -> acc: one step on one warp, of 32 bytes of k."""
    shape, a_words, b_words = MMA[kind]
    total, part = types.UniTuple(SUMS[kind], 4), F64 if kind == "f64" else I32
    a, b = types.UniTuple(part, a_words), types.UniTuple(part, b_words)
    text = (
        f"mma.sync.aligned.{shape} {{{registers(0, 4)}}}, {{{registers(8, a_words)}}}, "
        f"{{{registers(8 + a_words, b_words)}}}, {{{registers(4, 4)}}};"
    )
    return instruction(text, total, total, a, b, effects=False)


@cache
def make_ldmatrix(count, transposed=False):
    """ldmatrix(row address of this lane) -> `count` words: 8 x 8 matrices of 16-bit elements."""
    option = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x{count}{option}.shared.b16 {{{registers(0, count)}}}, [${count}];"
    return instruction(text, words(count), I32)


@cache
def make_pack(kind):
    """pack(low, high) -> a word of two 16-bit floats, each rounded once."""
    return instruction(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", I32, F32, F32, effects=False)


cp_async_16 = instruction("cp.async.cg.shared.global [$0], [$1], 16, $2;", None, I32, I64, I32)
"""(shared, global, bytes to read): 16 bytes, of which those beyond the count become zero."""

cp_async_4 = instruction("cp.async.ca.shared.global [$0], [$1], 4, $2;", None, I32, I64, I32)
cp_async_8 = instruction("cp.async.ca.shared.global [$0], [$1], 8, $2;", None, I32, I64, I32)

cp_async_commit = instruction("cp.async.commit_group;")


@cache
def make_cp_async_wait(pending):
    """Waits until at most `pending` groups of this thread are under way."""
    return instruction(f"cp.async.wait_group {pending};")


load_shared_u32 = instruction("ld.shared.u32 $0, [$1];", I32, I32)
load_shared_f32 = instruction("ld.shared.f32 $0, [$1];", F32, I32)
load_shared_f64 = instruction("ld.shared.f64 $0, [$1];", F64, I32)
load_shared_f64x2 = instruction("ld.shared.v2.f64 {$0, $1}, [$2];", types.UniTuple(F64, 2), I32)
load_shared_f32x4 = instruction("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", floats(4), I32)
load_shared_u32x4 = instruction("ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];", words(4), I32)
load_shared_i64x2 = instruction("ld.shared.v2.s64 {$0, $1}, [$2];", types.UniTuple(types.int64, 2), I32)
store_shared_f32 = instruction("st.shared.f32 [$0], $1;", None, I32, F32)
store_shared_f64 = instruction("st.shared.f64 [$0], $1;", None, I32, F64)
store_shared_u8 = instruction("st.shared.u8 [$0], $1;", None, I32, types.int16)
store_shared_u16 = instruction("st.shared.u16 [$0], $1;", None, I32, types.int16)
store_shared_u32 = instruction("st.shared.u32 [$0], $1;", None, I32, I32)
store_shared_u32x4 = instruction("st.shared.v4.u32 [$0], {$1, $2, $3, $4};", None, I32, words(4))
store_shared_i64x2 = instruction("st.shared.v2.s64 [$0], {$1, $2};", None, I32, I64, I64)
store_global_u32 = instruction("st.global.u32 [$0], $1;", None, I64, I32)
store_global_u32x4 = instruction("st.global.v4.u32 [$0], {$1, $2, $3, $4};", None, I64, words(4))
store_global_u32x2 = instruction("st.global.v2.u32 [$0], {$1, $2};", None, I64, words(2))
store_global_f32x4 = instruction("st.global.v4.f32 [$0], {$1, $2, $3, $4};", None, I64, floats(4))
store_global_f64x2 = instruction("st.global.v2.f64 [$0], {$1, $2};", None, I64, types.UniTuple(F64, 2))
load_shared_u16 = instruction("ld.shared.u16 $0, [$1];", types.int16, I32)
store_global_u16 = instruction("st.global.u16 [$0], $1;", None, I64, types.int16)

atomic_add = instruction("atom.global.add.u32 $0, [$1], $2;", I32, I64, I32)
"""(global address, word) -> the old value."""
named_barrier = instruction("bar.sync $0, $1;", None, I32, I32)
"""(barrier 1 to 15, threads): a rendezvous of part of a block."""
