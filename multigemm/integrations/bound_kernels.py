"""Triton kernels that are bound like a plan: looked up and laid out once, then only launched.

Triton finds a kernel anew at every call, by the types and alignment of all arguments, which takes longer than the
launch. A kernel bound to addresses has them for good, and its launch is one foreign call.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from multigemm.backend import Launch
from multigemm.cuda.driver import on_device
from multigemm.cuda.launch import Kernel
from multigemm.errors import LibraryError

_PARAMETERS = re.compile(r"\.entry[^(]*\(([^)]*)\)")


def words(kernel: Any, compiled: Any, values: dict[str, Any]) -> list[int]:
    """The kernel's parameters: what is no constant, then pointers of Triton's own, which these kernels do not use."""
    types = compiled.src.signature
    given = [values[name] for name in kernel.arg_names if types[name] != "constexpr"]
    found = _PARAMETERS.search(compiled.asm["ptx"])
    own = (found.group(1).count(".param") if found else 0) - len(given)
    scratch = compiled.metadata.global_scratch_size
    if own < 0 or scratch:
        raise LibraryError(f"{compiled.name} takes {own} parameters more than it was given, and {scratch} bytes")
    return [x.data_ptr() if isinstance(x, Tensor) else x for x in given] + [0] * own


def bound(kernel: Any, grid: tuple[int, ...], device: int, warps: int = 4, /, **values: Any) -> Launch:
    """A launch of `kernel` on the current stream of GPU `device`, the current device.

    It keeps no memory alive, and stays at the addresses that it was bound to.
    """
    with on_device(device):
        compiled = kernel.warmup(grid=grid, num_warps=warps, **values)
        compiled._init_handles()
    x, y, z, *_ = (*grid, 1, 1)
    loaded = Kernel.loaded(compiled.function, compiled.name, device)
    launch = loaded.bound(
        words(kernel, compiled, values), grid=(x, y, z), threads=32 * warps, shared=compiled.metadata.shared,
        keep=(compiled,),
    )  # fmt: skip
    return launch.__call__
