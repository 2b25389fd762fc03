"""CUDA C++ kernels as host code, which the machine's C++ compiler makes of them.

A kernel without a barrier runs one thread after the other, one with a barrier in threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multigemm.cuda.arguments import words
from multigemm.planning import fused_steps
from tests.support.compiled_before import compiled_before

PRELUDE = """
#include <cmath>
#include <cstring>
using namespace std;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
struct Place { int x, y, z; };
struct alignas(16) int4 { int x, y, z, w; };
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static Place blockIdx, gridDim, blockDim;
static thread_local Place threadIdx;
static float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned v; memcpy(&v, &f, 4); return v; }
static float __double2float_rz(double d) {
    float f = (float)d;
    if (fabs((double)f) > fabs(d)) f = nextafterf(f, 0.0f);
    return f;
}
static float __fdividef(float a, float b) { return a / b; }
static float wide_half(unsigned short v) { _Float16 h; memcpy(&h, &v, 2); return (float)h; }
static unsigned short half_of(float f) { _Float16 h = (_Float16)f; unsigned short v; memcpy(&v, &h, 2); return v; }
"""
ONE_BY_ONE = """
extern "C" void run(const ARGUMENT* argument, int blocks, int threads) {
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    for (int b = 0; b < blocks; b++)
        for (int i = 0; i < threads; i++) {
            blockIdx = {b, 0, 0};
            threadIdx = {i, 0, 0};
            KERNEL(*argument);
        }
}
"""
BARRIER = """
#include <algorithm>
#include <barrier>
#include <thread>
#include <vector>
static std::barrier<>* together;
static void __syncthreads() { together->arrive_and_wait(); }
"""
IN_THREADS = """
extern "C" void run(const ARGUMENT* argument, int blocks, int threads) {
    const int count = min(threads, (argument->groups + 31) / 32 * 32);
    gridDim = {blocks, 1, 1};
    blockDim = {count, 1, 1};
    for (int b = 0; b < blocks; b++) {
        barrier<> all(count);
        vector<thread> running;
        together = &all;
        blockIdx = {b, 0, 0};
        for (int i = 0; i < count; i++) running.emplace_back([=] { threadIdx = {i, 0, 0}; KERNEL(*argument); });
        for (thread& each : running) each.join();
    }
}
"""
HALVES = {
    'asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));': "wide = wide_half(half);",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(narrow(value)));': "half = half_of(narrow(value));",
}
"""PTX of conversions, and the same in C++."""
ARGUMENTS = {"gather_rows": "Gather", "finish_rows": "Finish", "sum_rows": "Sum"}
"""The type of the argument of each kernel of `planning/fused_steps.cu`."""


def need_compiler() -> None:
    """Skips a test where there is no C++ compiler."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the kernels for the host")


def host_kernel(source: str, name: str, argument: str, defines: Sequence[str], folder: Path) -> Callable[..., None]:
    """A kernel as a function of its argument's address, blocks and threads. What was built stays in the folder."""
    waits = "__syncthreads" in source
    for ptx, plain in HALVES.items():
        assert ptx in source or "cvt." not in source
        source = source.replace(ptx, plain)
    run = (IN_THREADS if waits else ONE_BY_ONE).replace("ARGUMENT", argument).replace("KERNEL", name)
    source = (BARRIER if waits else "") + PRELUDE + source + run
    stem = folder / hashlib.sha256((source + " ".join(defines)).encode()).hexdigest()[:16]
    built = stem.with_suffix(".so")
    if not built.exists():
        # `if constexpr` is an extension of C++14, whose <cmath> is a quarter as long as from C++17 on
        standard = "-std=c++20" if waits else "-std=c++14"
        command = ["g++", standard, "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-w", *defines]

        def compiled() -> bytes:
            stem.with_suffix(".cpp").write_text(source)
            subprocess.run([*command, str(stem.with_suffix(".cpp")), "-o", str(built)], check=True)
            return built.read_bytes()

        built.write_bytes(compiled_before(compiled, command, source))
    made: Callable[..., None] = ctypes.CDLL(str(built)).run
    return made


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Steps of fused problems run on host memory; returns the names of the kernels that were bound."""
    need_compiler()
    bound: list[str] = []

    def on_host(
        name: str, defines: dict[str, int], index: int, values: list[Any], lines: int, width: int, ops: Any,
        keep: tuple[object, ...] = (),
    ) -> Callable[[], None]:  # fmt: skip
        options = [f"-D{key}={value}" for key, value in sorted(defines.items())]
        run = host_kernel(fused_steps.SOURCE, name, ARGUMENTS[name], options, folder)
        block = np.frombuffer(words(*values), np.int64).copy()
        bound.append(name)

        def launch(_keep: object = (keep, ops)) -> None:
            run(block.ctypes.data_as(ctypes.c_void_p), max(1, min(lines, 3)), min(fused_steps.THREADS, max(1, width)))

        return launch

    monkeypatch.setattr(fused_steps, "_bound", on_host)
    return bound
