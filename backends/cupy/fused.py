"""Fused problems: the additional arguments of the products' kernels, and the kernel that sums rows."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cupy.arguments import TYPES, problem_bytes
from multigemm.backends.cupy.build import Source, load
from multigemm.cuda.arguments import ACTIVATION_CODES, Address, Argument, Fields, Slot, fields
from multigemm.cuda.device import to_device
from multigemm.planning.fused import bind_sums, columns_of, products_spec
from multigemm.planning.operands import ABSENT, TABLE, Operands, Packed, address_of, group_table, strides_of
from multigemm.problem.fused import PICKED, Fused
from multigemm.problem.spec import FusedSpec, ProblemSpec

FUSED = struct.Struct("<10q3d8i")
SUM = struct.Struct("<15qd7i4x")
PREACT = 17
"""The first of three columns of a list's table that its products leave free: address and strides of `preact_out`."""
LAYOUT_CODES = {"interleaved": 1, "halves": 2, "halves_up_first": 2}
GATE_CODES = {
    "swiglu": ACTIVATION_CODES["silu"],
    "geglu": ACTIVATION_CODES["gelu"],
    "geglu_tanh": ACTIVATION_CODES["gelu_tanh"],
    "reglu": ACTIVATION_CODES["relu"],
    "glu": 5,
}
"""The activation of each gate (kernels/fused.cuh)."""
SUM_THREADS = 128
"""The largest number of threads of a block that sums columns of one row."""
SUM_AHEAD = (2, 4, 8)
"""The number of rows that a thread may load at once."""


def _is_wide(x: Tensor | None) -> bool:
    return x is not None and x.dtype == torch.int64


def _packed(form: struct.Struct, *values: float) -> Fields:
    """Values as bytes of a kernel's structure, whose first fields are 8-byte addresses."""
    slots = [Slot(8 * i, x.operand, x - x.base) for i, x in enumerate(values) if isinstance(x, Address)]
    return fields(form.pack(*values), slots)


def fused_bytes(ops: Operands) -> Fields:
    """The bytes of `Fused` (kernels/fused.cuh)."""
    fused, spec = cast(Fused, ops.fused), ops.spec
    rows = [None if x is None else x.values for x in (fused.a_rows, fused.b_rows)]
    extents = [0, 0]
    for side, (name, x) in enumerate((("a_rows", ops.a), ("b_rows", ops.b))):
        if rows[side] is not None:
            extents[side] = cast(Tensor, x).shape[PICKED[name][cast(str, spec.jagged)]]
    each = fused.preacts()
    preact = strides_of(fused.preact, "preact") if isinstance(fused.preact, Tensor) else ABSENT
    scale = fused.row_scale
    by_group = scale.shape[1] if scale is not None and scale.dim() == 2 else 0
    gate = fused.gate
    numbers = (1.0, 0.0, 0.0) if gate is None else (gate.alpha, gate.beta, gate.limit or 0.0)
    return _packed(
        FUSED, address_of(rows[0], "a_rows"), address_of(rows[1], "b_rows"), preact.ptr,
        address_of(scale, "row_scale"), *extents, *preact[1:], by_group, *numbers,
        *map(_is_wide, rows), TYPES[each[0].dtype] if each else 0, TYPES[None if scale is None else scale.dtype],
        0 if gate is None else LAYOUT_CODES[gate.layout], gate is not None and gate.layout == "halves_up_first",
        0 if gate is None else GATE_CODES[gate.kind], gate is not None and gate.limit is not None,
    )  # fmt: skip


def table_with_preacts(ops: Operands) -> Tensor | None:
    """The table of a list's groups on the device, with the matrices of `preact_out`; None for packed forms."""
    if ops.spec.form != "per_group":
        return None
    table: npt.NDArray[np.int64] = group_table(ops)
    assert TABLE.COLUMNS >= PREACT + 3
    for g, preact in enumerate(cast(Fused, ops.fused).preacts()):
        at = strides_of(preact)
        table[g, PREACT : PREACT + 3] = at.ptr, at.row, at.col
    return to_device(table, ops.device)


def problem_argument(ops: Operands, table: Tensor | None, view: Packed) -> Argument:
    """The first argument of a products' kernel: `Problem`, or `FusedProblem` (kernels/fused.cuh)."""
    if ops.fused is None:
        return problem_bytes(ops, table, view)
    plain = ops if ops.fused.gate is None else replace(ops, spec=replace(ops.spec, activation=None))
    return (problem_bytes(plain, table, view), fused_bytes(ops))


# --- sums of rows -------------------------------------------------------------------------------------


def _vector(spec: ProblemSpec) -> int:
    """Columns that a lane sums: 16 bytes of a row, or one."""
    each = 16 // products_spec(spec).out.dtype.itemsize
    return each if columns_of(spec, cast(int, spec.n)) % each == 0 else 1


def sum_source(spec: ProblemSpec) -> Source:
    """The kernel that sums rows of products."""
    fused = cast(FusedSpec, spec.fused)
    ahead = min((n for n in SUM_AHEAD if n >= fused.terms > 0), default=SUM_AHEAD[-1])
    defines = (
        ("Y_TYPE", TYPES[products_spec(spec).out.dtype]), ("WIDE", int(_vector(spec) > 1)), ("AHEAD", ahead),
        ("SORTED", int(fused.out_rows is not None)), ("WEIGHTS", TYPES[fused.weights]),
        ("INDEX64", int((fused.combine or fused.out_rows) is torch.int64)),
    )  # fmt: skip
    return Source("sum_rows.cu", "sum_rows", defines)


class SumOfRows:
    """The kernel that sums rows, launched after the products."""

    def __init__(self, spec: ProblemSpec, products: Callable[[Operands], Launch], index: int) -> None:
        self._kernel, self._products, self._vector = load(sum_source(spec), index), products, _vector(spec)

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem."""
        return bind_sums(ops, self._products, self._bind_sum)

    def _bind_sum(self, ops: Operands, y: Tensor, index: Tensor, order: Tensor | None) -> Launch:
        out, c, weights = cast(Tensor, ops.out), cast("Tensor | None", ops.c), cast(Fused, ops.fused).weights
        to, of_c = strides_of(out, "out"), ABSENT if c is None else strides_of(c, "c")
        (rows, columns), terms = out.shape, 0 if order is not None else index.shape[1]
        lies_whole = ops.spec.out.order == "row" and ops.spec.out.align == 16 and self._vector > 1
        # What is sorted anew by each launch lies in memory of its own.
        at = index.data_ptr() if order is not None else address_of(index, "index")
        sorted_at = 0 if order is None else order.data_ptr()
        units = -(-columns // self._vector)
        across = -(-units // SUM_THREADS)
        argument = _packed(
            SUM, address_of(y, "out", y), of_c.ptr, to.ptr, address_of(ops.ends, "ends"), at, sorted_at,
            address_of(weights, "weights"),
            y.shape[0], columns, rows, terms, to.row, to.col, of_c.row, of_c.col, float(ops.beta), ops.spec.groups,
            ops.head, _is_wide(ops.ends), TYPES[out.dtype], TYPES[None if c is None else c.dtype], lies_whole, across,
        )  # fmt: skip
        threads, kept = -(-units // (32 * across)) * 32, () if order is None else (index, order)
        return self._kernel.bound([argument], grid=rows * across, threads=threads, overlap=True, keep=kept)


def summed(spec: ProblemSpec, products: Any, index: int) -> Any:
    """A function that binds a problem: the products alone, or with a sum of their rows after them."""
    fused = spec.fused
    return products if fused is None or not fused.scatters else SumOfRows(spec, products, index).bind
