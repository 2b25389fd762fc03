"""One problem as the words that every kernel of this backend is launched with, and its tensor maps.

All kernels take the same `Call`: a flat tuple of 64-bit integers, so that a launch is one packed
buffer and no argument is inspected. `table` (for lists) or the packed formula gives each group.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.backends.numba.config import NAMES, HopperConfig, Signature, signature_of
from multigemm.backends.numba.layout import MAPS, ROW_BYTES, SIZE, token_boxes
from multigemm.cuda import tensor_map
from multigemm.cuda.arguments import Address, Fields, Slot, fields, join
from multigemm.planning.operands import TABLE, Operands, Packed, Strided, address_of, group_table, packed
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

    @property
    def view_a(self) -> Strided:
        """A as the tensor maps describe it."""
        return Strided(self.a, self.a_group, self.a_row, self.a_col)

    @property
    def view_b(self) -> Strided:
        """The same for B."""
        return Strided(self.b, self.b_group, self.b_row, self.b_col)


_ABSENT = Strided(0, 0, 0, 0)
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
Table = npt.NDArray[np.int64]
ACROSS = 64
"""Elements of one box across k: 128 bytes of a 16-bit type."""
GRANULE = 16
"""Bytes that a row of a tensor map is a multiple of."""


def _wide(index: Tensor | None) -> int:
    return int(index is not None and index.dtype == torch.int64)


def call_of(ops: Operands, style: tuple[int, ...], table: Tensor | None = None) -> Call:
    """The words of one problem; `style` is that of its spec, `table` that of a list on the device."""
    if table is not None:
        view = Packed(len(cast("list[Tensor]", ops.a)), 0, 0, 0, None, _ABSENT, _ABSENT, _ABSENT, None, None)
    else:
        view = packed(ops)
    bias = view.bias or _ABSENT
    k = 0 if ops.spec.alpha == "zero" else view.k
    return Call(
        view.groups, view.m, view.n, k, _JAGGED[view.jagged],
        address_of(ops.ends, "ends"), _wide(ops.ends), int(ops.head),
        address_of(ops.valid_rows, "valid_rows"), _wide(ops.valid_rows),
        0 if table is None else table.data_ptr(),
        *view.a, *view.b, *view.out, *(view.c or _ABSENT),
        bias.ptr, bias.group, bias.col, *style,
    )  # fmt: skip


def epilogue_words(spec: ProblemSpec) -> tuple[int, ...]:
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


def list_table(ops: Operands) -> Table:
    """The host table of a list problem; alpha = 0 reads neither A nor B, which is K = 0."""
    table = group_table(ops)
    if ops.spec.alpha == "zero":
        table[:, TABLE.K] = 0
    return table


def packed_arguments(call: Call, alpha: float, beta: float, *more: int) -> Fields:
    """All that a kernel takes as 64-bit words, and which of them are addresses of operands."""
    raw = struct.pack(f"<{len(call)}q2d{len(more)}q", *call, alpha, beta, *more)
    values = (*call, 0, 0, *more)
    return fields(raw, [Slot(8 * i, x.operand, x - x.base) for i, x in enumerate(values) if type(x) is Address])


def tensor_maps(config: HopperConfig, signature: Signature, call: Call, table: Table | None) -> Fields:
    """MAPS maps for each group that has its own: B, then A. Blank ones stand for what is never loaded."""
    if table is None:
        return _maps_of(config, signature, call.m, call.n, call.k, call.groups, call.view_a, call.view_b)
    rows = table.tolist()
    return join(_maps_of(config, signature, row[TABLE.M], row[TABLE.N], row[TABLE.K], 1, *_views(row)) for row in rows)


def _views(row: list[int]) -> tuple[Strided, Strided]:
    """A and B of one row of the table."""
    a = Strided(row[TABLE.A], 0, row[TABLE.A_ROW], row[TABLE.A_COL])
    return a, Strided(row[TABLE.B], 0, row[TABLE.B_ROW], row[TABLE.B_COL])


def _maps_of(
    config: HopperConfig, signature: Signature, m: int, n: int, k: int, groups: int, a: Strided, b: Strided
) -> Fields:
    """The maps of one A and B; blank ones where the product has no terms, since nothing is loaded then."""
    if min(m, n, k, groups) <= 0:
        return fields(bytes(MAPS * tensor_map.SIZE), ())
    bk, name = ROW_BYTES // SIZE[signature.compute], signature.compute
    a_groups, b_groups = (groups if a.group else 1), (groups if b.group else 1)
    if signature.b_order == "row":
        maps = _encode(name, b.ptr, (n, k, b_groups), (b.row, b.group), ACROSS, [bk])
    else:
        maps = _encode(name, b.ptr, (k, n, b_groups), (b.col, b.group), bk, [ACROSS])
    if signature.a_order == "col":
        maps += _encode(name, a.ptr, (m, k, a_groups), (a.col, a.group), ACROSS, [bk])
    else:
        maps += _encode(name, a.ptr, (k, m, a_groups), (a.row, a.group), bk, token_boxes(config))
    return join([*maps, bytes((MAPS - len(maps)) * tensor_map.SIZE)])


def _encode(
    name: str, address: int, extents: tuple[int, int, int], strides: tuple[int, int], width: int, heights: list[int]
) -> list[Fields]:
    """Maps of [group, other, contiguous] elements, one for each height of a box; strides (other, group) in elements.

    A dimension of one element gets a stride that TMA accepts, since it is never multiplied.
    """
    size = SIZE[name]
    row = -(-extents[0] * size // GRANULE) * GRANULE
    pitch = strides[0] * size if extents[1] > 1 else row
    group = strides[1] * size if extents[2] > 1 else max(pitch * extents[1], row)
    boxes = [(width, height, 1) for height in heights]
    return tensor_map.encode(_DTYPES[name], address, extents, (pitch, group), boxes)
