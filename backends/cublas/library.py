"""The cuBLAS that torch has loaded, called directly: torch's own wrappers obey process-wide switches.

`torch.backends.cuda.matmul.*` decide, for every thread, whether torch.mm may use tf32 or round
partial sums to 16 bits. A direct call says so in its own compute type and in the math mode of the
handle, which belongs to one thread: it is set for the length of a launch and put back. Handle,
stream and workspace are torch's. The 64-bit entry points carry any extent or leading dimension.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from multigemm import torch_internals
from multigemm.errors import LibraryError

NO_LOAD = getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW
"""A library is found only where torch has loaded it already: never a second copy."""
NO_TRANSPOSE, TRANSPOSE = 0, 1
REAL_TYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.int32: 10,
    torch.bfloat16: 14,
}
COMPUTE_32F, COMPUTE_64F, COMPUTE_32I, COMPUTE_TF32 = 68, 70, 72, 77
DEFAULT_ALGORITHM = -1
EXACT_MATH = 16
"""CUBLAS_DEFAULT_MATH with CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: no tf32, no 16-bit partial sums."""

STATUS = {
    1: "NOT_INITIALIZED",
    3: "ALLOC_FAILED",
    7: "INVALID_VALUE",
    8: "ARCH_MISMATCH",
    11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR",
    15: "NOT_SUPPORTED",
    16: "LICENSE_ERROR",
}

Status = Callable[..., int]


Call = tuple[Status, tuple[Any, ...], str]
"""One library call without its handle: the function, its arguments as ctypes objects, converted once, and its name."""


class Cublas:
    """The entry points that this backend uses; a missing one raises AttributeError at construction."""

    def __init__(self, path: str) -> None:
        library, brief = ctypes.CDLL(path, mode=NO_LOAD), ctypes.PyDLL(path, mode=NO_LOAD)
        self.gemm: Status = library.cublasGemmEx_64
        self.strided: Status = library.cublasGemmStridedBatchedEx_64
        self.pointers: Status = library.cublasGemmBatchedEx_64
        self.grouped: Status | None = getattr(library, "cublasGemmGroupedBatchedEx_64", None)
        self.set_math_mode: Status = brief.cublasSetMathMode  # too short to let go of Python's lock
        self.get_math_mode: Status = brief.cublasGetMathMode
        self.set_stream: Status = library.cublasSetStream_v2
        self.set_workspace: Status = library.cublasSetWorkspace_v2
        self._get_version: Status = library.cublasGetVersion_v2

    def version(self) -> str:
        """major.minor.patch of the loaded library."""
        number = ctypes.c_int()
        check(self._get_version(None, ctypes.byref(number)), "cublasGetVersion")
        major, rest = divmod(number.value, 10000)
        return f"{major}.{rest // 100}.{rest % 100}"


def soname(library: str = "cublas") -> str | None:
    """The file name under which torch's dynamic cuBLAS is loaded, or None for a torch without CUDA."""
    version = torch.version.cuda
    return None if version is None else f"lib{library}.so.{version.split('.')[0]}"


GROUPED_LAYOUT = "cublasLtGroupedMatrixLayoutCreate"


def grouped_matmul() -> str:
    """Whether the cuBLASLt that torch has loaded can multiply groups (experimental since cuBLAS 13.2), in words."""
    name = soname("cublasLt")
    try:
        library = ctypes.CDLL(name or "", mode=NO_LOAD)
    except OSError:
        return "cuBLASLt is not loaded"
    return f"cuBLASLt {'has' if hasattr(library, GROUPED_LAYOUT) else 'lacks'} grouped matmul"


@lru_cache(maxsize=1)
def cublas() -> Cublas:
    """The loaded library; OSError or AttributeError where torch carries none that can be called."""
    name = soname()
    if name is None:
        raise OSError("this torch was built without CUDA")
    return Cublas(name)


def check(status: int, name: str) -> None:
    """A status other than success raises, with the call and the code."""
    if status:
        raise LibraryError(f"{name} returned {STATUS.get(status, 'unknown status')} ({status})")


def handle() -> ctypes.c_void_p:
    """torch's handle for this thread and device, set by torch to its current stream and workspace."""
    return ctypes.c_void_p(torch_internals.blas_handle())


def make(blas: ctypes.c_void_p, calls: Sequence[Call]) -> None:
    """Makes the calls; the first that fails raises."""
    for function, args, name in calls:
        status = function(blas, *args)
        if status:
            check(status, name)


class ExactMath:
    """For the length of a `with`: a handle whose calls use neither tf32 nor 16-bit partial sums."""

    __slots__ = ("_blas", "_library", "_mode")

    def __init__(self, library: Cublas, blas: ctypes.c_void_p) -> None:
        self._library, self._blas, self._mode = library, blas, ctypes.c_int()

    def __enter__(self) -> None:
        library, blas = self._library, self._blas
        status = library.get_math_mode(blas, ctypes.byref(self._mode)) or library.set_math_mode(blas, EXACT_MATH)
        if status:
            check(status, "cublasGetMathMode or cublasSetMathMode")

    def __exit__(self, *error: object) -> None:
        status = self._library.set_math_mode(self._blas, self._mode)
        if status and error[0] is None:
            check(status, "cublasSetMathMode")


def aim(library: Cublas, blas: ctypes.c_void_p, stream: ctypes.c_void_p, space: Tensor) -> None:
    """Turns a handle to a stream and a workspace; the library forgets the workspace whenever the stream is set."""
    check(library.set_stream(blas, stream), "cublasSetStream")
    size = ctypes.c_size_t(space.numel())
    check(library.set_workspace(blas, ctypes.c_void_p(space.data_ptr()), size), "cublasSetWorkspace")


def scalar(compute: int, value: float) -> Any:
    """alpha or beta in the scale type of a compute type, as the library reads it from the host."""
    if compute == COMPUTE_64F:
        return ctypes.c_double(value)
    return ctypes.c_int32(int(value)) if compute == COMPUTE_32I else ctypes.c_float(value)
