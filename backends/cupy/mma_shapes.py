"""Writes mma.cuh: `Mma<N>::run`, one wgmma instruction for each width n of the row side.

An instruction's operand list is as long as its accumulator, so the 32 widths are written by a loop
here instead of by hand; NVRTC receives the text as a header like the others.
"""

from __future__ import annotations

NAME = "mma.cuh"
WIDTHS = range(8, 257, 8)

HEAD = """// Written by mma_shapes.py: d += W x X for 64 columns, N rows and k = 16, both operands in shared memory.
#pragma once
#include "ptx.cuh"
// Registers of one thread: ROWS by 64 columns per warpgroup, or by 128 where warpgroups take turns.
constexpr int ACCUMULATORS = PINGPONG ? ROWS : ROWS / 2;
template <int N, int FIRST> struct Mma;   // FIRST: the accumulator's first register
"""


def _one(n: int) -> str:
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


def text() -> str:
    """The header."""
    return HEAD + "".join(f"#if {n} <= ROWS && {n} % STEP == 0\n{_one(n)}#endif\n" for n in WIDTHS) + _cases()
