"""Small CUDA kernels as host code, which the machine's C++ compiler makes of their source: without barriers one thread
after the other, with barriers in threads."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

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
extern "C" void run(const void* argument, int blocks, int threads) {
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    for (int b = 0; b < blocks; b++)
        for (int i = 0; i < threads; i++) {
            blockIdx = {b, 0, 0};
            threadIdx = {i, 0, 0};
            KERNEL(*(const ARGUMENT*)argument);
        }
}
"""
THREADS = """
#include <algorithm>
#include <barrier>
#include <thread>
#include <vector>
static std::barrier<>* together;
static void __syncthreads() { together->arrive_and_wait(); }
"""
IN_THREADS = """
extern "C" void run(const void* argument, int blocks, int threads) {
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    for (int b = 0; b < blocks; b++) {
        barrier<> all(threads);
        vector<thread> running;
        together = &all;
        blockIdx = {b, 0, 0};
        for (int i = 0; i < threads; i++)
            running.emplace_back([=] { threadIdx = {i, 0, 0}; KERNEL(*(const ARGUMENT*)argument); });
        for (thread& each : running) each.join();
    }
}
"""
PTX = {
    'asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));': "wide = wide_half(half);",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(narrow(value)));': "half = half_of(narrow(value));",
}


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kernels-on-host-")


@cache
def host_function(source: str, kernel: str, argument: str, defines: Sequence[str]) -> Callable[..., None]:
    """A kernel as a function of the address of its argument, blocks and threads; compiled once in this process."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the kernels for the host")
    for ptx, plain in PTX.items():
        source = source.replace(ptx, plain)
    waits = "__syncthreads" in source
    run = (IN_THREADS if waits else ONE_BY_ONE).replace("KERNEL", kernel).replace("ARGUMENT", argument)
    source = (THREADS if waits else "") + PRELUDE + source + run
    stem = Path(_folder().name) / hashlib.sha256((source + " ".join(defines)).encode()).hexdigest()[:16]
    stem.with_suffix(".cpp").write_text(source)
    # `if constexpr` is an extension of C++14, whose <cmath> is a quarter as long as from C++17 on
    standard = "-std=c++20" if waits else "-std=c++14"
    command = ["g++", standard, "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-w", *defines]
    subprocess.run([*command, f"{stem}.cpp", "-o", f"{stem}.so"], check=True)
    run_kernel: Callable[..., None] = ctypes.CDLL(f"{stem}.so").run
    return run_kernel
