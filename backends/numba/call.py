"""One problem as the words that every kernel of this backend is launched with.

All kernels take the same `Call`: a flat tuple of 64-bit integers, so that a launch is one packed
buffer and no argument is inspected. `table` (for lists) or the packed formula gives each group.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from multigemm.backends.numba.config import NAMES, signature_of
from multigemm.planning.operands import Operands, Packed, Strided, packed
from multigemm.problem.spec import ProblemSpec

JAGGED_M, JAGGED_N, JAGGED_K = 1, 2, 3
KIND = {"f16": 1, "bf16": 2, "f32": 3, "f64": 4, "i8": 5, "i32": 6}
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")
_JAGGED = {None: 0, "m": JAGGED_M, "n": JAGGED_N, "k": JAGGED_K}


class Call(NamedTuple):
    """Extents are those of a whole packed operand; strides are in elements; 0 marks what is absent."""

    groups: int
    m: int
    n: int
    k: int
    jagged: int
    ends: int
    ends_wide: int
    head: int
    valid: int
    valid_wide: int
    table: int
    a: int
    a_group: int
    a_row: int
    a_col: int
    b: int
    b_group: int
    b_row: int
    b_col: int
    out: int
    out_group: int
    out_row: int
    out_col: int
    c: int
    c_group: int
    c_row: int
    c_col: int
    bias: int
    bias_group: int
    bias_col: int
    out_kind: int
    out_size: int
    c_kind: int
    c_size: int
    bias_kind: int
    bias_size: int
    activation: int
    plain: int
    zeroes: int


_ABSENT = Strided(0, 0, 0, 0)


def _wide(index: Tensor | None) -> int:
    return int(index is not None and index.dtype == torch.int64)


def call_of(ops: Operands, table: Tensor | None = None) -> Call:
    """The words of one problem; `table` lies on the device and belongs to a list problem."""
    if table is not None:
        view = Packed(len(cast("list[Tensor]", ops.a)), 0, 0, 0, None, _ABSENT, _ABSENT, _ABSENT, None, None)
    else:
        view = packed(ops)
    bias = view.bias or _ABSENT
    k = 0 if ops.spec.alpha == "zero" else view.k
    return Call(
        view.groups, view.m, view.n, k, _JAGGED[view.jagged],
        0 if ops.ends is None else ops.ends.data_ptr(), _wide(ops.ends), int(ops.head),
        0 if ops.valid_rows is None else ops.valid_rows.data_ptr(), _wide(ops.valid_rows),
        0 if table is None else table.data_ptr(),
        *view.a, *view.b, *view.out, *(view.c or _ABSENT),
        bias.ptr, bias.group, bias.col, *_style(ops.spec),
    )  # fmt: skip


def _style(spec: ProblemSpec) -> tuple[int, ...]:
    """The epilogue as numbers: kinds and sizes of out, C and bias; activation; whether it only rounds; zeroing."""
    c = None if spec.c is None else spec.c.dtype
    pairs = [(0, 0) if x is None else (KIND[NAMES[x]], x.itemsize) for x in (spec.out.dtype, c, spec.bias)]
    facts = signature_of(spec)
    return (
        *pairs[0],
        *pairs[1],
        *pairs[2],
        ACTIVATIONS.index(spec.activation),
        int(facts.plain),
        int(facts.zero_unowned),
    )
