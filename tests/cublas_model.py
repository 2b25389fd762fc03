"""The four cuBLAS entry points on host memory, for tests: what a call with these arguments would compute.

The model follows the library's own rules: column-major operands, leading dimensions that must cover
a column, addresses as numbers. It reads and writes nothing but the elements that a call names.
"""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from multigemm.backends.cublas.calls import Batch

NUMPY: dict[int, Any] = {0: np.float32, 1: np.float64, 2: np.float16, 3: np.int8, 10: np.int32, 14: ml_dtypes.bfloat16}
SINGLE = (0, 2, 14)


class ModelLibrary:
    """Stands in for `library.Cublas` where calls are only made up: its members have to be distinct."""

    gemm, strided, pointers, grouped = "gemm", "strided", "pointers", "grouped"


def _matrix(address: int, kind: int, rows: int, cols: int, ld: int) -> npt.NDArray[Any]:
    """A column-major [rows, cols] view of memory."""
    assert ld >= max(1, rows), f"leading dimension {ld} is less than {rows} rows"
    dtype = np.dtype(NUMPY[kind])
    length = (cols - 1) * ld + rows
    assert address % dtype.itemsize == 0
    memory: Any = (ctypes.c_char * (length * dtype.itemsize)).from_address(address)
    flat: npt.NDArray[Any] = np.frombuffer(memory, dtype=dtype)
    return np.lib.stride_tricks.as_strided(flat, (rows, cols), (dtype.itemsize, ld * dtype.itemsize))


def _multiply(ops: Any, extents: Any, scalars: Any, first: Any, second: Any, out: Any) -> None:
    m, n, k = extents
    a = _matrix(first[0], first[1], *((m, k) if ops[0] == 0 else (k, m)), ld=first[2])
    b = _matrix(second[0], second[1], *((k, n) if ops[1] == 0 else (n, k)), ld=second[2])
    c = _matrix(out[0], out[1], m, n, out[2])
    wide = np.int64 if c.dtype == np.int32 else np.float64
    with np.errstate(all="ignore"):  # rows that no group owns may hold anything
        product = (a if ops[0] == 0 else a.T).astype(wide) @ (b if ops[1] == 0 else b.T).astype(wide)
    if first[1] in SINGLE:
        product = product.astype(np.float32)
    old = scalars[1] * c.astype(product.dtype) if scalars[1] else 0
    c[...] = (product.dtype.type(scalars[0]) * product + old).astype(c.dtype)


def _value(argument: Any) -> Any:
    inner = getattr(argument, "_obj", argument)
    value = inner.value
    return 0 if value is None else value


def _addresses(table: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(table))


def _gemm(args: list[Any]) -> None:
    op_a, op_b, m, n, k, alpha, a, kind_a, lda, b, kind_b, ldb, beta, c, kind_c, ldc = args[:16]
    _multiply((op_a, op_b), (m, n, k), (alpha, beta), (a, kind_a, lda), (b, kind_b, ldb), (c, kind_c, ldc))


def _strided(args: list[Any]) -> None:
    op_a, op_b, m, n, k, alpha, a, kind_a, lda, step_a, b, kind_b, ldb, step_b, beta, c, kind_c, ldc, step_c, count = (
        args[:20]
    )
    size, out_size = np.dtype(NUMPY[kind_a]).itemsize, np.dtype(NUMPY[kind_c]).itemsize
    for i in range(count):
        at = a + i * step_a * size, b + i * step_b * size, c + i * step_c * out_size
        _gemm([op_a, op_b, m, n, k, alpha, at[0], kind_a, lda, at[1], kind_b, ldb, beta, at[2], kind_c, ldc])


def _pointers(args: list[Any]) -> None:
    count = args[16]
    for a, b, c in zip(*(_addresses(args[i], count) for i in (6, 9, 13)), strict=True):
        _gemm([*args[:6], a, *args[7:9], b, *args[10:13], c, *args[14:16]])


def _grouped(raw: tuple[Any, ...]) -> None:
    op_a, op_b, m, n, k, alpha, a, kind_a, lda, b, kind_b, ldb, beta, c, kind_c, ldc, count, members, _ = raw
    tables = [_addresses(_value(t), sum(members)) for t in (a, b, c)]
    at = 0
    for g in range(_value(count)):
        for _ in range(members[g]):
            _gemm([op_a[g], op_b[g], m[g], n[g], k[g], alpha[g], tables[0][at], _value(kind_a), lda[g],
                   tables[1][at], _value(kind_b), ldb[g], beta[g], tables[2][at], _value(kind_c), ldc[g]])  # fmt: skip
            at += 1


ENTRIES = {"gemm": _gemm, "strided": _strided, "pointers": _pointers}


def run(batch: Batch) -> list[str]:
    """Makes the calls of a batch on host memory; returns their names."""
    for function, args, _ in batch.calls:
        name: Any = function
        if name == "grouped":
            _grouped(args)
        else:
            ENTRIES[name]([_value(a) for a in args])
    return [call.name for call in batch.calls]


def _entry(name: str) -> Any:
    def call(blas: Any, *args: Any) -> int:
        if name == "grouped":
            _grouped(args)
        else:
            ENTRIES[name]([_value(a) for a in args])
        return 0

    return call


class ModelCublas:
    """Stands in for `library.Cublas`, and computes when called."""

    def __init__(self) -> None:
        self.gemm, self.strided, self.pointers, self.grouped = (
            _entry(name) for name in ("gemm", "strided", "pointers", "grouped")
        )

    def get_stream(self, blas: Any, stream: Any) -> int:
        return 0

    def get_math_mode(self, blas: Any, mode: Any) -> int:
        return 0

    def set_math_mode(self, blas: Any, mode: Any) -> int:
        return 0
