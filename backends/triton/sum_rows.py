"""Sums of rows by a second kernel after the products, which are a problem of their own that any kernel may solve: rows
in the operands' dtype, in memory of the launch. For `out_rows` the destinations are sorted first."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from multigemm.backend import Launch, Recipe
from multigemm.backends.triton.build import KernelSource, load, starts_early
from multigemm.backends.triton.generic import ACCUMULATORS, CHUNK, TYPES, bits_of, sizes_address
from multigemm.planning.fused import bind_sums, columns_of, products_spec
from multigemm.planning.operands import ABSENT, Operands, address_of, strides_of
from multigemm.planning.tiles import tiles_of
from multigemm.problem.fused import Fused
from multigemm.problem.spec import FusedSpec, ProblemSpec

EXTENTS = ("tokens", "n", "rows", "groups", "head")
STRIDES = ("out_row", "out_col", "c_row", "c_col", "beta_bits")
NUMBERS = (*EXTENTS, *STRIDES)
SUMMED_COLUMNS = 1024
"""Columns of a row that one program sums, at most."""
UNROLLED_TERMS = 16
"""Terms up to which all of them are on their way at once."""


def sum_types(spec: ProblemSpec, sums: bool) -> dict[str, str]:
    """The types of the arguments. `sums`: the preceding launch read sizes instead of ends."""
    fused = cast(FusedSpec, spec.fused)
    pointers = {
        "y": products_spec(spec).out.dtype,
        "out": spec.out.dtype,
        "c": spec.c.dtype if spec.c else spec.out.dtype,
        "ends": (spec.sizes if sums else spec.index) or torch.int32,
        "index": fused.combine or fused.out_rows or torch.int32,
        "weights": fused.weights or torch.float32,
        "order": torch.int64,
    }
    types = {name: "*" + TYPES[dtype] for name, dtype in pointers.items()}
    return {**types, **dict.fromkeys(EXTENTS, "i32"), **dict.fromkeys(STRIDES, "i64")}


def sum_constants(spec: ProblemSpec, sums: bool, early: bool = False) -> dict[str, Any]:
    """The constexpr arguments. `early` as in `generic.pointer_constants`."""
    fused = cast(FusedSpec, spec.fused)
    wide = 1 << max(4, (columns_of(spec, cast(int, spec.n)) - 1).bit_length())
    return {
        "TERMS": fused.terms,
        "UNROLLED": fused.terms <= UNROLLED_TERMS,
        "BLOCK": min(SUMMED_COLUMNS, wide),
        "OUT_ORDER": spec.out.order,
        "SCATTERS": fused.out_rows is not None,
        "HAS_C": spec.c is not None,
        "WEIGHTED": fused.weights is not None,
        "ACC": ACCUMULATORS[spec.acc],
        "SIZES": sums,
        "CHUNK": CHUNK,
        "EARLY": early,
        "INTERPRETED": False,
    }


def sum_source(spec: ProblemSpec, sums: bool, early: bool = False) -> KernelSource:
    out, each = spec.out, 16 // products_spec(spec).out.dtype.itemsize
    columns = columns_of(spec, cast(int, spec.n))
    aligned = {"y": 16, "n": each if columns % each == 0 else 1}
    if out.order == "row":
        aligned |= {"out": out.align, "out_row": out.align // out.dtype.itemsize}
    return KernelSource(
        module="multigemm.backends.triton.kernels.sum_rows",
        name="sum_rows_kernel",
        signature=tuple(sum_types(spec, sums).items()),
        constants=tuple(sum_constants(spec, sums, early).items()),
        divisibility=tuple(hint for hint in aligned.items() if hint[1] > 1),
    )


def sum_operands(ops: Operands, rows: Tensor, index: Tensor, order: Tensor | None) -> dict[str, Tensor | None]:
    """The tensors that a sum of rows reads and writes, except for the groups' boundaries."""
    c = cast("Tensor | None", ops.c)
    return {"y": rows, "out": cast(Tensor, ops.out), "c": c, "ends": None, "index": index,
            "weights": cast(Fused, ops.fused).weights, "order": order}  # fmt: skip


def sum_numbers(ops: Operands, tokens: int) -> dict[str, int]:
    """The arguments after the pointers."""
    out, c = strides_of(cast(Tensor, ops.out)), ABSENT if ops.c is None else strides_of(cast(Tensor, ops.c))
    rows, columns = cast(Tensor, ops.out).shape
    extents = (tokens, columns, rows, ops.spec.groups, int(ops.head))
    return dict(zip(NUMBERS, (*extents, out.row, out.col, c.row, c.col, bits_of(ops.beta, ops.spec)), strict=True))


def sum_grid(spec: ProblemSpec, ops: Operands) -> int:
    """The grid: a program for each row and block of columns of the result."""
    rows, columns = cast(Tensor, ops.out).shape
    return rows * tiles_of(columns, cast(int, sum_constants(spec, False)["BLOCK"]))


class SumPlan:
    """The kernel that sums rows, after a recipe that makes them."""

    __slots__ = ("_early", "_inner", "_kernel", "_sums")

    def __init__(self, spec: ProblemSpec, inner: Recipe, index: int) -> None:
        self._inner, self._early = inner, starts_early(index)
        self._sums = inner.sums_sizes and spec.sizes is not None
        self._kernel = load(sum_source(spec, self._sums, self._early), index)

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem."""
        return bind_sums(ops, self._inner.bind, self._bind_sum)

    def _bind_sum(self, ops: Operands, rows: Tensor, index: Tensor, order: Tensor | None) -> Launch:
        tensors = sum_operands(ops, rows, index, order)
        data = {name: address_of(x, name, rows) for name, x in tensors.items() if name != "order"}
        data |= {"ends": sizes_address(ops, self._sums), "order": 0}
        keep: tuple[object, ...] = ()
        if order is not None:  # sorted anew by each launch, in memory of its own
            data, keep = data | {"index": index.data_ptr(), "order": order.data_ptr()}, (index, order)
        values = [*data.values(), *sum_numbers(ops, rows.shape[0]).values()]
        return self._kernel.bound(values, sum_grid(ops.spec, ops), keep, overlap=self._early)
