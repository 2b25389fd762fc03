"""Cupy's kernels for quantised operands, fused problems and unaligned weights on a CPU, from their own sources.

Threads are fibers (threads.h), and the functions that are one PTX instruction each are replaced by functions of C++
(mma_sync.h, ptx.h).
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from multigemm.backend import Availability, Recipe
from multigemm.backends.cupy import (
    arguments,
    fused,
    generic,
    hopper,
    hopper_fp8,
    hopper_shift_b,
    hopper_weights,
    quantised,
)
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy.build import SOURCES, Source
from multigemm.backends.cupy.config import Config
from multigemm.cuda import operand_maps
from multigemm.cuda.arguments import Fields, fields
from multigemm.planning.fused import products_spec
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec
from tests.support.compiled_before import compiled_before

HERE = Path(__file__).parent
RUN_QUANTISED = """
inline char* dynamic_shared() { return nullptr; }
extern "C" void run(const Problem* p, const Grids* g, int grid, int threads, const float*) {
    gridDim.x = grid;
    for (int b = 0; b < grid; ++b) run_blocks(b, 1, threads, [=] { quantised(*p, *g); });
}
"""
RUN_GENERIC = """
inline char* dynamic_shared() { return generic_shared; }
extern "C" void run(const Given* p, int grid, int threads, const float*) {
    gridDim.x = grid;
    for (int b = 0; b < grid; ++b) {
        memset(generic_shared, 0xFF, sizeof generic_shared);
        run_blocks(b, 1, threads, [=] { generic(*p); });
        if (!all_copies_waited_for()) fail("a copy that nobody waited for");
    }
}
"""
RUN_SUM = """
inline char* dynamic_shared() { return nullptr; }
extern "C" void run(const Sum* s, int grid, int threads, const float*) {
    gridDim.x = grid;
    for (int b = 0; b < grid; ++b) run_blocks(b, 1, threads, [=] { sum_rows(*s); });
}
"""
RUN_COPIES = """
inline char* dynamic_shared() { return nullptr; }
extern "C" void run(ARGUMENTS, int grid, int threads, const float*) {
    gridDim.x = grid;
    for (int b = 0; b < grid; ++b) run_blocks(b, 1, threads, [=] { LAUNCH; });
}
"""
COPIES = {
    "k_major": "#define ARGUMENTS const Problem* p, const KMajor* to\n#define LAUNCH k_major(*p, *to)\n",
    "pack": "#define ARGUMENTS const Job* j\n#define LAUNCH pack(*j)\n",
    "pack_ragged": "#define ARGUMENTS const Problem* p, const Copy* c\n#define LAUNCH pack_ragged(*p, *c)\n",
}
RUN_HOPPER = """
extern "C" void run(
    const Given* p, const Launch* l, PARAMETERS const Maps* m, int grid, int threads, const float* numbers) {
    gridDim.x = grid, between = some_arrive, cluster_threads = CLUSTER * threads;
    memcpy(numbers_of_codes, numbers, sizeof numbers_of_codes);
    for (int b = 0; b < grid; b += CLUSTER) {
        for (int rank = 0; rank < CLUSTER; ++rank) {
            if (!shared_memory[rank]) shared_memory[rank] = (char*)malloc(SIZE);
            memset(shared_memory[rank], 0xFF, SIZE), memset(counters[rank], 0, sizeof counters[rank]);
        }
        other_loads = early_loads = 0;
        memset(named_barriers, 0, sizeof named_barriers);       // the last tile lets a warpgroup go on that has none
        run_blocks(b, CLUSTER, threads, [=] { LAUNCH; });
        if (one_side_is_copied && other_loads && !early_loads) fail("loads that waited for copies of the other side");
        for (auto& some : counters)
            for (auto& c : some)
                if (c.made && (c.bytes || c.pending != c.expected)) fail("a barrier between two phases at the end");
    }
}
"""
SHIFTED = """
inline void name_copies(const TensorMap* x, const TensorMap* w, int groups, int copied) {
    copied_maps[0][0] = x, copied_maps[0][1] = x + (copied & 1 ? LISTED ? 2 * groups : 17 : 0);
    copied_maps[1][0] = w, copied_maps[1][1] = w + (copied & 2 ? LISTED ? 8 * groups : 8 : 0);
    one_side_is_copied = copied == 1 || copied == 2;
}
#define PARAMETERS const Maps* maps, const WeightMaps* weights,
#define LAUNCH { \\
    const Eighths& e = *(const Eighths*)m; \\
    name_copies(LISTED ? l->listed : &maps->w, LISTED ? e.listed : weights->map, p->groups, e.copied); \\
    hopper_shift_b(*p, *l, *maps, *weights, e); }
"""
HALVES = "#define PARAMETERS\n#define LAUNCH hopper(*p, *l, *m)\n"
BODIES = {
    "common.cuh": {
        "uint4 load_16_bytes(const void* from)": 'if ((u64)from & 15) fail("misaligned"); return *(const uint4*)from;',
        "float to_float(f16 x)": "return of_f16(x.bits);",
        "u16 f16_bits(float x)": "return u16(f16_of(x));",
        "u16 f16_bits(double x)": "const _Float16 y = _Float16(x); u16 bits; memcpy(&bits, &y, 2); return bits;",
        "void copy_async(u32 to, const void* from)": "copy_later(dynamic_shared() + to, (const char*)from, 16, 16);",
        "void copy_async(u32 to, const void* from, int bytes)": (
            "copy_later(dynamic_shared() + to, (const char*)from, 16, bytes);"
        ),
        "void copy_async_if(u32 flags, u32 one, u32 to, const void* from)": (
            "copy_later(dynamic_shared() + to, (const char*)from, 16, flags & one ? 16 : 0);"
        ),
        "void copy_part(u32 to, const char* from, int bytes)": "copy_later(dynamic_shared() + to, from, WIDTH, bytes);",
        "void copy_all(u32 to, const char* from)": "copy_later(dynamic_shared() + to, from, WIDTH, WIDTH);",
        "void commit_copies()": "close_group();",
        "void wait_for_copies()": "wait_for_groups(PENDING);",
        "u16 bf16_bits(float x)": "return u16(bf16_of(x));",
        "u32 pack_f16(float low, float high)": "return f16_of(low) | f16_of(high) << 16;",
        "u32 pack_bf16(float low, float high)": "return bf16_of(low) | bf16_of(high) << 16;",
        "void wait_for_last_launch()": "wait_for_launch_before();",
        "u32 shared_address(const void* p)": "return u32((const char*)p - dynamic_shared());",
    },
    "consume.cuh": {
        "void sync_consumers()": "named_sync(4, 256);",
        "void let_other(int half)": "named_arrive(6 - half, 256);",
        "void wait_for_other(int half)": "named_sync(5 + half, 256);",
        "void clear(float (&d)[COUNT])": "for (float& x : d) x = 0;",
        "void clear(int (&d)[COUNT])": "for (int& x : d) x = 0;",
        "void settle(float (&d)[COUNT], int count)": "",
    },
    "turned_weights.cuh": {
        "void load_pair(u32& low, u32& high, u32 address)": (
            "const u64 v = load_shared_as<u64>(address); low = u32(v), high = u32(v >> 32);"
        ),
        "void load_transposed(u32 (&v)[4], u32 address)": "load_matrices(v, address);",
    },
    "consume_f64.cuh": {
        "Pair64 load_pair(u32 address)": "return load_shared_as<Pair64>(address);",
        "double load_double(u32 address)": "return load_shared_as<double>(address);",
    },
    "load.cuh": {
        "void ask_for_tile(Shared&)": "named_arrive(7, 64);",
        "void wait_for_ask()": "named_sync(7, 64);",
    },
    "consume_fp8.cuh": {
        "float4 load_shared_scales(u32 address)": "return load_shared_as<float4>(address);",
    },
    "gated.cuh": {
        "float power_of_2(float x)": "return exp2f(x);",
        "float reciprocal(float x)": "return 1.0f / x;",
    },
    "picked_rows.cuh": {
        "const char* line_at(const char* base, u32 line, u32 pitch)": "return base + u64(line) * pitch;",
    },
    "weights.cuh": {
        "u32 multiply_pairs(u32 a, u32 b)": "return of_pairs(a, b, [](float x, float y) { return x * y; });",
        "u32 subtract_pairs(u32 a, u32 b)": "return of_pairs(a, b, [](float x, float y) { return x - y; });",
        "u32 fma_pairs(u32 a, u32 b, u32 c)": (
            "return of_pairs(a, b, c, [](float x, float y, float z) { return fmaf(x, y, z); });"
        ),
        "u32 chosen_bits(u32 mask, u32 a, u32 b)": "return (a & mask) | (b & ~mask);",
        "u32 halves_of_e4m3(u32 codes)": (
            "const float* const of = numbers_of_codes[0];"
            " return f16_of(of[codes & 255]) | f16_of(of[codes >> 8 & 255]) << 16;"
        ),
    },
    "hopper_shift_b.cu": {
        "void sync_shifters()": "named_sync(3, SHIFTING * 32);",
    },
    "hopper_fp8.cu": {
        "void copy_number(u32 to, const void* from)": "memcpy(at(to), from, 4);",
    },
}
"""Functions of the kernels that are inline PTX, and what they do on a host."""
ROWS = (
    "memcpy(&v, at(from + ((((e >> 3) & 7) ^ (r & 7)) << 4) + (e & 7) * 2), 2);",
    "if (wanted && exists && e < cols) memcpy(line + e * 2, &v, 2);",
    "if (exists && c >= whole && c < end) memcpy(line + c * 16 - past, &v, 16);",
    "if (r >= skip && r < rows && e + 8 <= cols) {"
    'if (u64(line_of(r) + e * 2) & 15) fail("a piece that is not aligned"); memcpy(line_of(r) + e * 2, &v, 16); }',
    "memcpy(&v, at(place(r, e >> 3) + (e & 7) * 2), 2);",
    "if (wanted && r >= skip && r < rows && e < cols) memcpy(line_of(r) + e * 2, &v, 2);",
)
"""The inline PTX of rows.cuh, in its order."""
NUMBERS = np.stack(
    [torch.arange(256, dtype=torch.uint8).view(x).float().numpy() for x in (torch.float8_e4m3fn, torch.float8_e5m2)]
)


COMPILER = ("g++", "-std=gnu++20", "-w", "-Wno-psabi", "-ftrivial-auto-var-init=pattern", "-fPIC",
            "-fvisibility-inlines-hidden", "-fno-exceptions", "-fno-rtti",
            "-fno-asynchronous-unwind-tables", "-mf16c")  # fmt: skip
"""Nothing is thrown, and who unwinds a stack is no part of a kernel: without, the compiler takes a seventh less."""


def level_of(source: Source) -> str:
    """How far a kernel is optimized. A kernel for weights takes longer to compile than to run: products and copies are
    optimized in any case."""
    return "-O0" if source.entry == "hopper_weights" else "-Og"


def can_run() -> bool:
    """Whether this machine compiles what switches from fiber to fiber."""
    return platform.machine() == "x86_64" and shutil.which("g++") is not None


def _with_body(text: str, signature: str, body: str) -> str:
    """A function with another body."""
    start = text.index("{", text.index(signature) + len(signature))
    end, depth = start, 0
    while True:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
        if depth == 0:
            return f"{text[:start]}{{ {body} }}{text[end:]}"


def _without_asm(text: str, instead: Sequence[str] = ()) -> str:
    """Inline PTX replaced one by one; what is left over ends the run."""
    left, found, at = iter(instead), list[str](), 0
    for statement in re.finditer(r"\basm(?: volatile)?\s*\(", text):
        found += [text[at : statement.start()], next(left, 'fail("inline PTX");')]
        at, depth = statement.end(), 1
        while depth:  # strings of PTX hold pairs of parentheses only
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        at += 1
    return "".join([*found, text[at:]])


@cache
def _rewritten(path: Path) -> str:
    text = path.read_text()
    for signature, body in BODIES.get(path.name, {}).items():
        text = _with_body(text, signature, body)
    return _without_asm(text, ROWS if path.name == "rows.cuh" else ())


@cache
def precompiled_threads(level: str) -> TemporaryDirectory[str]:
    """A folder with threads.h, precompiled for a level: its standard headers take a fourth of a kernel's time."""
    folder = TemporaryDirectory(prefix="multigemm-emulation-")
    subprocess.run(
        [*COMPILER, level, "-x", "c++-header", str(HERE / "threads.h"), "-o", f"{folder.name}/threads.h.gch"],
        check=True,
    )
    return folder


def compiled(source: Source, folder: Path) -> ctypes.CDLL:
    """A kernel as a library of the host, whose variables are its own."""
    for path in SOURCES.glob("*.cuh"):
        (folder / path.name).write_text(_rewritten(path))
    common = folder / "common.cuh"
    common.write_text("inline char* dynamic_shared();\n" + common.read_text())
    step = dict(source.defines).get("STEP", 16)
    cases = " ".join(f"CASE({n}, products)" for n in range(step, 257, step))
    mma = (HERE / "wgmma.h").read_text()
    (folder / "mma.cuh").write_text(f"{mma}#define CASES(products) {cases}\n")
    for name in ("mma_fp8.cuh", "mma_weights.cuh", "fragments.cuh"):
        (folder / name).write_text("#pragma once\n")
    for name, file in (("tensor_cores.cuh", "mma_sync.h"), ("ptx.cuh", "ptx.h")):
        (folder / name).write_text((HERE / file).read_text())
    text = _rewritten(SOURCES / source.file).replace("extern __shared__ char raw[];", "char* const raw = at(BASE);")
    text = text.replace("extern __shared__ __align__(16) char shared[];", "char* const shared = generic_shared;")
    grids = {"hopper_fp8": "SideGrids", "hopper_weights": "WeightGrids"}.get(source.entry)
    shared = "inline char* dynamic_shared() { return shared_memory[local_block()] - BASE; }\n"
    if grids:
        text += (
            shared
            + f"#define PARAMETERS const {grids}* g,\n#define LAUNCH {source.entry}(*p, *l, *g, *m)\n"
            + RUN_HOPPER
        )
    else:
        runs = {
            **{name: copies + RUN_COPIES for name, copies in COPIES.items()},
            "generic": RUN_GENERIC, "sum_rows": RUN_SUM, "hopper": shared + HALVES + RUN_HOPPER,
            "hopper_shift_b": shared + SHIFTED + RUN_HOPPER,
        }  # fmt: skip
        text += runs.get(source.entry, RUN_QUANTISED)
    (folder / "kernel.cpp").write_text('#include "threads.h"\n' + text)
    library = folder / "kernel.so"
    defines = [f"-D{name}={value}" for name, value in source.defines]
    level = level_of(source)

    def built() -> bytes:
        places = (f"-I{precompiled_threads(level).name}", f"-I{HERE}", f"-I{folder}")
        subprocess.run(
            [*COMPILER, level, "-shared", *places, *defines, str(folder / "kernel.cpp"), "-o", str(library)], check=True
        )
        return library.read_bytes()

    texts = [(path.name, path.read_text()) for path in (HERE / "threads.h", *sorted(folder.iterdir()))]
    library.write_bytes(compiled_before(built, COMPILER, level, defines, texts))
    return ctypes.CDLL(str(library))


def _encoded(
    dtype: torch.dtype,
    address: int,
    extents: Sequence[int],
    strides: Sequence[int],
    boxes: Any,
    *,
    swizzle: int = 3,
    promotion: int = 3,
) -> Fields:
    """Tensor maps as ptx.h reads them."""
    made = bytearray()
    for box in boxes:
        assert address % 16 == 0 and all(x % 16 == 0 for x in strides)
        assert box[0] * dtype.itemsize <= (128 if swizzle else 512)
        words = [address, len(extents) | dtype.itemsize << 8 | swizzle << 16]
        for values, count in ((extents, 5), (strides, 4), (box, 5)):
            words += [*(int(x) % 2**64 for x in values), *[1] * (count - len(values))]
        made += struct.pack("<16Q", *words)
    return fields(bytes(made), ())


class _Kernel:
    """What `build.load` gives, on a host."""

    index = 0

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def resident_clusters(self, cluster: int, threads: int, shared: int) -> int:
        return 3

    def bound(
        self, given: Sequence[Any], *, grid: int, threads: int, keep: Sequence[object] = (), **_: Any
    ) -> Callable[[], None]:
        """A launch; arguments begin at multiples of 64 bytes."""
        held: list[tuple[object, int]] = [(keep, 0)]
        for argument in given:
            raw = argument if isinstance(argument, bytes) else b"".join(argument)
            memory = np.zeros(len(raw) + 64, np.uint8)
            skipped = -memory.ctypes.data % 64
            memory[skipped : skipped + len(raw)] = np.frombuffer(raw, np.uint8)
            held.append((memory, memory.ctypes.data + skipped))

        def launch() -> None:
            pointers = [ctypes.c_void_p(at) for _, at in held[1:]]
            self._library.run(*pointers, grid, threads, ctypes.c_void_p(NUMBERS.ctypes.data))

        return launch


class _Words:
    """The counters of clusters, which each launch leaves as it found them."""

    memory = np.zeros(16, np.int32)

    def __init__(self, index: int, count: int) -> None:
        assert not self.memory.any()
        self.address = self.memory.ctypes.data

    def pin(self) -> None:
        """Nothing is captured here."""


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """From here on kernels are compiled for the host, into folders of this one."""

    @cache
    def load(source: Source, index: int) -> _Kernel:
        own = folder / str(len(list(folder.iterdir())))
        own.mkdir()
        return _Kernel(compiled(source, own))

    for module in (quantised, hopper_fp8, hopper_weights, hopper_shift_b, hopper, generic, fused):
        monkeypatch.setattr(module, "load", load)
    for module in (generic, hopper, hopper_fp8):
        monkeypatch.setattr(module, "processors", lambda index: 3)
    monkeypatch.setattr(hopper, "Words", _Words)
    monkeypatch.setattr(hopper, "ready", lambda index, count: None)
    for binder in (hopper, hopper_fp8, hopper_weights, hopper_shift_b):
        monkeypatch.setattr(binder, "on_device", lambda index: nullcontext())
    for target in (operand_maps, hopper_weights, arguments):
        monkeypatch.setattr(target, "encode_together", _encoded)


KERNELS: dict[str, Any] = {
    "quantised": quantised.Quantised,
    "hopper_fp8": hopper_fp8.HopperFp8,
    "hopper_weights": hopper_weights.HopperWeights,
    "generic": generic.Generic,
    "hopper": hopper.Hopper,
    "packed": hopper.CopiedHopper,
    "hopper_gather": hopper.Hopper,
    "gathered": hopper.GatheredHopper,
    "hopper_shift_a": hopper_shift_b.HopperShiftB,
    "hopper_shift_b": hopper_shift_b.HopperShiftB,
}


class EmulatedBackend:
    """One config of the backend, for `multigemm.testing`."""

    name = "emulated"
    batch_invariant = True
    takes_quantised = True
    takes_fused = True

    def __init__(self, config: Config) -> None:
        self._config = config

    def availability(self) -> Availability:
        """Always here."""
        return Availability(True, emulated=True)

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        """What the config cannot run."""
        return [] if configs.is_valid(self._config, spec) else ["not for this config"]

    def configs(self, spec: ProblemSpec, device: torch.device) -> list[Config]:
        """The one."""
        return [self._config]

    def plan(self, spec: ProblemSpec, config: Config, device: torch.device) -> Recipe:
        """As `launch.plan`, without a GPU."""
        kernel = KERNELS[config.kernel](products_spec(spec), config, 0)
        bind_all = fused.summed(spec, kernel.bind, 0)

        def bind(ops: Operands) -> Callable[[], object]:
            outs = ops.out if isinstance(ops.out, list) else [ops.out]
            preacts = [] if ops.fused is None else ops.fused.preacts()
            return bind_all(ops) if any(x.numel() for x in [*outs, *preacts]) else lambda: None

        return Recipe(config.kernel, config, bind)
