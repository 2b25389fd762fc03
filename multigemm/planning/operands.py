"""`Operands`, which a backend's `bind` receives, and one formula that addresses every packed form.

A backend's `bind` receives `Operands`: tensors that are validated, of one compute dtype, on one
device. Two views of them serve every kernel:

* `packed(ops)` for all forms but per_group. One formula covers the five of them: with
  `start[g]`/`end[g]` along the jagged direction (0 elsewhere),
      A(g, i, k) = a.ptr + g*a.group + (start_m + i)*a.row + (start_k + k)*a.col
      B(g, k, j) = b.ptr + g*b.group + (start_k + k)*b.row + (start_n + j)*b.col
      C(g, i, j) = c.ptr + g*c.group + (start_m + i)*c.row + (start_n + j)*c.col
  in elements, where `group` is 0 for an operand without a group dimension.
* `group_table(ops)` for per_group: one row of int64 per group, columns named by `TABLE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.cuda.arguments import Address, Tokens
from multigemm.problem.fused import Fused
from multigemm.problem.spec import ProblemSpec

CPU = torch.device("cpu")


class TABLE(IntEnum):
    """Columns of the per-group table. Pointers are bytes, strides are elements, absent ones are 0."""

    A = 0
    B = 1
    C = 2
    OUT = 3
    BIAS = 4
    M = 5
    N = 6
    K = 7
    A_ROW = 8
    A_COL = 9
    B_ROW = 10
    B_COL = 11
    C_ROW = 12
    C_COL = 13
    OUT_ROW = 14
    OUT_COL = 15
    BIAS_COL = 16
    COLUMNS = 20


@dataclass(slots=True)
class Operands:
    """One staged problem, as a backend sees it. Lists only where `spec.form` is per_group.

    `ends` [G] lies on the operands' device, int32 or int64; `start[g]` is `ends[g-1]`, and
    `start[0]` is 0, or the element just before `ends` in memory when `head` is true (so an offsets
    tensor [G+1] is `ends = offsets[1:], head = True`, without a copy). Kernels clamp: start to
    [0, T], end to [start, T]. `host_offsets` [G+1] and `host_valid_rows` [G] are int64 copies on
    the host where the user gave the sizes on the host, else None (and must not be fetched silently).
    `scale_a`, `scale_b` and `zero_b` are grids [groups or 1, rows, K] (of b: [.., K, columns]), lists of matrices for
    per_group, as `ScaleSpec` describes them; a packed `b` holds bytes.
    `sizes` [G] are the user's own on the device, without gaps, where `ends` are their running sums, else None: a recipe
    that `sums_sizes` reads them, and then nobody writes `ends`.
    `fused` is what `spec.fused` describes, with dense indices and numbers on the device. There `a` and `b` are the
    operands whose rows are picked, `c` has the shape of `out`, and what cuts T tokens need not fit their extents.
    `lent`: memory between the launches of one call (`work` of `cuda.arguments.OPERANDS`); a, b and `out` may lie in it.
    """

    spec: ProblemSpec
    a: Tensor | list[Tensor]
    b: Tensor | list[Tensor]
    out: Tensor | list[Tensor]
    c: Tensor | list[Tensor] | None = None
    bias: Tensor | list[Tensor] | None = None
    ends: Tensor | None = None
    head: bool = False
    valid_rows: Tensor | None = None
    sizes: Tensor | None = None
    host_offsets: npt.NDArray[np.int64] | None = None
    host_valid_rows: npt.NDArray[np.int64] | None = None
    alpha: float = 1.0
    beta: float = 0.0
    device: torch.device = CPU
    scale_a: Tensor | list[Tensor] | None = None
    scale_b: Tensor | list[Tensor] | None = None
    zero_b: Tensor | list[Tensor] | None = None
    fused: Fused | None = None
    lent: Tensor | None = None


class Strided(NamedTuple):
    """An operand of a packed form: address, and strides in elements (group, row, column)."""

    ptr: int
    group: int
    row: int
    col: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed form as one formula (see the module docstring). The jagged extent holds T, as `Tokens` unless that is n.

    `bias` addresses bias(g, j) = ptr + g*group + (start_n + j)*col; its `row` is 0.
    """

    groups: int
    m: int
    n: int
    k: int
    jagged: Literal["m", "n", "k"] | None
    a: Strided
    b: Strided
    out: Strided
    c: Strided | None
    bias: Strided | None


def address_of(tensor: Tensor | None, operand: str, lent: Tensor | None = None) -> int:
    """The address of a tensor as an `Address` of its operand, or of `work` inside lent memory. 0 for an absent
    tensor."""
    if tensor is None:
        return 0
    at = tensor.data_ptr()
    if not operand and not tensor.numel():
        return at  # a part of the memory between launches, of which there is nothing
    if lent is not None and lent.data_ptr() <= at < lent.data_ptr() + max(lent.nbytes, 1):
        return Address(at, "work", lent.data_ptr())
    return Address(at, operand)


def reach_bytes(x: Tensor) -> int:
    """The bytes from a tensor's first element to the end of its last."""
    if not x.numel():
        return 0
    return (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def strides_of(tensor: Tensor, operand: str | None = None, lent: Tensor | None = None) -> Strided:
    """Address and strides of a matrix or a stack of matrices. Extents of 0 or 1 get stride 0.

    `operand` names the operand to which the address belongs, so that a bound launch can follow it; None in a list.

    A dimension with one element may carry any stride; a kernel must never multiply by it.
    """
    at = tensor.data_ptr()
    if operand is not None:
        at = Address(at, operand) if lent is None else address_of(tensor, operand, lent)
    if tensor.dim() == 2:
        (rows, columns), (row, column) = tensor.shape, tensor.stride()
        return Strided(at, 0, row if rows > 1 else 0, column if columns > 1 else 0)
    (groups, rows, columns), (group, row, column) = tensor.shape, tensor.stride()
    return Strided(at, group if groups > 1 else 0, row if rows > 1 else 0, column if columns > 1 else 0)


def _bias_strides(bias: Tensor, groups: int) -> Strided:
    col = bias.stride(-1) if bias.shape[-1] > 1 else 0
    group = bias.stride(0) if bias.dim() == 2 and groups > 1 else 0
    return Strided(address_of(bias, "bias"), group, 0, col)


def packed(ops: Operands) -> Packed:
    """The one formula for a packed form (every form but per_group).

    Args:
        ops: a staged problem.

    Returns:
        Extents, addresses and strides.

    Example:
        extents = packed(ops)  # in `bind` of a backend
    """
    a, b, out = cast(Tensor, ops.a), cast(Tensor, ops.b), cast(Tensor, ops.out)
    c, bias = cast("Tensor | None", ops.c), cast("Tensor | None", ops.bias)
    (rows, depth), jagged = a.shape[-2:], ops.spec.jagged
    return Packed(
        groups=ops.spec.groups,
        m=Tokens(rows) if jagged == "m" else rows,
        n=b.shape[-1],
        k=Tokens(depth) if jagged == "k" else depth,
        jagged=jagged,
        a=strides_of(a, "a", ops.lent),
        b=strides_of(b, "b", ops.lent),
        out=strides_of(out, "out", ops.lent),
        c=None if c is None else strides_of(c, "c"),
        bias=None if bias is None else _bias_strides(bias, ops.spec.groups),
    )


ABSENT = Strided(0, 0, 0, 0)
"""An operand that a problem does not have."""
NO_VIEW = Packed(0, 0, 0, 0, None, ABSENT, ABSENT, ABSENT, None, None)
"""The placeholder for the formula of a list, whose matrices are in its table."""


def view_of(ops: Operands) -> Packed:
    """The address formula of a packed form; `NO_VIEW` for a list."""
    return NO_VIEW if ops.spec.form == "per_group" else packed(ops)


def group_table(ops: Operands) -> npt.NDArray[np.int64]:
    """Pointers, extents and strides of each product of a list.

    Args:
        ops: a staged problem of the form per_group.

    Returns:
        [G, TABLE.COLUMNS] int64 on the host.

    Example:
        rows = group_table(ops)[:, TABLE.M]  # in `bind` of a backend
    """
    table = np.zeros((ops.spec.groups, TABLE.COLUMNS), dtype=np.int64)
    lists = ((ops.a, TABLE.A, TABLE.A_ROW), (ops.b, TABLE.B, TABLE.B_ROW), (ops.c, TABLE.C, TABLE.C_ROW),
             (ops.out, TABLE.OUT, TABLE.OUT_ROW))  # fmt: skip
    for matrices, pointer, stride in lists:
        for g, matrix in enumerate(matrices or ()):
            s = strides_of(matrix)
            table[g, pointer], table[g, stride], table[g, stride + 1] = s.ptr, s.row, s.col
    for g, (a, b) in enumerate(zip(ops.a, ops.b, strict=True)):
        table[g, TABLE.M], table[g, TABLE.K] = a.shape
        table[g, TABLE.N] = b.shape[1]
    for g, vector in enumerate(ops.bias or ()):
        table[g, TABLE.BIAS] = vector.data_ptr()
        table[g, TABLE.BIAS_COL] = vector.stride(0) if vector.shape[0] > 1 else 0
    return table
