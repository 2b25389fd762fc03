"""A table of products as BLAS calls, prepared once for given sizes: launching them is a short loop.

Small products go into one batched call, whose threads work on different products. A large product
is a call of its own, whose threads share it: a batch of few large products would leave threads idle. Tiles
beat the batch where products differ in shape; for equal ones BLAS prepares its kernel once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from multigemm.backends.cpu.jit import Tile, TileCalls
from multigemm.backends.cpu.mkl import Library
from multigemm.backends.cpu.tables import Table

LARGE = 1 << 22
"""Multiply-adds from which all threads share one product."""

Call = tuple[Callable[..., None], tuple[int, ...]]


class Calls:
    """Runs all products of a table. It keeps the arrays that the calls read by address."""

    def __init__(
        self,
        table: Table,
        dtype: Any,
        gemm: Callable[..., None],
        batch: Callable[..., None] | None,
        tile: Tile | None = None,
    ) -> None:
        self._keep: list[Any] = []
        self._calls: list[Call] = []
        if tile is not None and not table.uniform:
            table = self._tiles(table, tile)
        large = np.ones(table.count, bool) if batch is None else table.m * table.n * table.k >= LARGE
        if batch is not None and table.uniform and table.count >= 2 * torch.get_num_threads():
            large[:] = False  # equal products enough for every thread: none waits for another
        if batch is not None and not large.all():
            self._calls.append((batch, self._batch(table.keep(~large), dtype)))
        if large.any():
            self._calls += [(gemm, arguments) for arguments in self._single(table.keep(large), dtype)]

    def _tiles(self, table: Table, tile: Tile) -> Table:
        """Takes the small products that tiles can read; the rest of the table is for BLAS."""
        small = TileCalls.fits(table) & (table.m * table.n * table.k < LARGE)
        if small.any():
            self._calls.append((TileCalls(table.keep(small), tile), ()))
        return table.keep(~small)

    def _constants(self, count: int, dtype: Any) -> tuple[Any, Any]:
        constants = np.ones(count, dtype), np.zeros(count, dtype)
        self._keep.append(constants)
        return constants

    def _batch(self, t: Table, dtype: Any) -> tuple[int, ...]:
        one, zero = self._constants(t.count, dtype)
        groups = np.array([1 if t.uniform else t.count], np.int64)
        sizes = np.array([t.count], np.int64) if t.uniform else np.ones(t.count, np.int64)
        order = (t.transa, t.transb, t.m, t.n, t.k, one, t.a, t.lda, t.b, t.ldb, zero, t.c, t.ldc, groups, sizes)
        self._keep.append(order)
        return tuple(x.ctypes.data for x in order)

    def _single(self, t: Table, dtype: Any) -> list[tuple[int, ...]]:
        one, zero = (x.ctypes.data for x in self._constants(1, dtype))
        self._keep.append(t)
        flags = [np.arange(t.count) + x.ctypes.data for x in (t.transa, t.transb)]
        step = 8 * np.arange(t.count)
        m, n, k, lda, ldb, ldc = (step + x.ctypes.data for x in (t.m, t.n, t.k, t.lda, t.ldb, t.ldc))
        ones, zeros = np.full(t.count, one), np.full(t.count, zero)
        columns = (*flags, m, n, k, ones, t.a, lda, t.b, ldb, zeros, t.c, ldc)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def __call__(self) -> None:
        for function, arguments in self._calls:
            function(*arguments)


def float_calls(table: Table, library: Library, tile: Tile | None) -> Calls:
    """float32 products."""
    return Calls(table, np.float32, library.sgemm, library.sgemm_batch, tile)


def double_calls(table: Table, library: Library, tile: Tile | None) -> Calls:
    """float64 products."""
    return Calls(table, np.float64, library.dgemm, library.dgemm_batch)


def bf16_calls(table: Table, library: Library, tile: Tile | None) -> Calls:
    """bfloat16 products with float32 results; there is no batched entry point."""
    return Calls(table, np.float32, library.bf16, None)
