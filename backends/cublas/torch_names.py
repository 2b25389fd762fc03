"""Names of torch that its documentation does not promise: all that this backend uses, seen in torch 2.11 to 2.13.

Each spares time of the host and has a public way beside it, which is taken where a release lacks the name:

| name | public way | what it costs |
|---|---|---|
| `_C._cuda_getDevice`, `_C._cuda_getCurrentRawStream`, `_C._cuda_isCurrentStreamCapturing`, `_C._cuda_getCurrentBlasHandle` | functions of `torch.cuda` | about a microsecond each |
| `ops.aten._grouped_mm.default`, its `_handle.redispatch_boxed`, `_C.DispatchKeySet`, `_C._push_on_torch_dispatch_stack`, `_C._pop_torch_dispatch_stack` | `nn.functional.grouped_mm`, whose result is copied | memory for a result, and a copy of it |

`TorchDispatchMode` is documented (Extending PyTorch, "Extending all torch API with Modes") in a module with an underscore.
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def _raw_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


current_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
blas_handle: Any = getattr(torch._C, "_cuda_getCurrentBlasHandle", torch.cuda.current_blas_handle)

EMPTY = torch.ops.aten.empty_strided.default


def _redispatch() -> tuple[Any, ...] | None:
    """What `GroupedMM` calls, or None where this torch lacks a name of it."""
    try:
        call = torch.ops.aten._grouped_mm.default._handle.redispatch_boxed
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        return call, keys, torch._C._push_on_torch_dispatch_stack, torch._C._pop_torch_dispatch_stack
    except AttributeError:
        return None


redispatch = _redispatch()


class GroupedMM(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One bound call of torch's grouped_mm, a step of a launch, that writes into `out`.

    The operation has no `out`: it asks torch's dispatcher for memory of its result. In this thread, for the length
    of the call, this mode answers with `out`. A torch that allocates in another way is copied from. torch's kernel
    takes two small pieces of memory from the caching allocator at each call; no argument hands them in.
    """

    def __init__(self, a: Tensor, b: Tensor, ends: Tensor, out: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._a, self._b, self._ends = a, b, ends
        self._out, self._shape, self._where = out, list(out.shape), out.data_ptr()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No compiler traces a bound launch, and torch's guard against it would be run at each of them."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is EMPTY and args[0] == self._shape:
            return self._out
        return func(*args, **(kwargs or {}))

    def __call__(self, stream: int) -> None:
        if redispatch is None:
            with torch.no_grad():
                self._out.copy_(torch.nn.functional.grouped_mm(self._a, self._b, offs=self._ends))
            return
        call, keys, push, pop = redispatch
        push(self)
        try:
            result = call(keys, self._a, self._b, self._ends, None, None)
        finally:
            pop(None)
        if result.data_ptr() != self._where:
            self._out.copy_(result)
