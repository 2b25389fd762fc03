"""torch's grouped_mm, writing where it is told to.

The operation has no `out` argument and allocates its result, so a caller's buffer would cost a copy
of everything: up to a tenth of the time. The function that it calls takes one, and is entered where that can be done
(`below`). Elsewhere, and to have an error raised as torch raises it, the operation runs: it asks torch for memory like
any other code, through the dispatcher; for the length of one call, and in one thread, this module answers that request
with the caller's buffer. What comes back is compared with that buffer; a torch that allocates differently is copied
from, never trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from multigemm.backends.cublas import below

EMPTY = torch.ops.aten.empty_strided.default
GROUPED_MM: Any = torch.ops.aten._grouped_mm.default
_push: Any = torch._C._push_on_torch_dispatch_stack
_pop: Any = torch._C._pop_torch_dispatch_stack
ALIGNMENT = 8
"""Elements of bfloat16 in 16 bytes: what bases and strides must be multiples of."""


class _Into(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands out one prepared tensor where memory of its shape is asked for."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._out, self._shape = out, list(out.shape)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No compiler traces a bound launch, and torch's guard against it would be run at each of them."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is EMPTY and args[0] == self._shape:
            return self._out
        return func(*args, **(kwargs or {}))


class GroupedMM:
    """One bound call, a step of a launch; `out` may have any strides that are multiples of 16 bytes."""

    __slots__ = ("_args", "_below", "_call", "_into", "_keys", "_out", "_where")

    def __init__(self, a: Tensor, b: Tensor, ends: Tensor, out: Tensor) -> None:
        self._args = (a.detach(), b.detach(), ends, None, None)
        self._out, self._where = out.detach(), out.data_ptr()
        self._into, self._call = _Into(self._out), GROUPED_MM._handle.redispatch_boxed
        self._keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        function = below.grouped_mm()
        self._below = None if function is None else below.Bound(function, (*self._args[:4], self._out))

    def __call__(self, stream: int) -> None:
        if self._below is None or self._below.call():
            self._through_the_dispatcher()

    def _through_the_dispatcher(self) -> None:
        _push(self._into)
        try:
            result = self._call(self._keys, *self._args)
        finally:
            _pop(None)
        if result.data_ptr() != self._where:
            self._out.copy_(result)


@dataclass(frozen=True, slots=True)
class View:
    """How grouped_mm must see a matrix: by rows or by columns."""

    by_rows: bool

    def of(self, t: Tensor) -> Tensor:
        """The same elements; a stride that no element uses becomes one that passes torch's checks."""
        outer, inner = (-2, -1) if self.by_rows else (-1, -2)
        ld = t.stride(outer) if t.shape[outer] > 1 else -(-t.shape[inner] // ALIGNMENT) * ALIGNMENT
        strides = list(t.stride())
        strides[outer], strides[inner] = ld, 1
        if t.dim() == 3 and t.shape[0] <= 1:
            strides[0] = ld * t.shape[outer]
        return t.as_strided(t.shape, strides)
