"""From CUDA C++ to a loaded function: NVRTC through CuPy, with a disk cache.

A kernel is a source file and a list of definitions. The cache key holds every byte of every source, the options, the
architecture and the compiler's version, so that no entry is ever stale. Compiling needs no GPU; loading does.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from threading import RLock
from typing import NamedTuple

import torch

import multigemm
from multigemm.cuda.device import memory_rate
from multigemm.cuda.disk_cache import DiskCache, fingerprint
from multigemm.cuda.launch import Kernel
from multigemm.errors import CompileError
from multigemm.settings import dump, settings

WORKERS = 8
SOURCES = Path(__file__).parent / "kernels"
FAST_MEMORY = 4e12
"""Bytes per second of memory from which kernels are compiled with FAST_MEMORY: more loads in flight for a long k.
2026-11-23, bf16, 27 workloads with K above 5120: 0.975 of the time on an H200 (4.8e12), 1.012 on an H100 (3.4e12)."""
FASTER = ("hopper.cu", "hopper_fp8.cu")
"""The kernels that gain: float8 with scales of rows takes 0.95 to 0.98 of the time on an H200; others take the same."""
counts: Counter[str] = Counter()
"""How often this process compiled, read from disk and loaded: tests assert that sizes cause none of them."""


class Source(NamedTuple):
    """A kernel to compile: its file, its entry function, its definitions in a fixed order. `shared` is the dynamic
    shared memory of its launches in bytes."""

    file: str
    entry: str
    defines: tuple[tuple[str, int], ...]
    shared: int = 0

    def options(self, arch: str) -> list[str]:
        """All compiler options."""
        extra = ["-lineinfo"] if settings().lineinfo else []
        return [f"-arch={arch}", "-std=c++17", *extra, *(f"-D{name}={value}" for name, value in self.defines)]


@lru_cache(maxsize=1)
def headers() -> tuple[tuple[str, str], ...]:
    """The name and text of every header."""
    written = [(path.name, path.read_text()) for path in sorted(SOURCES.glob("*.cuh"))]
    made = (
        (MMA_HEADER, mma_header), (FRAGMENT_HEADER, fragment_header), (FP8_HEADER, fp8_header),
        (WEIGHTS_HEADER, weights_header),
    )  # fmt: skip
    return (*written, *((name, header()) for name, header in made))


def architecture(capability: tuple[int, int]) -> str:
    """The compiler target for a device. Instructions that only Hopper has need the suffix "a"."""
    return "sm_90a" if capability == (9, 0) else f"sm_{capability[0]}{capability[1]}"


def compile_source(source: Source, arch: str, *extra: str) -> tuple[bytes, str]:
    """Returns cubin and compiler log without any cache. Raises CompileError with the log."""
    from cupy.cuda import nvrtc

    options = [*source.options(arch), *extra]
    text = (SOURCES / source.file).read_text()
    included = [(body.encode(), name.encode()) for name, body in headers()]
    program = nvrtc.createProgram(text, source.file, [body for body, _ in included], [name for _, name in included])
    try:
        nvrtc.compileProgram(program, options)
        cubin = nvrtc.getCUBIN(program) + b"\0"  # CuPy drops the last byte, as if this were text
        log = nvrtc.getProgramLog(program)
        if settings().dump is not None:
            ptx = nvrtc.getPTX(program)
            text_of_ptx = ptx.decode() if isinstance(ptx, bytes) else ptx
            dump(f"cupy-{source.entry}-{arch}-{fingerprint(source)[:8]}", text, text_of_ptx, cubin)
    except nvrtc.NVRTCError as error:
        raise CompileError(f"{source.file} {options}: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    counts["compiled"] += 1
    return cubin, log


def cubin_of(source: Source, arch: str) -> bytes:
    """The cubin of a source, from the disk cache if it is there."""
    from cupy.cuda import nvrtc

    cache = DiskCache("cupy")
    key = fingerprint(
        headers(), (SOURCES / source.file).read_text(), source.options(arch), nvrtc.getVersion(), multigemm.__version__
    )
    found = None if settings().dump else cache.get(key, ".cubin")
    if found is not None:
        counts["from disk"] += 1
        return found
    cubin, _ = compile_source(source, arch)
    cache.put(key, cubin, ".cubin")
    return cubin


_loaded: dict[tuple[Source, int], Kernel] = {}
_loading = RLock()  # a finaliser that calls may run while it is held


def for_memory_of(source: Source, index: int) -> Source:
    """The source of a kernel as it is compiled for the memory of a device."""
    if source.file in FASTER and memory_rate(index) >= FAST_MEMORY:
        return source._replace(defines=(*source.defines, ("FAST_MEMORY", 1)))
    return source


def load(source: Source, index: int) -> Kernel:
    """Loads a kernel on a device: one module for all threads, until the process ends."""
    found = _loaded.get((source, index))
    if found is None:
        arch = architecture(torch.cuda.get_device_capability(index))
        cubin = cubin_of(for_memory_of(source, index), arch)  # outside of the lock: kernels compile side by side
        with _loading:
            found = _loaded.get((source, index))
            if found is None:
                found = _loaded[source, index] = Kernel(cubin, source.entry, index, source.shared)
                counts["loaded"] += 1
    return found


def load_all(sources: Iterable[Source], index: int) -> None:
    """Compiles and loads the kernels that are not loaded yet, in threads: the compiler runs outside of Python's
    lock."""
    missing = [source for source in dict.fromkeys(sources) if (source, index) not in _loaded]
    if not missing:
        return
    with ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool:
        for _ in pool.map(partial(load, index=index), missing):
            pass


# Four headers that are written here: `Mma<N>::run`, `MmaFragment<N>::run`, `MmaWeights<N>::run` and `MmaFp8<N>`, one
# wgmma instruction for each width n of the row side. An operand list is as long as the accumulator, so a loop
# writes the 32 widths.

MMA_HEADER, FRAGMENT_HEADER, FP8_HEADER = "mma.cuh", "fragments.cuh", "mma_fp8.cuh"
WEIGHTS_HEADER = "mma_weights.cuh"
WIDTHS = range(8, 257, 8)


def _guarded(one: Callable[[int], str], most: str = "ROWS") -> str:
    """The instructions for the widths that a kernel has, in preprocessor conditions."""
    return "".join(f"#if {n} <= {most} && {n} % STEP == 0\n{one(n)}#endif\n" for n in WIDTHS)


MMA_HEAD = """// Written by build.py: d += W x X for 64 columns, N rows, 32 bytes of k, both in shared memory.
#pragma once
#include "ptx.cuh"
// Registers of one thread: ROWS by 64 columns per warpgroup, or by 128 where warpgroups take turns.
constexpr int ACCUMULATORS = PINGPONG ? ROWS : ROWS / 2;
template <int N, int FIRST> struct Mma;   // FIRST: the accumulator's first register
"""


class Element(NamedTuple):
    """What wgmma multiplies: the define of kernels for it, the instruction for `n` rows, the constraint of a sum, and
    whether operands may lie across k in shared memory."""

    condition: str
    instruction: str
    sum: str = "f"
    across: bool = True


HALVES = (
    Element("BFLOAT", "m64n{n}k16.f32.bf16.bf16"),
    Element("", "m64n{n}k16.f32.f16.f16"),
)
ELEMENTS = (
    Element("TF32", "m64n{n}k8.f32.tf32.tf32", across=False),
    Element("INT8", "m64n{n}k32.s32.s8.s8", "r", across=False),
    *HALVES,
)


def _of_each(elements: tuple[Element, ...], code: Callable[[Element], str]) -> str:
    """The code for the element type of a kernel; the code of the last type if the kernel defines none."""
    parts = []
    for i, element in enumerate(elements):
        parts.append("#else" if not element.condition else f"#{'el' if i else ''}if {element.condition}")
        parts.append(code(element))
    return "\n".join([*parts, "#endif"])


def _mma(element: Element, n: int) -> str:
    """The text of the instruction up to its accumulators."""
    registers = ", ".join(f"%{i}" for i in range(n // 2))
    return f"wgmma.mma_async.sync.aligned.{element.instruction.format(n=n)} {{{registers}}}"


def _accumulators(n: int, first: str = "", letter: str = "f") -> str:
    """The accumulator operands of an instruction."""
    return ", ".join(f'"+{letter}"(d[{first}{i}])' for i in range(n // 2))


def _fragment(n: int) -> str:
    """The four registers of weights after the accumulators."""
    return ", ".join(f"%{n // 2 + i}" for i in range(4))


FRAGMENT_OPERANDS = '"r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])'


def _product(element: Element, n: int, first: str, weights: str, operands: str, across: tuple[str, ...]) -> str:
    """The text of an instruction that accumulates: `weights` and `operands` name W's operands, `across` says which
    operands may be contiguous across k."""
    x = n // 2 + operands.count("(w")
    if element.across:
        flags = f", 1, 1, 1, {', '.join(f'%{x + 1 + i}' for i in range(len(across)))}"
        more = "".join(f', "n"(1 - {side})' for side in across)
    else:
        flags, more = ", 1" if element.sum == "r" else ", 1, 1, 1", ""  # sums of integers have no signs to choose
    return (
        f'        asm volatile("{_mma(element, n)}, {weights}, %{x}{flags};"\n'
        f"                     : {_accumulators(n, first, element.sum)}\n"
        f'                     : {operands}, "l"(x){more});'
    )


def _from_shared(n: int) -> str:
    def code(element: Element) -> str:
        return _product(element, n, "FIRST + ", f"%{n // 2}", '"l"(w)', ("W_K", "X_K"))

    return (
        f"template <int FIRST> struct Mma<{n}, FIRST> {{\n"
        "    static __device__ __forceinline__ void run(Sum (&d)[ACCUMULATORS], u64 w, u64 x) {\n"
        f"{_of_each(ELEMENTS, code)}\n    }}\n}};\n"
    )


def _cases() -> str:
    """The macro CASES: one CASE(n, products) for each width that this kernel has."""
    lines = []
    for step in (8, 16, 32, 64):
        cases = " ".join(f"CASE({n}, products)" for n in range(step, 257, step))
        lines.append(f"#if STEP == {step}\n#define CASES(products) {cases}\n#endif\n")
    return "".join(lines)


def mma_header() -> str:
    """The header for weights in shared memory."""
    return MMA_HEAD + _guarded(_from_shared) + _cases()


FRAGMENT_HEAD = """// Written by build.py: d += W x X, 64 columns, N rows, 32 bytes of k; W in registers, X not.
#pragma once
#include "ptx.cuh"
template <int N> struct MmaFragment;
"""


def _from_registers(n: int) -> str:
    def code(element: Element) -> str:
        return _product(element, n, "", f"{{{_fragment(n)}}}", FRAGMENT_OPERANDS, ("X_K",))

    return (
        f"template <> struct MmaFragment<{n}> {{\n"
        "    static __device__ __forceinline__ void run(Sum (&d)[ROWS / 2], const u32* w, u64 x) {\n"
        f"{_of_each(ELEMENTS, code)}\n    }}\n}};\n"
    )


def fragment_header() -> str:
    """The header for weights in registers, for layouts that the tensor cores cannot read from shared memory."""
    return FRAGMENT_HEAD + _guarded(_from_registers)


WEIGHTS_HEAD = """// Written by build.py: d = W x X, or with `keep` d += W x X, for 64 columns, N rows and k = 16; W in
// registers, X in shared memory along k.
#pragma once
#include "ptx.cuh"
template <int N> struct MmaWeights;
"""


def _of_weights(n: int) -> str:
    count = n // 2
    keep = f"{{\\n.reg .pred keep;\\nsetp.ne.b32 keep, %{count + 5}, 0;\\n"

    def code(element: Element) -> str:
        return (
            f'        asm volatile("{keep}{_mma(element, n)}, {{{_fragment(n)}}}, %{count + 4}, keep, 1, 1, 0;\\n}}"\n'
            f"                     : {_accumulators(n)}\n"
            f'                     : {FRAGMENT_OPERANDS}, "l"(x), "r"(keep));'
        )

    return (
        f"template <> struct MmaWeights<{n}> {{\n"
        "    template <int COUNT> static __device__ __forceinline__ "
        f"void run(float (&d)[COUNT], const u32 (&w)[4], u64 x, int keep) {{\n"
        f"{_of_each(HALVES, code)}\n    }}\n}};\n"
    )


def weights_header() -> str:
    """The header for quantised weights, which are converted in registers."""
    return WEIGHTS_HEAD + _guarded(_of_weights)


FP8_HEAD = """// Written by build.py: W x X for 64 columns, N rows and k = 32 of float8, both in shared memory along k.
// `start` writes the products, `add` adds them to what is there; `_traded`: the other side has 64 lines, X x W.
#pragma once
#include "ptx.cuh"
#define FP8_NAME_0 "e4m3"
#define FP8_NAME_1 "e5m2"
#define FP8_NAMED(e5m2) FP8_NAME_##e5m2
#define FP8_NAME(e5m2) FP8_NAMED(e5m2)
template <int N> struct MmaFp8;
"""


def _of_fp8(n: int) -> str:
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    functions = []
    traded = (("", "W", "X"), ("_traded", "X", "W"))
    for (name, adds, access), (suffix, first, second) in product((("start", 0, "="), ("add", 1, "+")), traded):
        operands = ", ".join(f'"{access}f"(d[{i}])' for i in range(count))
        functions.append(
            f"    static __device__ __forceinline__ void {name}{suffix}(float (&d)[{count}], u64 w, u64 x) {{\n"
            f'        asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k32.f32." FP8_NAME({first}_E5M2) "." '
            f'FP8_NAME({second}_E5M2) " {{{registers}}}, '
            f'%{count}, %{count + 1}, {adds}, 1, 1;"\n'
            f'                     : {operands}\n                     : "l"(w), "l"(x));\n    }}\n'
        )
    return f"template <> struct MmaFp8<{n}> {{\n{''.join(functions)}}};\n"


def fp8_header() -> str:
    """The header for float8 on both sides."""
    return FP8_HEAD + _guarded(_of_fp8, "(ROWS > TILE_COLUMNS ? ROWS : TILE_COLUMNS)")
