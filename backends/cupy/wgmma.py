"""Writes two headers: `Mma<N>::run` and `MmaFragment<N>::run`, one wgmma instruction for each width n of the row side.

An instruction's operand list is as long as its accumulator, so the 32 widths are written by a loop here instead of by
hand; NVRTC receives the texts as headers like the others.
"""

from __future__ import annotations

from collections.abc import Callable

SHARED, REGISTERS = "mma.cuh", "fragments.cuh"
WIDTHS = range(8, 257, 8)


def _guarded(one: Callable[[int], str]) -> str:
    """The instructions of the widths that a kernel has."""
    return "".join(f"#if {n} <= ROWS && {n} % STEP == 0\n{one(n)}#endif\n" for n in WIDTHS)


SHARED_HEAD = """// Written by wgmma.py: d += W x X for 64 columns, N rows and k = 16, both operands in shared memory.
#pragma once
#include "ptx.cuh"
// Registers of one thread: ROWS by 64 columns per warpgroup, or by 128 where warpgroups take turns.
constexpr int ACCUMULATORS = PINGPONG ? ROWS : ROWS / 2;
template <int N, int FIRST> struct Mma;   // FIRST: the accumulator's first register
"""


def _from_shared(n: int) -> str:
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[FIRST + {i}])' for i in range(count))
    kind = "{}.{}"
    lines = []
    for bf16, name in ((1, kind.format("bf16", "bf16")), (0, kind.format("f16", "f16"))):
        lines.append(f"#if BFLOAT == {bf16}" if bf16 else "#else")
        lines.append(
            f'        asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{name} {{{registers}}}, '
            f'%{count}, %{count + 1}, 1, 1, 1, %{count + 2}, %{count + 3};"'
        )
    lines.append("#endif")
    body = "\n".join(lines)
    return (
        f"template <int FIRST> struct Mma<{n}, FIRST> {{\n"
        f"    static __device__ __forceinline__ void run(float (&d)[ACCUMULATORS], u64 w, u64 x) {{\n{body}\n"
        f'                     : {operands}\n                     : "l"(w), "l"(x), "n"(1 - W_K), "n"(1 - X_K));\n'
        "    }\n};\n"
    )


def _cases() -> str:
    """CASES: one CASE(n, products) for each width that this kernel has."""
    lines = []
    for step in (8, 16, 32, 64):
        cases = " ".join(f"CASE({n}, products)" for n in range(step, 257, step))
        lines.append(f"#if STEP == {step}\n#define CASES(products) {cases}\n#endif\n")
    return "".join(lines)


def shared_text() -> str:
    """The header for weights in shared memory."""
    return SHARED_HEAD + _guarded(_from_shared) + _cases()


REGISTER_HEAD = """// Written by wgmma.py: d += W x X for 64 columns, N rows, k = 16; W in registers, X shared.
#pragma once
#include "ptx.cuh"
template <int N> struct MmaFragment;
"""


def _from_registers(n: int) -> str:
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    fragment = ", ".join(f"%{count + i}" for i in range(4))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    lines = []
    for start, name in (("#if BFLOAT", "bf16.bf16"), ("#else", "f16.f16")):
        lines.append(start)
        lines.append(
            f'        asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{name} {{{registers}}}, '
            f'{{{fragment}}}, %{count + 4}, 1, 1, 1, %{count + 5};"'
        )
    body = "\n".join([*lines, "#endif"])
    return (
        f"template <> struct MmaFragment<{n}> {{\n"
        f"    static __device__ __forceinline__ void run(float (&d)[ROWS / 2], const u32* w, u64 x) {{\n{body}\n"
        f'                     : {operands}\n                     : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), '
        f'"l"(x), "n"(1 - X_K));\n'
        "    }\n};\n"
    )


def register_text() -> str:
    """The header for weights in registers, where they cannot lie in shared memory as the tensor cores read it."""
    return REGISTER_HEAD + _guarded(_from_registers)
