"""One problem as the 64-bit words with which every kernel of this backend is launched, its tensor maps, and what
kernels of quantised operands are handed besides: the words of scales, and the tables of codes.

All kernels take the same `Call`: a flat tuple of 64-bit integers, so that a launch is one packed
buffer and no argument is inspected. `table` (for lists) or the packed formula gives each group.
"""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm import quantize
from multigemm.backends.numba.config import (
    BOX_STEP,
    COLUMNS,
    LISTED_MAPS,
    MAPS,
    NAMES,
    HopperConfig,
    QuantisedSignature,
    Signature,
    is_plain,
    result_and_orders,
    zeroes,
)
from multigemm.cuda import tensor_map
from multigemm.cuda.arguments import ACTIVATION_CODES, JAGGED_CODES
from multigemm.cuda.operand_maps import HEIGHTS, plain_map, ragged_map, result_map, side_of
from multigemm.planning.operands import ABSENT, TABLE, Operands, Packed, Strided, address_of, group_table
from multigemm.planning.scale_grids import NO_GRID, SCALES, listed_grids, packed_grids
from multigemm.problem.spec import BYTE_FORMATS, ProblemSpec

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
    """Encodes the tensor maps of a packed form, or of each product of a list: B, the results, and A, in the boxes of
    `multigemm.cuda.operand_maps`. B's have 128 columns, A's come in every height, or in one where A lies across k."""

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        self._dtype, self._config = _DTYPES[signature.compute], config
        self._sent, self._ragged = signature.sent, signature.ragged_k
        self._a_along, self._b_along = signature.a_order != "col", signature.b_order != "row"

    def of_call(self, call: Call) -> list[bytes]:
        """The maps of the operands of a packed form, in parts."""
        a = Strided(call.a, call.a_group, call.a_row, call.a_col)
        b = Strided(call.b, call.b_group, call.b_row, call.b_col)
        out = Strided(call.out, call.out_group, call.out_row, call.out_col)
        parts = self._maps(call.m, call.n, call.k, call.groups, a, b, out, HEIGHTS)
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
        of = self._dtype
        results = tensor_map.BLANK
        if self._sent:
            results = result_map(side_of(out.ptr, out.row, out.group, n, m, groups, False, of))
        if min(m, n, k, groups) <= 0:
            return [tensor_map.BLANK, results]
        a_step, b_step = a.row if self._a_along else a.col, b.col if self._b_along else b.row
        right = side_of(b.ptr, b_step, b.group, n, k, groups, self._b_along, of)
        left = side_of(a.ptr, a_step, a.group, m, k, groups, self._a_along, of)
        if self._ragged:
            return [ragged_map(right), results, ragged_map(left)]
        return [plain_map(right, COLUMNS), results, plain_map(left, *heights)]


# --- scales and codes -----------------------------------------------------------------------------------

CODES = {
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8, "e8m0": torch.float8_e8m0fnu,
    "u8": torch.uint8, "i8": torch.int8,
}  # fmt: skip
"""Formats of 8 bits by name: those of elements, of scales and of zero points."""
TABLE_A, TABLE_B, TABLE_SCALE_A, TABLE_SCALE_B, TABLE_ZERO, TABLE_WORDS = range(0, 6 * 256, 256)
"""Where the kernel's tables begin: the float32 of each code of both operands, their scales and zero points."""
GRIDS, GRID_WORDS = len(SCALES), len(NO_GRID)
_FORMATS = {dtype: name for name, dtype in CODES.items() if name != "int8"} | NAMES


class Grids(NamedTuple):
    """The scales as the kernel's words, each as `ScaleGrid` has them.

    `listed`: the table [G, GRIDS, GRID_WORDS] of a list; `tables`: the floats of all codes.
    """

    scale_a: int
    scale_a_group: int
    scale_a_line: int
    scale_a_deep: int
    scale_a_line_shift: int
    scale_a_k_shift: int
    scale_b: int
    scale_b_group: int
    scale_b_line: int
    scale_b_deep: int
    scale_b_line_shift: int
    scale_b_k_shift: int
    zero_b: int
    zero_b_group: int
    zero_b_line: int
    zero_b_deep: int
    zero_b_line_shift: int
    zero_b_k_shift: int
    listed: int
    tables: int


def quantised_signature_of(spec: ProblemSpec) -> QuantisedSignature:
    """The signature of the kernel for quantised operands."""
    a, b = spec.a.scale, spec.b.scale
    return QuantisedSignature(
        a=_FORMATS[spec.a.dtype],
        b=spec.b.packed or ("int8" if spec.b.dtype is torch.int8 else _FORMATS[spec.b.dtype]),
        scale_a=None if a is None else _FORMATS[a.dtype],
        scale_b=None if b is None else _FORMATS[b.dtype],
        zero=None if b is None or b.zero is None else _FORMATS[b.zero],
        **result_and_orders(spec),
    )


@cache
def code_tables(signature: QuantisedSignature) -> npt.NDArray[np.float32]:
    """The float32 value of each code, for every operand in turn; 0 for what is no code."""
    names = (signature.a, signature.b, signature.scale_a, signature.scale_b, signature.zero)
    return np.concatenate([_floats(name) for name in names])


def _floats(name: str | None) -> npt.NDArray[np.float32]:
    found, codes = torch.zeros(256), torch.arange(256).to(torch.uint8)
    if name in BYTE_FORMATS:
        found[:16] = quantize.decode(codes[:16].view(1, 16), str(name))[0]  # the low four bits
    elif name == "e8m0":
        found = quantize.decode_scale(codes.view(torch.float8_e8m0fnu))
    elif name in CODES:
        found = codes.view(CODES[name]).to(torch.float32)
    return found.numpy()


def grids_of(ops: Operands) -> tuple[list[int], Table | None]:
    """The words of all grids, and the table of those of a list."""
    if ops.spec.form != "per_group":
        return [*chain.from_iterable(packed_grids(ops))], None
    table = np.zeros((ops.spec.groups, GRIDS, GRID_WORDS), dtype=np.int64)
    for g, grids in enumerate(listed_grids(ops)):
        table[g] = [grid for grid, _ in grids]
    return [*NO_GRID] * GRIDS, table
