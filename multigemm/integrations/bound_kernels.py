# mypy: ignore-errors
"""Triton kernels that are bound like a plan: looked up and laid out once, then only launched.

Triton finds a kernel anew at every call, by the types and alignment of all arguments, which takes longer than the
launch. A kernel bound to addresses has them for good, and its launch is one foreign call.
"""

from __future__ import annotations

import ctypes
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.cuda.driver import LaunchConfig, Records, library, settle
from multigemm.errors import LibraryError

_PARAMETERS = re.compile(r"\.entry[^(]*\(([^)]*)\)")


def words(kernel: Any, compiled: Any, values: dict[str, Any]) -> list[int]:
    """The kernel's parameters: what is no constant, then pointers of Triton's own, which these kernels do not use."""
    types = compiled.src.signature
    given = [values[name] for name in kernel.arg_names if types[name] != "constexpr"]
    own = _PARAMETERS.search(compiled.asm["ptx"]).group(1).count(".param") - len(given)
    scratch = compiled.metadata.global_scratch_size
    if own < 0 or scratch:
        raise LibraryError(f"{compiled.name} takes {own} parameters more than it was given, and {scratch} bytes")
    return [x.data_ptr() if isinstance(x, Tensor) else x for x in given] + [0] * own


def bound(kernel: Any, grid: tuple[int, ...], device: int, warps: int = 4, /, **values: Any) -> Launch:
    """A launch of `kernel` on the current stream of GPU `device`, the current device; keeps no memory alive."""
    compiled = kernel.warmup(grid=grid, num_warps=warps, **values)
    compiled._init_handles()
    given = words(kernel, compiled, values)
    block = (ctypes.c_uint64 * len(given))(*given)
    pointers = (ctypes.c_void_p * len(given))(*(ctypes.addressof(block) + 8 * i for i in range(len(given))))
    config = LaunchConfig(grid=(*grid, 1, 1)[:3], block=(32 * warps, 1, 1), shared=compiled.metadata.shared)
    call, records, handle = library().cuLaunchKernelEx, Records(config), ctypes.c_void_p(compiled.function)
    stream_of = torch._C._cuda_getCurrentRawStream
    alive = (block, compiled)

    def launch(_alive: Any = alive) -> None:
        record = records[stream_of(device)]
        code = call(record, handle, pointers, None)
        if code:
            again = partial(call, record, handle, pointers, None)
            settle(code, device, again, f"cuLaunchKernelEx of {compiled.name}")

    return launch
