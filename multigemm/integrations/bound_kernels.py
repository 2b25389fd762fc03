# mypy: ignore-errors
"""Triton kernels that are bound like a plan: looked up and laid out once, then only launched.

Triton finds a kernel anew at every call, by the types and alignment of all arguments, which takes longer than the
launch. A kernel bound to addresses has them for good.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multigemm.backend import Launch

_stream_of: Any = torch._C._cuda_getCurrentRawStream if hasattr(torch._C, "_cuda_getCurrentRawStream") else None


def bound(kernel: Any, grid: tuple[int, ...], device: int, warps: int = 4, /, **values: Any) -> Launch:
    """A launch of `kernel` on the current stream of GPU `device`, the current device; keeps no memory alive."""
    compiled = kernel.warmup(grid=grid, num_warps=warps, **values)
    arguments = [x.data_ptr() if isinstance(x, Tensor) else x for x in (values[name] for name in kernel.arg_names)]
    run, stream_of = compiled[(*grid, 1, 1)[:3]], _stream_of

    def launch() -> None:
        run(*arguments, stream=stream_of(device))

    return launch
