"""Compiles and launches the two small kernels: the NVRTC that torch ships, and the driver.

The cubin is kept on disk, keyed by source, types, architecture and compiler, so a process compiles
nothing that an earlier one did. A kernel belongs to one device's context; torch makes that context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from multigemm.cache import DiskCache, fingerprint
from multigemm.errors import CompileError, LibraryError

INVALID_CONTEXT = 201
Step = Callable[[int], None]
"""Enqueues work on a raw stream."""


@lru_cache(maxsize=1)
def driver() -> Any:
    """The driver's entry points."""
    return ctypes.CDLL("libcuda.so.1")


@lru_cache(maxsize=1)
def compiler() -> Any:
    """NVRTC, of the major version that torch was built with; OSError where it cannot be loaded."""
    major = (torch.version.cuda or "0").split(".")[0]
    return ctypes.CDLL(f"libnvrtc.so.{major}")


def driver_checked(status: int, name: str) -> None:
    """A driver status other than success raises, with the call and the driver's own words."""
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise LibraryError(f"{name} returned {status}: {(text.value or b'unknown').decode()}")


def _log(program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    compiler().nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    compiler().nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace")


def compile_source(source: str, name: str, options: tuple[str, ...]) -> bytes:
    """The cubin of one source; needs no GPU. Raises CompileError with the compiler's log."""
    library, program, size = compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    status = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
    if status:
        raise CompileError(f"nvrtcCreateProgram returned {status} for {name}")
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if library.nvrtcCompileProgram(program, len(options), arguments):
        raise CompileError(f"{name} did not compile with {' '.join(options)}\n{_log(program)}")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, cubin)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def _cubin(source: str, name: str, options: tuple[str, ...]) -> bytes:
    major, minor = ctypes.c_int(), ctypes.c_int()
    compiler().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    store = DiskCache("cublas")
    key = fingerprint(source, name, options, major.value, minor.value)
    kept = store.get(key, ".cubin")
    if kept is None:
        kept = compile_source(source, name, options)
        store.put(key, kept, ".cubin")
    return kept


def use_context(device: int) -> None:
    """Makes the device's primary context this thread's: a new thread has none until something asks."""
    context = ctypes.c_void_p()
    driver_checked(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    driver_checked(driver().cuCtxSetCurrent(context), "cuCtxSetCurrent")


class _Launch(ctypes.Structure):
    """CUlaunchConfig: one argument instead of eight, of which only the stream changes."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("blocks", "_y", "_z", "threads", "_ty", "_tz", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    ]  # fmt: skip


class Kernel:
    """A loaded kernel of one device."""

    def __init__(self, source: str, name: str, options: tuple[str, ...], device: int) -> None:
        self.name, self._device = name, device
        image = _cubin(source, name, options)
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        use_context(device)
        driver_checked(driver().cuModuleLoadData(ctypes.byref(self._module), image), "cuModuleLoadData")
        got = driver().cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode())
        driver_checked(got, "cuModuleGetFunction")
        self._launch = driver().cuLaunchKernelEx

    def bound(self, blocks: int, threads: int, values: Sequence[Any], keep: object) -> Step:
        """The launch of these arguments (ctypes objects) on a raw stream; `keep` lives as long as it."""
        launch, function = self._launch, self._function
        arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        on: dict[int, tuple[Any, ...]] = {}  # one for each stream, so that threads do not write into each other's

        def step(stream: int, _keep: object = (values, keep)) -> None:
            ready = on.get(stream)
            if ready is None:
                ready = on[stream] = ctypes.byref(_Launch(blocks, 1, 1, threads, 1, 1, 0, stream)), function, arguments
            status = launch(*ready, None)
            if status == INVALID_CONTEXT:
                use_context(self._device)
                status = launch(*ready, None)
            if status:
                driver_checked(status, f"launch of {self.name}")

        return step


@cache
def kernel(source: str, name: str, defines: tuple[str, ...], device: int) -> Kernel:
    """The kernel of one source, set of types and device: loaded once in this process."""
    major, minor = torch.cuda.get_device_capability(device)
    options = (f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", *defines)
    return Kernel(source, name, options, device)
