"""The kernels' view of a problem, packed byte by byte: `Problem` in kernels/common.cuh.

Whatever a kernel must know at run time is in here, so that extents, strides, addresses and epilogue
never cause a compilation.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from multigemm.cuda.device import to_device
from multigemm.planning.operands import Operands, Packed, Strided, group_table, packed
from multigemm.problem.spec import ProblemSpec

PROBLEM = struct.Struct("<" + "4q" * 5 + "3q2d3q12i")
TYPES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.float64: 4, torch.int32: 5, None: 0}
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
JAGGED = {None: 0, "m": 1, "n": 2, "k": 3}
ABSENT = Strided(0, 0, 0, 0)


def table_of(ops: Operands) -> Tensor | None:
    """The table of a list on the device; None for the packed forms."""
    return to_device(group_table(ops), ops.device) if ops.spec.form == "per_group" else None


def view_of(ops: Operands) -> Packed:
    """The packed formula; for a list, whose matrices are in its table, an empty one."""
    if ops.spec.form == "per_group":
        return Packed(ops.spec.groups, 0, 0, 0, None, ABSENT, ABSENT, ABSENT, None, None)
    return packed(ops)


def problem_bytes(ops: Operands, table: Tensor | None, view: Packed) -> bytes:
    """The argument of every kernel."""
    spec = ops.spec
    pointers = [0 if t is None else t.data_ptr() for t in (ops.ends, ops.valid_rows, table)]
    strided = [*view.a, *view.b, *view.out, *(view.c or ABSENT), *(view.bias or ABSENT)]
    return PROBLEM.pack(
        *strided, *pointers, float(ops.alpha), float(ops.beta), view.m, view.n, view.k,
        view.groups, JAGGED[view.jagged], _is64(ops.ends), int(ops.head), _is64(ops.valid_rows), int(spec.zero_unowned),
        ACTIVATIONS[spec.activation], TYPES[spec.out.dtype], TYPES[_c_type(spec)], TYPES[spec.bias],
        int(spec.alpha != "zero"), int(spec.form in ("batched", "masked")),
    )  # fmt: skip


def _is64(tensor: Tensor | None) -> int:
    return int(tensor is not None and tensor.dtype == torch.int64)


def _c_type(spec: ProblemSpec) -> torch.dtype | None:
    return None if spec.c is None else spec.c.dtype


def tiles_at_most(ops: Operands, view: Packed, rows: int, cols: int) -> int:
    """An upper bound of the number of tiles, known without reading any size from the device."""
    if ops.spec.form == "per_group":
        return sum(-(-a.shape[0] // rows) * -(-b.shape[1] // cols) for a, b in zip(ops.a, ops.b, strict=True))
    jagged, groups = view.jagged, view.groups
    down = -(-view.m // rows) + groups if jagged == "m" else -(-view.m // rows) * (1 if jagged == "n" else groups)
    across = -(-view.n // cols) + (groups if jagged == "n" else 0)
    return int(down * across)
