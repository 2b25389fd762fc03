"""The whole cublas backend without a GPU: the library is the model of cublas_model, the epilogue is host code.

The epilogue's CUDA source is compiled by the machine's C++ compiler behind a few macros and run one
thread after the other; it has no barrier, so the order is free. What stays untested this way is what
only a GPU can show: streams, torch's grouped_mm, and the speed.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multigemm.backend import Availability, Launch, Recipe
from multigemm.backends.cublas import epilogue, launch, library, run, support
from multigemm.backends.cublas.config import Config, reads_sizes
from multigemm.cuda import nvrtc
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec
from tests.cublas_model import ModelCublas

CUDA = torch.device("cuda")
PRELUDE = """
#include <cmath>
#include <cstring>
using namespace std;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
struct Place { int x, y, z; };
static Place blockIdx, threadIdx, gridDim, blockDim;
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
DRIVER = """
extern "C" void run(const Task* t, int blocks, int threads) {
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    for (int b = 0; b < blocks; b++)
        for (int i = 0; i < threads; i++) {
            blockIdx = {b, 0, 0};
            threadIdx = {i, 0, 0};
            finish(*t);
        }
}
"""
PTX = {
    'asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));': "wide = wide_half(half);",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(narrow(value)));': "half = half_of(narrow(value));",
}


class HostKernel:
    """The epilogue for one set of types, as `nvrtc.Kernel` is bound."""

    def __init__(self, source: str, defines: Sequence[str], folder: Path) -> None:
        for ptx, plain in PTX.items():
            assert ptx in source
            source = source.replace(ptx, plain)
        name = hashlib.sha256((source + " ".join(defines)).encode()).hexdigest()[:16]
        built = folder / f"{name}.so"
        if not built.exists():
            (folder / f"{name}.cpp").write_text(PRELUDE + source + DRIVER)
            command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w", *defines]
            subprocess.run([*command, str(folder / f"{name}.cpp"), "-o", str(built)], check=True)
        self._run = ctypes.CDLL(str(built)).run

    def bound(self, blocks: int, threads: int, values: Sequence[Any], keep: object) -> nvrtc.Step:
        def step(stream: int, _keep: object = keep) -> None:
            self._run(ctypes.byref(values[0]), min(blocks, 3), threads)

        return step


class HostCublas:
    """The backend's five members, with CPU operands let through."""

    name = "cublas"

    def __init__(self, variant: str) -> None:
        self._config = Config(variant)  # type: ignore[arg-type]

    def availability(self) -> Availability:
        return Availability(True)

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        return support.not_supported_reasons(spec, CUDA)

    def configs(self, spec: ProblemSpec, device: torch.device) -> list[Any]:
        return [self._config]

    def plan(self, spec: ProblemSpec, config: Any, device: torch.device) -> Recipe:
        def bind(ops: Operands) -> Launch:
            if spec.groups == 0 and spec.form == "per_group":
                return lambda: None
            live = ops.host_offsets is None and ops.host_valid_rows is None
            seen = replace(ops, spec=replace(spec, device_sizes=live))  # on a CPU, live sizes count as the host's
            if reads_sizes(seen.spec, config.variant, CUDA) and (spec.jagged or spec.form == "masked"):
                return lambda: launch._bound(seen, config, launch._fetched(seen))()
            return launch._bound(seen, config, launch.Sizes(ops.host_offsets, ops.host_valid_rows))

        return Recipe(f"model.{config.variant}", config, bind)


def install(monkeypatch: Any, folder: Path) -> None:
    """Puts the models in the places of the library, the driver and the compiler."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the epilogue for the host")
    kernels: dict[Any, HostKernel] = {}

    def kernel(source: str, name: str, defines: tuple[str, ...], device: int) -> HostKernel:
        if defines not in kernels:
            kernels[defines] = HostKernel(source, defines, folder)
        return kernels[defines]

    monkeypatch.setattr(nvrtc, "kernel", kernel)
    monkeypatch.setattr(epilogue, "nvrtc", SimpleNamespace(kernel=kernel))
    monkeypatch.setattr(launch, "cublas", ModelCublas)
    monkeypatch.setattr(library, "cublas", ModelCublas)
    monkeypatch.setattr(run, "handle", lambda: ctypes.c_void_p(1))
    monkeypatch.setattr(run.Steps, "__call__", lambda self: [step(0) for step in self._steps])
