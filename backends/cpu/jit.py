"""Compiles the tile kernel with llvmlite, where it is installed, and runs it on torch's threads.

llvmlite comes with Numba; nothing else of Numba is needed, so neither its import nor its typing is
paid for. The object code is kept on disk. Threads are those of the OpenMP runtime that torch has
loaded: a second pool would compete with it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from multigemm.backends.cpu.tables import Table
from multigemm.cuda.disk_cache import DiskCache, fingerprint
from multigemm.errors import CompileError

OLDEST = (0, 45)
"""The first llvmlite whose LLVM has untyped pointers, which the kernel's intrinsics are named for."""

THREAD_WORK = 1 << 19
"""Multiply-adds that are worth one more thread."""

_LOCK = threading.Lock()
_ENGINES: list[Any] = []  # compiled code lives as long as the process


@lru_cache(maxsize=1)
def missing() -> str:
    """Why tiles cannot be compiled here; empty if they can."""
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed: pip install 'llvmlite>=0.45'"
    version = importlib.metadata.version("llvmlite")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"llvmlite {version} is older than 0.45: pip install -U llvmlite"
    if _fork() is None:
        return "torch runs without an OpenMP runtime here, so tiles would have one thread: use blas or loop"
    return "" if lanes() else "this processor has no fused multiply-add on vectors of float32: use blas or loop"


@lru_cache(maxsize=1)
def _features() -> tuple[str, str, frozenset[str]]:
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    return llvm.get_host_cpu_name(), features.flatten(), frozenset(k for k, present in features.items() if present)


@lru_cache(maxsize=1)
def lanes() -> int:
    """Floats in a vector register; 0 without fused multiply-add."""
    present = _features()[2]
    if "avx512f" in present:
        return 16
    if {"avx2", "fma"} <= present:
        return 8
    return 4 if "neon" in present else 0


@lru_cache(maxsize=1)
def _fork() -> Callable[..., None] | None:
    """OpenMP's way to run a function on all threads of a team, out of what torch has loaded."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            function = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return cast(Callable[..., None], function)
    return None


class _Objects:
    """llvmlite's object cache on top of the disk cache: compiled once per machine and version."""

    def __init__(self, key: str) -> None:
        self._key, self._disk = key, DiskCache("cpu")

    def notify(self, module: Any, code: bytes) -> None:
        self._disk.put(self._key, bytes(code), ".o")

    def get(self, module: Any) -> bytes | None:
        return self._disk.get(self._key, ".o")


@lru_cache(maxsize=16)
def entry(rows: int, vectors: int) -> int:
    """The address of the compiled kernel."""
    with _LOCK:
        return _compile(rows, vectors)


def _compile(rows: int, vectors: int) -> int:
    import llvmlite
    import llvmlite.binding as llvm

    from multigemm.backends.cpu.kernels import source

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features, _ = _features()
    text = source(rows, vectors, lanes(), llvm.get_process_triple())
    objects = _Objects(fingerprint(llvmlite.__version__, cpu, features, text))
    try:
        module = llvm.parse_assembly(text)
        module.verify()
    except RuntimeError as error:
        raise CompileError(f"LLVM rejects the cpu tile kernel {rows}x{vectors}: {error}") from error
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=2)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.set_object_cache(objects.notify, objects.get)
    engine.finalize_object()
    _ENGINES.append((engine, objects))
    return int(engine.get_function_address("work"))


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and vector registers of an accumulator tile."""

    rows: int
    vectors: int


class TileCalls:
    """The products of a table on the tile kernel; `fits` says which ones it can read."""

    def __init__(self, table: Table, tile: Tile) -> None:
        work = table.m * table.n * table.k
        t, order = table, np.argsort(-work, kind="stable")
        straight = t.transb == ord("N")
        row, col = np.where(straight, t.ldb, 1), np.where(straight, 1, t.ldb)
        columns = np.stack((t.n, t.m, t.k, t.b, t.a, t.c, row, col, t.lda, t.ldc))
        self._columns = np.ascontiguousarray(columns[:, order])
        self._counter = np.zeros(1, np.int64)
        step = self._columns.strides[0]
        addresses = (self._columns.ctypes.data + i * step for i in range(len(self._columns)))
        self._arguments = np.array([self._counter.ctypes.data, t.count, *addresses], np.int64)
        self._address, self._entry = self._arguments.ctypes.data, entry(tile.rows, tile.vectors)
        self._most = max(1, int(work.sum()) // THREAD_WORK)
        self._run = _fork()

    @staticmethod
    def fits(table: Table) -> Any:
        """The operand that vectors are loaded from must be contiguous along them."""
        return table.transa == ord("N")

    def __call__(self) -> None:
        self._counter[0] = 0
        self._run(self._entry, self._address, min(self._most, torch.get_num_threads()), 0)  # type: ignore[misc]
