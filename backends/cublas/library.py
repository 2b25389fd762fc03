"""Calls the cuBLAS that torch has loaded directly, because torch's functions obey process-wide switches.

`torch.backends.cuda.matmul.*` decide for every thread whether torch.mm may use tf32 or round partial sums to 16 bits. A
direct call decides by its compute type and by the math mode of the handle, which belongs to one thread: it is set for
the length of a launch and restored. Handle, stream and workspace are torch's. The 64-bit entry points take any extent
or leading dimension. Products become calls in one of three ways: one each, one per shape, one for all. Scalars, extents
and addresses are converted to ctypes once; a launch passes them on.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multigemm import torch_internals
from multigemm.backends.cublas.config import ALIGNMENT
from multigemm.backends.cublas.products import Bytes, Ints, Products, Shape, countable, even_steps
from multigemm.cuda.arguments import Addresses
from multigemm.cuda.device import STAGED_BYTES, index_of, to_device, upload
from multigemm.errors import LibraryError
from multigemm.problem.spec import ProblemSpec

NO_LOAD = getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW
"""The flag with which a library is found only if torch has already loaded it, so that no second copy is loaded."""
REAL_TYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.int32: 10,
    torch.bfloat16: 14,
}
COMPUTE_32F, COMPUTE_64F, COMPUTE_32I, COMPUTE_TF32 = 68, 70, 72, 77
DEFAULT_ALGORITHM = -1
EXACT_MATH = 16
"""CUBLAS_DEFAULT_MATH with CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: no tf32, no 16-bit partial sums."""

STATUS = {
    1: "NOT_INITIALIZED",
    3: "ALLOC_FAILED",
    7: "INVALID_VALUE",
    8: "ARCH_MISMATCH",
    11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR",
    15: "NOT_SUPPORTED",
    16: "LICENSE_ERROR",
}

Status = Callable[..., int]


Call = tuple[Status, tuple[Any, ...], str]
"""One library call without its handle: the function, its arguments as ctypes objects, converted once, and its name."""


class Cublas:
    """The entry points that this backend uses. Raises AttributeError for a missing one."""

    def __init__(self, path: str) -> None:
        library, brief = ctypes.CDLL(path, mode=NO_LOAD), ctypes.PyDLL(path, mode=NO_LOAD)
        self.gemm: Status = library.cublasGemmEx_64
        self.strided: Status = library.cublasGemmStridedBatchedEx_64
        self.pointers: Status = library.cublasGemmBatchedEx_64
        self.grouped: Status | None = getattr(library, "cublasGemmGroupedBatchedEx_64", None)
        self.set_math_mode: Status = brief.cublasSetMathMode  # too short to let go of Python's lock
        self.get_math_mode: Status = brief.cublasGetMathMode
        self.set_stream: Status = library.cublasSetStream_v2
        self.set_workspace: Status = library.cublasSetWorkspace_v2
        self._get_version: Status = library.cublasGetVersion_v2

    def version(self) -> str:
        """major.minor.patch of the loaded library."""
        number = ctypes.c_int()
        check(self._get_version(None, ctypes.byref(number)), "cublasGetVersion")
        major, rest = divmod(number.value, 10000)
        return f"{major}.{rest // 100}.{rest % 100}"


@lru_cache(maxsize=1)
def cublas() -> Cublas:
    """The loaded library. Raises OSError or AttributeError if torch ships none that can be called."""
    if torch.version.cuda is None:
        raise OSError("this torch was built without CUDA")
    return Cublas(f"libcublas.so.{torch.version.cuda.split('.')[0]}")


def check(status: int, name: str) -> None:
    """Raises LibraryError with the call and the status code, unless the status is success."""
    if status:
        raise LibraryError(f"{name} returned {STATUS.get(status, 'unknown status')} ({status})")


def handle() -> ctypes.c_void_p:
    """torch's handle for this thread and device, set to torch's current stream and workspace."""
    return ctypes.c_void_p(torch_internals.blas_handle())


def make(library: Cublas, blas: ctypes.c_void_p, calls: Iterable[Call]) -> None:
    """Makes the calls with neither tf32 nor 16-bit partial sums, and gives the handle its math mode back. Raises at the
    first that fails."""
    mode = ctypes.c_int()
    if status := library.get_math_mode(blas, ctypes.byref(mode)) or library.set_math_mode(blas, EXACT_MATH):
        check(status, "cublasGetMathMode or cublasSetMathMode")
    try:
        for function, args, name in calls:
            if status := function(blas, *args):
                check(status, name)
    finally:
        status = library.set_math_mode(blas, mode)
    if status:
        check(status, "cublasSetMathMode")


def aim(library: Cublas, blas: ctypes.c_void_p, stream: ctypes.c_void_p, space: Tensor) -> None:
    """Sets a handle's stream and workspace. The library forgets the workspace whenever the stream is set."""
    at, size = ctypes.c_void_p(space.data_ptr()), ctypes.c_size_t(space.numel())
    if status := library.set_stream(blas, stream) or library.set_workspace(blas, at, size):
        check(status, "cublasSetStream or cublasSetWorkspace")


def scalar(compute: int, value: float) -> Any:
    """alpha or beta in the scale type of a compute type, as the library reads it from the host."""
    if compute == COMPUTE_64F:
        return ctypes.c_double(value)
    return ctypes.c_int32(int(value)) if compute == COMPUTE_32I else ctypes.c_float(value)


# --- products as calls ---

LONG, MIXED_GROUPS = 6e9, 1023
"""Multiply-adds of a call whose products are left in their order, and how many of them at most."""
LARGEST_BATCH = 65535
"""More products than this go in several calls: a grid's third extent, which some kernels use, ends there."""


class Types:
    """The types of a call as ctypes arguments: element types, compute type, references to both scalars."""

    __slots__ = ("alpha", "beta", "compute", "operand", "out", "tail")

    def __init__(self, operand: torch.dtype, compute: int, out: torch.dtype, alpha: float, beta: float) -> None:
        self.operand, self.out = ctypes.c_int(REAL_TYPES[operand]), ctypes.c_int(REAL_TYPES[out])
        self.compute = ctypes.c_int(compute)
        self.alpha, self.beta = scalar(compute, alpha), scalar(compute, beta)
        self.tail = self.compute, ctypes.c_int(DEFAULT_ALGORITHM)


Origin = tuple[int, int]
"""Where an operand of all products lies: its place among `OPERANDS`, or -1 for memory of our own; and its address."""
Origins = tuple[Origin, Origin, Origin]
"""Of the first operand, the second one and the result."""


class AddressTable:
    """The addresses of many products on the device, for a call that reads them there: one row per operand."""

    __slots__ = ("_addresses", "_device", "_memory", "pointers")

    def __init__(self, addresses: Ints, device: torch.device) -> None:
        self._addresses = np.ascontiguousarray(addresses)
        self._device = device
        self.pointers = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        """The addresses of the table's rows on the device, as the call receives them."""
        self._copy(self._addresses)

    def move(self, steps: Sequence[int]) -> None:
        """Adds a number to the first addresses of each row, for the next launch on the current stream."""
        addresses = self._addresses + np.array(steps, dtype=np.int64)[:, None]
        if addresses.nbytes <= STAGED_BYTES:
            upload(self._memory.data_ptr(), addresses.ctypes.data, addresses.nbytes, index_of(self._device))
        else:
            self._copy(addresses)

    def _copy(self, addresses: Ints) -> None:
        self._memory = to_device(addresses, self._device)
        row = self._memory.stride(0) * self._memory.element_size()
        for i, pointer in enumerate(self.pointers):
            pointer.value = self._memory.data_ptr() + i * row


class Batch:
    """Calls in order, and the tables that they read. `origins` is None for calls that cannot follow their operands."""

    __slots__ = ("_direct", "_steps", "calls", "origins", "tables")

    def __init__(self, calls: Sequence[Call] = (), tables: Sequence[AddressTable] = ()) -> None:
        self.calls, self.tables = list(calls), list(tables)
        self.origins: Origins | None = None
        self._direct: list[list[tuple[ctypes.c_void_p, int]]] | None = None
        self._steps: list[int] | None = [0, 0, 0]

    def move(self, addresses: Addresses) -> None:
        """Sets the operands' addresses."""
        assert self.origins is not None, "products of a list do not move"
        if self._direct is None:
            self._direct = self._first_addresses()
        steps = [0 if operand < 0 else addresses[operand] - at for operand, at in self.origins]
        before, self._steps = self._steps, None  # unknown, should this be interrupted
        if steps != before:
            for pointers, step in zip(self._direct, steps, strict=True):
                for pointer, first in pointers:
                    pointer.value = first + step
            for table in self.tables:
                table.move(steps)
        self._steps = steps

    def _first_addresses(self) -> list[list[tuple[ctypes.c_void_p, int]]]:
        """The arguments that name memory of an operand, by operand, with the addresses that they were made with."""
        found: list[list[tuple[ctypes.c_void_p, int]]] = [[], [], []]
        of_tables = {id(pointer) for table in self.tables for pointer in table.pointers}
        for _, arguments, _ in self.calls:
            for row, pointer in zip(found, (x for x in arguments if type(x) is ctypes.c_void_p), strict=True):
                if id(pointer) not in of_tables:
                    row.append((pointer, pointer.value or 0))
        return found


def compute_type(spec: ProblemSpec) -> int:
    """The library's compute type. float32 means IEEE unless the problem asks for tf32; 16-bit types are summed in
    float32."""
    if spec.compute is torch.float64:
        return COMPUTE_64F
    if spec.compute is torch.int8:
        return COMPUTE_32I
    return COMPUTE_TF32 if spec.compute is torch.float32 and spec.precision == "tf32" else COMPUTE_32F


types = lru_cache(maxsize=256)(Types)
"""Nobody writes into them, so calls share them."""


def _batch_arguments(
    s: Shape, at: Sequence[ctypes.c_void_p], t: Types, strides: Sequence[int] | None, count: int
) -> Any:
    """The arguments of a call for `count` products of one shape."""
    op, extent = ctypes.c_int, ctypes.c_int64
    m, n, k, *leads = map(extent, s[2:])
    steps: Any = ((), (), ()) if strides is None else zip(map(extent, strides))
    (first, second, out), (one, two, three) = at, steps
    return (
        op(s.op_first), op(s.op_second), m, n, k, ctypes.byref(t.alpha), first, t.operand, leads[0], *one,
        second, t.operand, leads[1], *two, ctypes.byref(t.beta), out, t.out, leads[2], *three, extent(count), *t.tail,
    )  # fmt: skip


def one_each(library: Cublas, products: Products, t: Types) -> Batch:
    """One cublasGemmEx per product. This loop is most of the cost of a bind, so it calls only constructors."""
    address, extent, op, function = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, library.gemm
    alpha, beta, found = ctypes.byref(t.alpha), ctypes.byref(t.beta), list[Call]()
    shapes = [(op(first), op(second), *map(extent, extents)) for first, second, *extents in products.shapes]
    for kind, first, second, out in zip(products.kinds.tolist(), *products.addresses.tolist(), strict=True):
        *extents, ld_first, ld_second, ld_out = shapes[kind]
        arguments = (
            *extents, alpha, address(first), t.operand, ld_first, address(second), t.operand, ld_second,
            beta, address(out), t.out, ld_out, *t.tail,
        )  # fmt: skip
        found.append((function, arguments, "cublasGemmEx"))
    return Batch(found)


def one_per_shape(library: Cublas, products: Products, t: Types, size: Bytes, device: torch.device) -> Batch:
    """Products of one shape in one batched call: strided where they lie evenly, else by addresses on the device.

    The latter takes half a microsecond more: its kernel has to fetch the addresses first. So products are
    put in the order of their results in memory, whatever the order in which they were given.
    """
    batch = Batch()
    for shape, places in products.groups():
        same = products.addresses[:, places]
        same = same[:, same[2].argsort(kind="stable")]
        for first in range(0, len(places), LARGEST_BATCH):
            _batched(library, shape, same[:, first : first + LARGEST_BATCH], t, size, device, batch)
    return batch


def _batched(
    library: Cublas, shape: Shape, same: Ints, t: Types, size: Bytes, device: torch.device, into: Batch
) -> None:
    count, strides = same.shape[1], _strides(same, size)
    if count == 1 or (strides is None and not aligned(same)):
        into.calls += one_each(library, Products([shape], np.zeros(count, np.int64), same), t).calls
    elif strides is not None:
        args = _batch_arguments(shape, [*map(ctypes.c_void_p, same[:, 0].tolist())], t, strides, count)
        into.calls.append((library.strided, args, "cublasGemmStridedBatchedEx"))
    else:
        table = AddressTable(same, device)
        into.tables.append(table)
        args = _batch_arguments(shape, table.pointers, t, None, count)
        into.calls.append((library.pointers, args, "cublasGemmBatchedEx"))


def _strides(same: Ints, size: Bytes) -> tuple[int, int, int] | None:
    """The elements from each operand to the next, if constant and within cuBLAS's limit; else None."""
    steps = even_steps(same)
    if steps is None:
        return None
    first, second, out = steps[0] // size.operand, steps[1] // size.operand, steps[2] // size.out
    near = countable(first, size.operand) and countable(second, size.operand) and countable(out, size.out)
    return (first, second, out) if near else None


def aligned(addresses: Ints) -> bool:
    """Whether every address may be passed to a call that reads addresses from the device.

    The library cannot see addresses on the device. It assumes the largest alignment that the leading dimensions allow,
    and faults on others.
    """
    return not (addresses % ALIGNMENT).any()


def in_groups(products: Products) -> list[tuple[Shape, list[int]]]:
    """Products of equal shape as one group of the call, which spares it work for each; but long ones as they come.

    Among those, some are bound by their sums and others by reading their weights: side by side they hide each other,
    and one kind behind the other took up to a twelfth longer.
    """
    shapes, kinds = products.shapes, products.kinds.tolist()
    work = [shape.m * shape.n * shape.k for shape in shapes]
    if len(shapes) > 1 and len(kinds) <= MIXED_GROUPS and sum(work[kind] for kind in kinds) > LONG:
        return [(shapes[kind], [place]) for place, kind in enumerate(kinds)]
    return products.groups()


def one_for_all(library: Cublas, products: Products, t: Types, device: torch.device) -> Batch:
    """A single cublasGemmGroupedBatchedEx."""
    groups = in_groups(products)
    table = AddressTable(products.addresses[:, [place for _, places in groups for place in places]], device)
    columns, members = list(zip(*(shape for shape, _ in groups), strict=True)), [len(places) for _, places in groups]
    return grouped_call(library, columns, members, table.pointers, t, [table])


def grouped_call(
    library: Cublas,
    columns: Sequence[Sequence[int]],
    members: Sequence[int],
    at: Sequence[ctypes.c_void_p],
    t: Types,
    tables: Sequence[AddressTable] = (),
) -> Batch:
    """A cublasGemmGroupedBatchedEx of groups: the fields of their shapes as columns, and how many products each has.
    Tables of addresses lie at `at` on the device."""
    count = len(members)
    ops = [(ctypes.c_int * count)(*column) for column in columns[:2]]
    m, n, k, ld_first, ld_second, ld_out = ((ctypes.c_int64 * count)(*column) for column in columns[2:])
    alpha, beta = ((type(v) * count)(*([v.value] * count)) for v in (t.alpha, t.beta))
    args = (*ops, m, n, k, alpha, at[0], t.operand, ld_first, at[1], t.operand, ld_second, beta, at[2], t.out, ld_out,
            ctypes.c_int64(count), (ctypes.c_int64 * count)(*members), t.compute)  # fmt: skip
    assert library.grouped is not None, "the variant is refused without this entry point"
    return Batch([(library.grouped, args, "cublasGemmGroupedBatchedEx")], tables)
