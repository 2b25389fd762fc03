"""Every private name of torch that the package uses, from torch 2.11 to 2.13, each with a public stand-in.

A call of the front door asks torch the same few questions each time, and the public functions take up to twenty times
as long as what stands behind them. A torch without one of these names gets the public way, which is slower and says the
same. No other file names torch's internals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_C: Any = torch._C


def _public_raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


def _public_any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def _public_empty_cuda(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def _no_wrapped(x: Tensor) -> bool:
    return False


def _guards() -> Any:
    return getattr(getattr(_C, "_dynamo", None), "guards", None)


current_raw_stream: Callable[[int], int] = getattr(_C, "_cuda_getCurrentRawStream", _public_raw_stream)
"""The stream of a device on which work of this thread is enqueued, as the driver's handle."""
current_device: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)
"""The number of this thread's current device."""
is_capturing: Callable[[], bool] = getattr(_C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
"""Whether the current device's current stream records a CUDA graph."""
any_requires_grad: Callable[..., bool] = getattr(_C, "_any_requires_grad", _public_any_requires_grad)
"""Whether one of some tensors, which may be None, requires grad."""
empty_cuda: Callable[..., Tensor] = getattr(_guards(), "_empty_strided_cuda", _public_empty_cuda)
"""A new tensor (shape, strides, dtype) on the current device."""
is_functorch_wrapped: Callable[[Tensor], bool] = getattr(
    getattr(_C, "_functorch", None), "is_functorch_wrapped_tensor", _no_wrapped
)
"""Whether a tensor stands for another one under vmap, grad and the like."""
grad_enabled: Callable[[], bool] = torch.is_grad_enabled


def forward_mode() -> bool:
    """Whether forward-mode differentiation is going on in this thread, so that tensors may carry tangents."""
    return getattr(forward_ad, "_current_level", 0) >= 0
