"""cublasGemmGroupedBatchedEx through ctypes: one call, host sizes, device pointer arrays.

cuBLAS is column-major, so each row-major C = A B is asked for as C^T = B^T A^T: operands swapped,
N in the place of M. Groups without elements are left out; each other group is a group of one.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from multigemm.bench.check import group_inputs, group_outputs
from multigemm.bench.entries import Entry, Prepared, Refused
from multigemm.bench.operands import Tensors
from multigemm.bench.peer_torch import without_epilogue
from multigemm.errors import LibraryError

CUDA_TYPES = {torch.float16: 2, torch.bfloat16: 14, torch.float32: 0, torch.float64: 1}
COMPUTE_TYPES = {torch.float16: 68, torch.bfloat16: 68, torch.float32: 68, torch.float64: 70}
NORMAL, TRANSPOSED = 0, 1
Group = tuple[Tensor, Tensor, Tensor]
cuda: Any = torch.cuda  # parts of torch.cuda carry no types


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The cuBLAS that torch has already loaded, so that its handle is valid."""
    cuda.current_blas_handle()
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libcublas.so" in line}
    if not paths:
        raise Refused("no libcublas.so is loaded in this process")
    found = ctypes.CDLL(sorted(paths)[0])
    if not hasattr(found, "cublasGemmGroupedBatchedEx"):
        raise Refused("this cuBLAS has no cublasGemmGroupedBatchedEx (it came with CUDA 12.5)")
    return found


def _leading(matrix: Tensor) -> tuple[int, int]:
    """(operation, leading dimension) of a row-major matrix read as the transpose of a column-major one."""
    rows, cols = matrix.shape
    if matrix.stride(1) == 1 or cols == 1:
        return NORMAL, max(matrix.stride(0) if rows > 1 else cols, cols, 1)
    if matrix.stride(0) == 1 or rows == 1:
        return TRANSPOSED, max(matrix.stride(1), rows, 1)
    raise Refused("cuBLAS needs one contiguous direction")


def _array(kind: Any, values: list[Any]) -> Any:
    return (kind * len(values))(*values)


def _arguments(groups: list[Group], pointers: list[Tensor], dtype: torch.dtype) -> tuple[Any, ...]:
    """What follows the handle; the operands are swapped, as column-major reading wants them."""
    ints, real = ctypes.c_int, ctypes.c_double if dtype == torch.float64 else ctypes.c_float
    count, kind = len(groups), CUDA_TYPES[dtype]
    left, right = [_leading(b) for _, b, _ in groups], [_leading(a) for a, _, _ in groups]
    first, second, result = (ctypes.c_void_p(p.data_ptr()) for p in pointers)
    return (
        _array(ints, [op for op, _ in left]),
        _array(ints, [op for op, _ in right]),
        _array(ints, [out.shape[1] for _, _, out in groups]),
        _array(ints, [out.shape[0] for _, _, out in groups]),
        _array(ints, [a.shape[1] for a, _, _ in groups]),
        _array(real, [1.0] * count),
        *(first, kind, _array(ints, [ld for _, ld in left])),
        *(second, kind, _array(ints, [ld for _, ld in right])),
        _array(real, [0.0] * count),
        *(result, kind, _array(ints, [_leading(out)[1] for _, _, out in groups])),
        *(count, _array(ints, [1] * count), COMPUTE_TYPES[dtype]),
    )


def _prepare(tensors: Tensors) -> Prepared:
    without_epilogue(tensors)
    dtype = tensors.workload.torch_dtype
    if dtype not in CUDA_TYPES:
        raise Refused(f"cublasGemmGroupedBatchedEx has no {dtype}")
    cublas = library()
    inputs, outputs = group_inputs(tensors), group_outputs(tensors, tensors.out)
    groups = [(a, b, out) for (a, b), out in zip(inputs, outputs, strict=True) if out.numel()]
    if not groups:
        raise Refused("every group is empty")
    pointers = [
        torch.tensor([group[which].data_ptr() for group in groups], dtype=torch.int64, device=groups[0][0].device)
        for which in (1, 0, 2)
    ]
    arguments = _arguments(groups, pointers, dtype)

    def call() -> object:
        handle = ctypes.c_void_p(cuda.current_blas_handle())
        if status := cublas.cublasGemmGroupedBatchedEx(handle, *arguments):
            raise LibraryError(f"cublasGemmGroupedBatchedEx returned status {status}")
        return pointers  # kept alive with the call

    return Prepared(call, tensors.out, "cublasGemmGroupedBatchedEx", why="knows the sizes on the host")


ENTRY = Entry("cublas_grouped", "peer", _prepare)
