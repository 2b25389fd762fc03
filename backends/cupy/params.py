"""The kernels' view of a problem, packed byte by byte: `Problem` in kernels/common.cuh.

Whatever a kernel must know at run time is in here, so that extents, strides, addresses and epilogue
never cause a compilation.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from multigemm.cuda.arguments import Address, Fields, Slot, fields, tokens_at
from multigemm.cuda.device import to_device
from multigemm.planning.operands import Operands, Packed, Strided, group_table, packed

PROBLEM = struct.Struct("<" + "4q" * 5 + "3q2d3q12i")
ADDRESSES = (0, 32, 64, 96, 128, 160, 168)
"""Where a, b, out, c, bias, the ends and the numbers of valid rows stand."""
ROWS = 200
"""Where m stands."""
TYPES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.float64: 4, torch.int32: 5, None: 0}
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
JAGGED = {None: 0, "m": 1, "n": 2, "k": 3}
ABSENT = Strided(0, 0, 0, 0)

NO_VIEW = Packed(0, 0, 0, 0, None, ABSENT, ABSENT, ABSENT, None, None)


def table_of(ops: Operands) -> Tensor | None:
    """The table of a list on the device; None for the packed forms."""
    return to_device(group_table(ops), ops.device) if ops.spec.form == "per_group" else None


def view_of(ops: Operands) -> Packed:
    """The packed formula; for a list, whose matrices are in its table, an empty one."""
    return NO_VIEW if ops.spec.form == "per_group" else packed(ops)


def problem_bytes(ops: Operands, table: Tensor | None, view: Packed) -> Fields:
    """The argument of every kernel."""
    spec, a, b, out, c, bias = ops.spec, view.a, view.b, view.out, view.c or ABSENT, view.bias or ABSENT
    ends, end_bytes = _sizes(ops.ends, "ends")
    valid_rows, valid_bytes = _sizes(ops.valid_rows, "valid_rows")
    raw = PROBLEM.pack(
        *a, *b, *out, *c, *bias, ends, valid_rows, 0 if table is None else table.data_ptr(),
        float(ops.alpha), float(ops.beta), view.m, view.n, view.k, spec.groups, JAGGED[view.jagged],
        end_bytes == 8, ops.head, valid_bytes == 8, spec.zero_unowned, ACTIVATIONS[spec.activation],
        TYPES[spec.out.dtype], TYPES[None if spec.c is None else spec.c.dtype], TYPES[spec.bias],
        spec.alpha != "zero", spec.form == "batched" or spec.form == "masked",
    )  # fmt: skip
    addresses = zip(ADDRESSES, (a.ptr, b.ptr, out.ptr, c.ptr, bias.ptr, ends, valid_rows), strict=True)
    slots = [Slot(at, x.operand, x - x.base) for at, x in addresses if isinstance(x, Address)]
    return fields(raw, slots, tokens_at((view.m,), ROWS))


def _sizes(tensor: Tensor | None, operand: str) -> tuple[int, int]:
    """Where a tensor of sizes lies, and the bytes of an element; zeros for none."""
    return (0, 0) if tensor is None else (Address(tensor.data_ptr(), operand), tensor.itemsize)


def tiles_at_most(ops: Operands, view: Packed, rows: int, cols: int) -> int:
    """An upper bound of the number of tiles, known without reading any size from the device."""
    if ops.spec.form == "per_group":
        return sum(-(-a.shape[0] // rows) * -(-b.shape[1] // cols) for a, b in zip(ops.a, ops.b, strict=True))
    return packed_tiles_at_most(view, view.m, rows, cols)


def packed_tiles_at_most(view: Packed, m: int, rows: int, cols: int) -> int:
    """The same of a packed form with `m` rows."""
    jagged, groups = view.jagged, view.groups
    down = -(-m // rows) + groups if jagged == "m" else -(-m // rows) * (1 if jagged == "n" else groups)
    across = -(-view.n // cols) + (groups if jagged == "n" else 0)
    return int(down * across)
