"""Small kernels of CUDA C++ beside the backends' own: compiled by the NVRTC that torch ships, launched by the driver.

The cubin is kept on disk, keyed by source, types, architecture and compiler, so a process compiles
nothing that an earlier one did. A kernel belongs to one device's context; torch makes that context.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from multigemm.cuda.disk_cache import DiskCache, fingerprint
from multigemm.cuda.launch import Kernel
from multigemm.errors import CompileError

ELEMENTS = Path(__file__).parent / "elements.cuh"


def source_of(path: Path) -> str:
    """The text of a kernel, with the text of `elements.cuh` in place of its include."""
    return path.read_text().replace(f'#include "{ELEMENTS.name}"\n', ELEMENTS.read_text())


@lru_cache(maxsize=1)
def compiler() -> Any:
    """NVRTC of the major version with which torch was built. Raises OSError if it cannot be loaded."""
    major = (torch.version.cuda or "0").split(".")[0]
    return ctypes.CDLL(f"libnvrtc.so.{major}")


def _log(program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    compiler().nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    compiler().nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace")


def compile_source(source: str, name: str, options: tuple[str, ...]) -> bytes:
    """The cubin of one source; needs no GPU. Raises CompileError with the compiler's log."""
    nvrtc, program, size = compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
    if status:
        raise CompileError(f"nvrtcCreateProgram returned {status} for {name}")
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if nvrtc.nvrtcCompileProgram(program, len(options), arguments):
        raise CompileError(f"{name} did not compile with {' '.join(options)}\n{_log(program)}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def _cubin(source: str, name: str, options: tuple[str, ...]) -> bytes:
    major, minor = ctypes.c_int(), ctypes.c_int()
    compiler().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    store = DiskCache("nvrtc")
    key = fingerprint(source, name, options, major.value, minor.value)
    kept = store.get(key, ".cubin")
    if kept is None:
        kept = compile_source(source, name, options)
        store.put(key, kept, ".cubin")
    return kept


def _options(defines: tuple[str, ...], device: int) -> tuple[str, ...]:
    major, minor = torch.cuda.get_device_capability(device)
    return (f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", *defines)


@cache
def loaded(source: str, name: str, defines: tuple[str, ...], device: int) -> Kernel:
    """The kernel of one source, set of types and device, loaded once per process."""
    return Kernel(_cubin(source, name, _options(defines, device)), name, device)
