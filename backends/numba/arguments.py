"""One problem as the 64-bit words with which every kernel of this backend is launched, and its tensor maps.

All kernels take the same `Call`: a flat tuple of 64-bit integers, so that a launch is one packed
buffer and no argument is inspected. `table` (for lists) or the packed formula gives each group.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.backends.numba.config import (
    BOX_STEP,
    COLUMNS,
    FAR,
    LISTED_MAPS,
    MAPS,
    MOST_BOX_ROWS,
    NAMES,
    ROW_BYTES,
    SIZE,
    HopperConfig,
    Signature,
    is_plain,
    zeroes,
)
from multigemm.cuda import tensor_map
from multigemm.cuda.arguments import ACTIVATION_CODES, JAGGED_CODES, Fields
from multigemm.planning.operands import ABSENT, TABLE, Operands, Packed, Strided, address_of, group_table
from multigemm.problem.spec import ProblemSpec

JAGGED_M, JAGGED_N, JAGGED_K = (JAGGED_CODES[axis] for axis in ("m", "n", "k"))
KIND = {"f16": 1, "bf16": 2, "f32": 3, "f64": 4, "i8": 5, "i32": 6}


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


_DTYPES = {name: dtype for dtype, name in NAMES.items()}
Table = npt.NDArray[np.int64]
ACROSS = 64
"""Elements of one box across k: 128 bytes of a 16-bit type."""
GRANULE = 16
"""Bytes that a stride of a tensor map is a multiple of."""
EDGE = 0x7FFF0000
"""The extent of a dimension of a map in which nothing ends."""


def _wide(index: Tensor | None) -> int:
    return int(index is not None and index.dtype == torch.int64)


def call_of(ops: Operands, view: Packed, style: tuple[int, ...], table: Tensor | None = None) -> Call:
    """The words of one problem. `style` is the epilogue style of its spec, `table` a list's table on the device."""
    bias = view.bias or ABSENT
    k = 0 if ops.spec.alpha == "zero" else view.k
    return Call(
        ops.spec.groups, view.m, view.n, k, JAGGED_CODES[view.jagged],
        address_of(ops.ends, "ends"), _wide(ops.ends), int(ops.head),
        address_of(ops.valid_rows, "valid_rows"), _wide(ops.valid_rows),
        0 if table is None else table.data_ptr(),
        *view.a, *view.b, *view.out, *(view.c or ABSENT),
        bias.ptr, bias.group, bias.col, *style,
    )  # fmt: skip


def epilogue_words(spec: ProblemSpec) -> tuple[int, ...]:
    """The epilogue as numbers: kinds and sizes of out, C and bias; activation; whether it only rounds; zeroing."""
    c = None if spec.c is None else spec.c.dtype
    pairs = [(0, 0) if x is None else (KIND[NAMES[x]], x.itemsize) for x in (spec.out.dtype, c, spec.bias)]
    return (
        *pairs[0],
        *pairs[1],
        *pairs[2],
        ACTIVATION_CODES[spec.activation],
        int(is_plain(spec)),
        int(zeroes(spec)),
    )


def list_table(ops: Operands) -> Table:
    """The table of a list problem on the host. With alpha = 0 neither A nor B is read, as with K = 0."""
    table = group_table(ops)
    if ops.spec.alpha == "zero":
        table[:, TABLE.K] = 0
    return table


def list_box(rows: int, config: HopperConfig) -> int:
    """The rows that each block of a cluster loads at once from a list's matrix; as in kernels/hopper_tiles.py."""
    pieces = max(-(-rows // config.n_max), 1)
    height = -(-rows // pieces)
    if pieces > 1:
        height = -(-height // config.even) * config.even
    steps = -(-height // BOX_STEP)
    return -(-steps // config.cluster) * BOX_STEP


class MapEncoder:
    """Encodes the tensor maps of a packed form, or of each product of a list: B, the results, and A.

    A box is 128 bytes along the contiguous direction. An operand that is contiguous along k has dims (k, rows, group)
    and boxes of 128 columns, or of rows of every height; one that lies across k (rows, k, group) and boxes of 64 by a
    stage's k.

    Two kinds of maps count back from an end, in dims (elements of a line, back, end, wrap): back = FAR - left lies
    inside the extent FAR while `left` > 0, and outside after it. There nothing is stored, and zeros are loaded: so a
    jagged k ends in zeros although the next group's elements follow in memory, and results end at any row. The address,
    base + (back + end) * step + FAR * (stride of `wrap`), is brought back by that stride: FAR times it is -FAR * step
    modulo 2^64.
    """

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        self._dtype, self._size = _DTYPES[signature.compute], SIZE[signature.compute]
        self._config, self._sent, self._ragged = config, signature.sent, signature.ragged_k
        self._a_across, self._b_across = signature.a_order == "col", signature.b_order == "row"
        self._bk = ROW_BYTES // self._size
        self._heights = tuple(range(BOX_STEP, MOST_BOX_ROWS + 1, BOX_STEP))

    def of_call(self, call: Call) -> list[bytes]:
        """The maps of the operands of a packed form, in parts."""
        a = Strided(call.a, call.a_group, call.a_row, call.a_col)
        b = Strided(call.b, call.b_group, call.b_row, call.b_col)
        out = Strided(call.out, call.out_group, call.out_row, call.out_col)
        parts = self._maps(call.m, call.n, call.k, call.groups, a, b, out, self._heights)
        return [*parts, bytes(MAPS * tensor_map.SIZE - sum(map(len, parts)))]

    def of_list(self, table: Table) -> list[bytes]:
        """The maps of every product of a list."""
        parts = list[bytes]()
        for row in table.tolist():
            a = Strided(row[TABLE.A], 0, row[TABLE.A_ROW], row[TABLE.A_COL])
            b = Strided(row[TABLE.B], 0, row[TABLE.B_ROW], row[TABLE.B_COL])
            out = Strided(row[TABLE.OUT], 0, row[TABLE.OUT_ROW], row[TABLE.OUT_COL])
            height = list_box(row[TABLE.M], self._config)
            made = self._maps(row[TABLE.M], row[TABLE.N], row[TABLE.K], 1, a, b, out, (height,))
            parts += [*made, bytes(LISTED_MAPS * tensor_map.SIZE - sum(map(len, made)))]
        return parts

    def _maps(
        self, m: int, n: int, k: int, groups: int, a: Strided, b: Strided, out: Strided, heights: tuple[int, ...]
    ) -> list[bytes]:
        """The maps of one A, B and result; blank ones through which nothing will go."""
        results = self._results(n, groups, out) if self._sent and min(m, n, groups) > 0 else tensor_map.BLANK
        if min(m, n, k, groups) <= 0:
            return [tensor_map.BLANK, results]
        b_pitch, a_pitch = (b.row if self._b_across else b.col), (a.col if self._a_across else a.row)
        if self._ragged:
            return [self._counted(b, n, b_pitch), results, self._counted(a, m, a_pitch)]
        across = ((ACROSS, self._bk, 1),)
        b_boxes = across if self._b_across else ((self._bk, COLUMNS, 1),)
        a_boxes = across if self._a_across else tuple((self._bk, height, 1) for height in heights)
        return [
            self._encode(b, n, k, groups, b_pitch, b_boxes, self._b_across),
            results,
            self._encode(a, m, k, groups, a_pitch, a_boxes, self._a_across),
        ]

    def _encode(
        self,
        x: Strided,
        mn: int,
        k: int,
        groups: int,
        pitch: int,
        boxes: tuple[tuple[int, int, int], ...],
        across: bool,
    ) -> Fields:
        """Maps of groups of lines along k, or `across` k, one for each box. `pitch` is elements from line to line.

        A dimension of one element gets a stride that TMA accepts, since it is never multiplied.
        """
        size, groups = self._size, groups if x.group else 1
        inner, outer = (mn, k) if across else (k, mn)
        step = pitch * size if outer > 1 else GRANULE
        group = x.group * size if groups > 1 else GRANULE
        promotion = tensor_map.PROMOTION_128B if across else tensor_map.PROMOTION_256B
        layout = (inner, outer, groups), (step, group), boxes
        return tensor_map.encode_together(self._dtype, x.ptr, *layout, promotion=promotion)

    def _counted(self, x: Strided, mn: int, pitch: int) -> Fields:
        """A map of a jagged k, which counts it back from a group's end."""
        step = max(pitch * self._size, GRANULE)
        extents, strides = (mn, FAR, EDGE, EDGE), (step, step, 2**35 - step)
        return tensor_map.encode_together(self._dtype, x.ptr, extents, strides, ((ACROSS, self._bk, 1, 1),))

    def _results(self, n: int, groups: int, out: Strided) -> Fields:
        """A map of results, which counts rows back from a tile's end."""
        step, groups = max(out.row * self._size, GRANULE), groups if out.group else 1
        group = out.group * self._size if groups > 1 else GRANULE
        extents, strides = (n, FAR, EDGE, EDGE, groups), (step, step, 2**35 - step, group)
        return tensor_map.encode_together(self._dtype, out.ptr, extents, strides, ((ACROSS, ACROSS, 1, 1, 1),))
