"""The batched BLAS inside torch, called by address: one call for groups of any shapes.

torch's own operators cost microseconds per product, and its float32 ones obey a global precision
switch. Wheels for x86 carry MKL and export its 64-bit-integer entry points (suffix `_64_`), whose
integer width is certain. They take every argument by address, follow torch's thread count and know
nothing of torch's switches. Where they are missing, or fail a small trial, `library()` is None and
the loop over NumPy remains.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

_GEMM_ARGUMENTS = 13
_BATCH_ARGUMENTS = 15


@dataclass(frozen=True, slots=True)
class Library:
    """Fortran entry points: column-major, everything by address."""

    sgemm: Callable[..., None]
    dgemm: Callable[..., None]
    sgemm_batch: Callable[..., None]
    dgemm_batch: Callable[..., None]
    bf16: Callable[..., None]


def _entry(library: ctypes.CDLL, name: str, arguments: int) -> Callable[..., None]:
    function = getattr(library, name)
    function.argtypes, function.restype = [ctypes.c_void_p] * arguments, None
    return function  # type: ignore[no-any-return]


def _open() -> Library | None:
    """The entry points, or None where this build of torch has none."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            library = ctypes.CDLL(str(path))
            return Library(
                _entry(library, "sgemm_64_", _GEMM_ARGUMENTS),
                _entry(library, "dgemm_64_", _GEMM_ARGUMENTS),
                _entry(library, "sgemm_batch_64_", _BATCH_ARGUMENTS),
                _entry(library, "dgemm_batch_64_", _BATCH_ARGUMENTS),
                _entry(library, "gemm_bf16bf16f32_64_", _GEMM_ARGUMENTS),
            )
        except (OSError, AttributeError):
            continue
    return None


def _trial(batch: Callable[..., None], dtype: Any) -> bool:
    """Two products of different shapes, one with a transposed operand, against NumPy."""
    shapes = [(2, 3, 4), (5, 1, 2)]
    a = [np.arange(m * k, dtype=dtype).reshape(m, k) + 1 for m, n, k in shapes]
    b = [np.arange(k * n, dtype=dtype).reshape(n, k) - 2 for m, n, k in shapes]
    c = [np.full((m, n), 9, dtype) for m, n, k in shapes]
    m, n, k = (np.array(extent, np.int64) for extent in zip(*shapes, strict=True))
    at, bt, ct = (np.array([x.ctypes.data for x in xs], np.int64) for xs in (a, b, c))
    transposed, straight = np.frombuffer(b"TT", np.uint8), np.frombuffer(b"NN", np.uint8)
    one, zero, count, size = np.ones(2, dtype), np.zeros(2, dtype), np.array([2]), np.ones(2, np.int64)
    order = (transposed, straight, n, m, k, one, bt, k, at, k, zero, ct, n, count, size)
    batch(*(x.ctypes.data for x in order))
    return all(np.array_equal(z, x @ y.T) for x, y, z in zip(a, b, c, strict=True))


@lru_cache(maxsize=1)
def library() -> Library | None:
    """The entry points of this process, tried once."""
    found = _open()
    if found is None or not (_trial(found.sgemm_batch, np.float32) and _trial(found.dgemm_batch, np.float64)):
        return None
    return found


@lru_cache(maxsize=1)
def has_fast_bf16() -> bool:
    """Whether bfloat16 products run on the processor's own instructions."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
