"""Writes fragments.cuh: wgmma with the weight side in registers, one instruction for each width of the row side.

As mma_shapes.py, for kernels whose weights cannot lie in shared memory the way the tensor cores read them.
"""

from __future__ import annotations

NAME = "fragments.cuh"
WIDTHS = range(8, 257, 8)

HEAD = """// Written by fragments.py: d += W x X for 64 columns, N rows and k = 16; W in registers, X in shared memory.
#pragma once
#include "ptx.cuh"
template <int N> struct MmaFragment;
"""


def _one(n: int) -> str:
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


def text() -> str:
    """The header."""
    return HEAD + "".join(f"#if {n} <= ROWS && {n} % STEP == 0\n{_one(n)}#endif\n" for n in WIDTHS)
