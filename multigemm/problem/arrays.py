"""Any array in, the same kind out: torch, NumPy, CuPy, Numba device arrays, or anything with DLPack.

Inside, everything is a torch tensor over the caller's own memory; on a GPU nothing is copied. Only
what a tensor cannot express takes a detour: an array with a negative stride is mirrored into a
scratch tensor that is refreshed before each launch (an output must not have one).
No array library is imported here before an array of its own has been seen.

Of the arrays of one problem the first operand decides the device and the library; the others must match
(`OperandReader`). Empty lists have no first operand: then arrays that all groups share may lie anywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.utils.dlpack
from numpy.ma import MaskedArray  # here: a child forked during a lazy import would wait for it for ever
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from multigemm.errors import InvalidProblem
from multigemm.torch_internals import forward_mode, is_functorch_wrapped

Kind = Literal["torch", "numpy", "cupy", "numba"]
BITS = {
    "bfloat16": (np.int16, torch.bfloat16),
    "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn),
    "float8_e5m2": (np.uint8, torch.float8_e5m2),
    "float8_e8m0fnu": (np.uint8, torch.float8_e8m0fnu),
}
"""Dtypes of ml_dtypes, which pass between libraries as integers of their size."""
Step = Callable[[], object]
LOWEST = 1 << 32
"""Addresses from here on are real. A lower one may count from 0 because the tensor's memory was freed; then that is
checked."""


class Adopted(NamedTuple):
    """A tensor over the caller's array, together with the array.

    Usually `tensor` shares the caller's memory and `refresh` is None. Otherwise `refresh` copies the caller's array
    into `tensor`.
    """

    tensor: Tensor
    kind: Kind
    given: Any
    refresh: Step | None = None


def adopt(x: Any, name: str) -> Adopted:
    """A tensor over the memory of `x`. Error messages call the operand `name`."""
    if isinstance(x, Tensor):  # the common case, and on the path of every call
        return Adopted(_checked_tensor(x, name), "torch", x)
    if isinstance(x, np.ndarray):
        return _adopt_numpy(x, name)
    root = type(x).__module__.partition(".")[0]
    if root == "cupy" and hasattr(x, "__cuda_array_interface__"):
        return _adopt_cupy(x, name)
    foreign = not isinstance(x, type)  # a class has the members of its instances
    if foreign and hasattr(x, "__cuda_array_interface__"):
        return Adopted(_from_cuda(x, name), "numba" if root.startswith("numba") else "torch", x)
    if foreign and hasattr(x, "__dlpack__"):
        return Adopted(_checked_tensor(_from_dlpack(x, name), name), "torch", x)
    raise InvalidProblem(
        f"{name} is a {type(x).__name__}, not an array: pass a torch tensor, a NumPy, CuPy or Numba device array, "
        "or anything with __dlpack__ or __cuda_array_interface__"
    )


def is_array(x: Any) -> bool:
    """Whether `adopt` can take this object."""
    return isinstance(x, Tensor | np.ndarray) or hasattr(x, "__cuda_array_interface__") or hasattr(x, "__dlpack__")


def _from_cuda(x: Any, name: str) -> Tensor:
    try:
        return torch.as_tensor(x, device="cuda")
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        if isinstance(error, RuntimeError | AssertionError) and torch.cuda.is_available():
            raise  # of the device, not of the array
        why = "torch sees no CUDA device here" if not torch.cuda.is_available() else str(error)
        raise InvalidProblem(
            f"{name} is a {type(x).__name__} with __cuda_array_interface__, which torch cannot take ({why}): "
            "pass a torch tensor"
        ) from error


def _from_dlpack(x: Any, name: str) -> Tensor:
    try:
        return torch.utils.dlpack.from_dlpack(x)
    except Exception as error:  # the exporter is foreign code, and its failure is about this array
        raise InvalidProblem(
            f"{name} is a {type(x).__name__} whose __dlpack__ torch cannot take ({type(error).__name__}: {error}): "
            "pass a torch tensor"
        ) from error


def _checked_tensor(x: Tensor, name: str) -> Tensor:
    if x.is_nested:
        raise InvalidProblem(f"{name} is a nested tensor: pass its matrices as a list, or .values() with .offsets()")
    if x.layout is not torch.strided:
        raise InvalidProblem(f"{name} has layout {x.layout}; grouped GEMM takes dense tensors: call .to_dense()")
    if not (x.is_cpu or x.is_cuda):
        raise InvalidProblem(f"{name} is on {x.device}; multigemm runs on cpu and cuda: move it there")
    if x.is_neg() or x.is_conj():
        raise InvalidProblem(f"{name} is a lazily negated or conjugated view: call .resolve_neg() or .resolve_conj()")
    if is_functorch_wrapped(x) or (type(x) is not Tensor and type(x) is not Parameter and not _has_memory(x)):
        raise InvalidProblem(
            f"{name} is a {type(x).__name__} without memory of its own (under vmap, a fake or a distributed tensor): "
            "pass the plain tensor, outside the transform"
        )
    if x.data_ptr() < LOWEST and _is_freed(x):
        raise InvalidProblem(
            f"{name} has {x.numel()} elements and its memory was freed (a sharded weight outside of its layer?): "
            "pass it while it is gathered"
        )
    if forward_mode() and _tangent(x) is not None:
        raise InvalidProblem(
            f"{name} carries a forward-mode tangent, and grouped GEMM has reverse-mode gradients only: "
            "pass forward_ad.unpack_dual(x).primal"
        )
    return x


def _tangent(x: Tensor) -> Tensor | None:
    tangent: Tensor | None = forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call]
    return tangent


def _is_freed(x: Tensor) -> bool:
    """Whether the tensor's memory was freed: element addresses then count from 0."""
    return x.numel() > 0 and x.untyped_storage().data_ptr() == 0


def _has_memory(x: Tensor) -> bool:
    """Whether a tensor subclass has its elements at its own address; a wrapper subclass holds them elsewhere or
    nowhere."""
    try:
        storage = x.untyped_storage()
        return x.numel() == 0 or (storage.device == x.device and storage.data_ptr() != 0)
    except (RuntimeError, NotImplementedError):  # torch's two ways to say that there is no storage
        return False


class Memory:
    """Memory as an object with the array interface of the host or of CUDA, for views that libraries would not construct
    (writable, without an owner). `strides` are bytes, None for no gaps; `owner` lives as long as it."""

    def __init__(
        self, shape: Sequence[int], strides: Sequence[int] | None, kind: str, address: int, owner: Any = None, *,
        cuda: bool = False, read_only: bool = False,
    ) -> None:  # fmt: skip
        interface = {
            "version": 3, "shape": tuple(shape), "strides": None if strides is None else tuple(strides),
            "typestr": kind, "data": (address, read_only),
        }  # fmt: skip
        setattr(self, "__cuda_array_interface__" if cuda else "__array_interface__", interface)
        self._owner = owner


NUMPY_TYPES = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype.str
    for dtype in (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8)
}


def numpy_view(x: Tensor) -> np.ndarray:
    """A NumPy array over a tensor on the host.

    `x.numpy()` would mark the memory as never resizable, but FSDP2 resizes the memory of parameters.
    """
    return np.asarray(Memory(x.shape, strides_in_bytes(x), NUMPY_TYPES[x.dtype], x.data_ptr(), x))


def strides_in_bytes(x: Tensor) -> tuple[int, ...]:
    """The strides of a tensor as NumPy counts them."""
    return tuple(s * x.element_size() for s in x.stride())


def _adopt_numpy(x: np.ndarray, name: str) -> Adopted:
    if not x.dtype.isnative:
        raise InvalidProblem(
            f"{name} has dtype {x.dtype} in foreign byte order: call .astype(x.dtype.newbyteorder('='))"
        )
    if isinstance(x, MaskedArray):
        raise InvalidProblem(f"{name} is a masked array, and a product knows no mask: call .filled(0)")
    if any(s < 0 or (x.itemsize and s % x.itemsize) for s in x.strides):
        mirror = _from_numpy(np.array(x, order="C"), name)
        view = _as_numpy(mirror)
        return Adopted(mirror, "numpy", x, lambda: np.copyto(view, x))
    return Adopted(_from_numpy(x, name), "numpy", x)


def _from_numpy(x: np.ndarray, name: str) -> Tensor:
    if x.dtype.name in BITS:
        whole, dtype = BITS[x.dtype.name]
        return _from_numpy(x.view(whole), name).view(dtype)
    if not x.flags.writeable:  # torch has no read-only tensors; whether x may be written is checked by the problem
        x = np.asarray(Memory(x.shape, x.strides, x.dtype.str, x.__array_interface__["data"][0], x))
    try:
        return torch.from_numpy(x)
    except (TypeError, ValueError) as error:
        raise InvalidProblem(f"{name} has dtype {x.dtype}, which torch cannot hold ({error}): convert it") from error


def _as_numpy(tensor: Tensor) -> np.ndarray:
    if (word := dtype_name(tensor.dtype)) in BITS:
        import ml_dtypes

        return tensor.view(_whole(word)).numpy().view(getattr(ml_dtypes, word))
    return tensor.numpy()


def _whole(word: str) -> torch.dtype:
    """The torch integer dtype of the same size as a dtype of ml_dtypes."""
    return torch.int16 if BITS[word][0] is np.int16 else torch.uint8


class _RawStream:
    """A stream handle as an object of the protocol by which CuPy accepts foreign streams."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _adopt_cupy(x: Any, name: str) -> Adopted:
    import cupy

    device = torch.device("cuda", x.device.id)  # without the index, torch would copy to the current device

    def tensor_over(array: Any) -> Tensor:
        if array.dtype.name in BITS:
            whole, dtype = BITS[array.dtype.name]
            return torch.as_tensor(array.view(whole), device=device).view(dtype)
        return torch.as_tensor(array, device=device)

    if not any(s < 0 for s in x.strides):
        return Adopted(tensor_over(x), "cupy", x)
    mirror = cupy.ascontiguousarray(x)

    def refresh() -> None:
        with cupy.cuda.Stream.from_external(_RawStream(torch.cuda.current_stream(x.device.id).cuda_stream)):
            cupy.copyto(mirror, x)

    return Adopted(tensor_over(mirror), "cupy", x, refresh)


def read_only(x: Any) -> bool:
    """Whether the caller's array is marked as read-only."""
    if isinstance(x, np.ndarray):
        return not x.flags.writeable
    if not isinstance(x, Tensor) and hasattr(x, "__cuda_array_interface__"):
        return bool(x.__cuda_array_interface__["data"][1])
    return False


def give_back(tensor: Tensor, kind: Kind) -> Any:
    """A result as the caller's kind of array, sharing memory."""
    if kind == "torch":
        return tensor
    if kind == "numpy":
        return _as_numpy(tensor)
    if kind == "cupy":
        import cupy

        if (word := dtype_name(tensor.dtype)) in BITS:
            import ml_dtypes

            return cupy.asarray(tensor.view(_whole(word))).view(getattr(ml_dtypes, word))
        return cupy.asarray(tensor)
    from numba import cuda

    return cuda.as_cuda_array(tensor)  # type: ignore[no-untyped-call]


def cupy_stream(device: torch.device) -> int | None:
    """CuPy's current raw stream if it differs from torch's, else None."""
    stream: int = sys.modules["cupy"].cuda.get_current_stream().ptr
    return stream if stream != torch.cuda.current_stream(device).cuda_stream else None


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as NumPy and error messages write it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(x: Any, name: str) -> torch.dtype:
    """The torch dtype for a torch dtype, a NumPy dtype or type, or a name."""
    if isinstance(x, torch.dtype):
        return x
    try:
        text = x if isinstance(x, str) else np.dtype(x).name
    except (TypeError, ValueError):
        text = str(x)
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InvalidProblem(f"{name}={x!r} is not a dtype: pass a torch dtype, a NumPy dtype or its name")
    return found


# --- the arrays of one problem --------------------------------------------------------------------------

Operand = Tensor | list[Tensor]


def is_list(x: Any) -> bool:
    """Whether an operand is a list of separate matrices."""
    return isinstance(x, list | tuple)


class OperandReader:
    """Adopts the arrays of one problem and records mirrored copies, which are refreshed before each launch."""

    __slots__ = ("decided", "device", "kind", "mirrors")

    def __init__(self) -> None:
        self.kind: Kind = "torch"
        self.device = torch.device("cpu")
        self.decided = False
        self.mirrors: dict[str, Adopted] = {}

    def first(self, x: Any, name: str) -> Tensor:
        """Adopts the operand that decides device and library."""
        got = adopt(x, name)
        self.kind, self.device, self.decided = got.kind, got.tensor.device, True
        return self._keep(got, name)

    def operand(self, x: Any, name: str) -> Tensor:
        """Adopts a further operand, which must have the same library and device."""
        got = self._same_device(adopt(x, name), name)
        if got.kind != self.kind:
            raise InvalidProblem(f"{name} is a {got.kind} array and a is a {self.kind} array: pass one kind of array")
        return self._keep(got, name)

    def extra(self, x: Any, name: str) -> Tensor:
        """Adopts bias or c: from any library, on the same device."""
        return self._keep(self._same_device(adopt(x, name), name), name)

    def result(self, x: Any, name: str) -> Tensor:
        """Adopts an output, which must be writable in place."""
        if read_only(x):
            raise InvalidProblem(f"{name} is read-only: pass an array that may be written")
        got = self._same_device(adopt(x, name), name)
        if got.refresh is not None:
            raise InvalidProblem(
                f"{name} has a negative or odd stride, which no kernel writes through: pass another view"
            )
        if torch.is_grad_enabled() and got.tensor.requires_grad:
            raise InvalidProblem(
                f"{name} requires grad, and a result in the caller's memory has no gradient: pass {name}.detach(), or "
                f"leave {name} away"
            )
        return got.tensor

    def forget(self, name: str) -> None:
        """Drops the mirrors of an operand, or of a list's matrices, that no launch will read."""
        self.mirrors = {k: v for k, v in self.mirrors.items() if k.partition("[")[0] != name}

    def refreshes(self) -> list[Step]:
        """The copies that must run before each launch."""
        return [mirror.refresh for mirror in self.mirrors.values() if mirror.refresh is not None]

    def _same_device(self, got: Adopted, name: str) -> Adopted:
        if self.decided and got.tensor.device != self.device:
            raise InvalidProblem(f"{name} is on {got.tensor.device} and a is on {self.device}: move it to one device")
        return got

    def _keep(self, got: Adopted, name: str) -> Tensor:
        if got.refresh is not None:
            self.mirrors[name] = got
        return got.tensor


def common_dtype(x: Operand, name: str) -> torch.dtype:
    """The common dtype of an operand's matrices, of which there is at least one."""
    if isinstance(x, Tensor):
        return x.dtype
    dtypes = {t.dtype for t in x}
    if len(dtypes) > 1:
        raise InvalidProblem(f"{name} mixes {', '.join(sorted(map(str, dtypes)))}: convert the list to one dtype")
    return dtypes.pop()
