"""Any array in, the same kind out: torch, NumPy, CuPy, Numba device arrays, or anything with DLPack.

Inside, everything is a torch tensor over the caller's own memory; on a GPU nothing is copied. Only
what a tensor cannot express takes a detour: an array with a negative stride is mirrored into a
scratch tensor that is refreshed before each launch (an output must not have one).
No array library is imported here before an array of its own has been seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor

from multigemm.errors import InvalidProblem

Kind = Literal["torch", "numpy", "cupy", "numba"]
Step = Callable[[], object]


class Adopted(NamedTuple):
    """An array as a tensor, and the object that the caller gave.

    `refresh` copies the caller's array into `tensor`; it is None when `tensor` lies over the caller's
    memory, which is the rule.
    """

    tensor: Tensor
    kind: Kind
    given: Any
    refresh: Step | None = None


def adopt(x: Any, name: str) -> Adopted:
    """`x` as a tensor over the same memory; `name` is how an error calls it."""
    if isinstance(x, Tensor):  # the common case, and on the path of every call
        return Adopted(_checked_tensor(x, name), "torch", x)
    if isinstance(x, np.ndarray):
        return _adopt_numpy(x, name)
    root = type(x).__module__.partition(".")[0]
    if root == "cupy" and hasattr(x, "__cuda_array_interface__"):
        return _adopt_cupy(x, name)
    if hasattr(x, "__cuda_array_interface__"):
        kind: Kind = "numba" if root.startswith("numba") else "torch"
        return Adopted(torch.as_tensor(x, device="cuda"), kind, x)
    if hasattr(x, "__dlpack__"):
        return Adopted(_checked_tensor(torch.utils.dlpack.from_dlpack(x), name), "torch", x)
    raise InvalidProblem(
        f"{name} is a {type(x).__name__}, not an array: pass a torch tensor, a NumPy, CuPy or Numba device array, "
        "or anything with __dlpack__ or __cuda_array_interface__"
    )


def _checked_tensor(x: Tensor, name: str) -> Tensor:
    if x.layout is not torch.strided:
        raise InvalidProblem(f"{name} has layout {x.layout}; grouped GEMM takes dense tensors: call .to_dense()")
    if x.device.type not in ("cpu", "cuda"):
        raise InvalidProblem(f"{name} is on {x.device}; multigemm runs on cpu and cuda: move it there")
    if x.is_neg() or x.is_conj():
        raise InvalidProblem(f"{name} is a lazily negated or conjugated view: call .resolve_neg() or .resolve_conj()")
    return x


class _Memory:
    """A buffer described by the array interface, for views that NumPy would not give (writable, foreign)."""

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__, self._owner = interface, owner


def _adopt_numpy(x: np.ndarray, name: str) -> Adopted:
    if not x.dtype.isnative:
        raise InvalidProblem(
            f"{name} has dtype {x.dtype} in foreign byte order: call .astype(x.dtype.newbyteorder('='))"
        )
    if any(s < 0 for s in x.strides) or any(s % x.itemsize for s in x.strides):
        mirror = _from_numpy(np.array(x, order="C"), name)
        view = _as_numpy(mirror)
        return Adopted(mirror, "numpy", x, lambda: np.copyto(view, x))
    return Adopted(_from_numpy(x, name), "numpy", x)


def _from_numpy(x: np.ndarray, name: str) -> Tensor:
    if x.dtype.name == "bfloat16":
        return _from_numpy(x.view(np.int16), name).view(torch.bfloat16)
    if not x.flags.writeable:  # torch has no read-only tensors; whether x may be written is checked by the problem
        interface = {**x.__array_interface__, "data": (x.__array_interface__["data"][0], False)}
        x = np.asarray(_Memory(interface, x))
    try:
        return torch.from_numpy(x)
    except (TypeError, ValueError) as error:
        raise InvalidProblem(f"{name} has dtype {x.dtype}, which torch cannot hold ({error})") from error


def _as_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _adopt_cupy(x: Any, name: str) -> Adopted:
    import cupy

    def tensor_over(array: Any) -> Tensor:
        if array.dtype.name == "bfloat16":
            return torch.as_tensor(array.view(cupy.int16), device="cuda").view(torch.bfloat16)
        return torch.as_tensor(array, device="cuda")

    if not any(s < 0 for s in x.strides):
        return Adopted(tensor_over(x), "cupy", x)
    mirror = cupy.ascontiguousarray(x)

    def refresh() -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream(x.device.id).cuda_stream):
            cupy.copyto(mirror, x)

    return Adopted(tensor_over(mirror), "cupy", x, refresh)


def read_only(x: Any) -> bool:
    """Whether the caller's array says that it must not be written."""
    if isinstance(x, np.ndarray):
        return not x.flags.writeable
    if not isinstance(x, Tensor) and hasattr(x, "__cuda_array_interface__"):
        return bool(x.__cuda_array_interface__["data"][1])
    return False


def give_back(tensor: Tensor, kind: Kind) -> Any:
    """A result as the caller's kind of array, over the same memory."""
    if kind == "torch":
        return tensor
    if kind == "numpy":
        return _as_numpy(tensor)
    if kind == "cupy":
        import cupy

        if tensor.dtype is torch.bfloat16:
            import ml_dtypes

            return cupy.asarray(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
        return cupy.asarray(tensor)
    from numba import cuda

    return cuda.as_cuda_array(tensor)  # type: ignore[no-untyped-call]


def cupy_stream(device: torch.device) -> int | None:
    """The raw stream that CuPy is on, where that differs from torch's; else None."""
    stream: int = sys.modules["cupy"].cuda.get_current_stream().ptr
    return stream if stream != torch.cuda.current_stream(device).cuda_stream else None


def dtype_of(x: Any, name: str) -> torch.dtype:
    """A torch dtype out of a torch dtype, a NumPy dtype or type, or a name."""
    if isinstance(x, torch.dtype):
        return x
    try:
        text = x if isinstance(x, str) else np.dtype(x).name
    except TypeError:
        text = str(x)
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InvalidProblem(f"{name}={x!r} is not a dtype: pass a torch dtype, a NumPy dtype or its name")
    return found
