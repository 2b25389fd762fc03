"""Host side of the kernel for quantised operands: the words of its scales, and the tables of its codes."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm import quantize
from multigemm.backends.numba.config import NAMES, QuantisedSignature, result_and_orders
from multigemm.cuda.arguments import Address
from multigemm.planning.operands import Operands
from multigemm.problem.scales import covered_in_list
from multigemm.problem.spec import BYTE_FORMATS, ProblemSpec, ScaleSpec

CODES = {
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8, "e8m0": torch.float8_e8m0fnu,
    "u8": torch.uint8, "i8": torch.int8,
}  # fmt: skip
"""Formats of 8 bits by name: those of elements, of scales and of zero points."""
PACKED = BYTE_FORMATS
TABLE_A, TABLE_B, TABLE_SCALE_A, TABLE_SCALE_B, TABLE_ZERO, TABLE_WORDS = range(0, 6 * 256, 256)
"""Where the kernel's tables begin: the float32 of each code of both operands, their scales and zero points."""
WHOLE_K = 40
"""The shift of a k to its entry where one entry covers all of K."""
GRIDS, GRID_WORDS = 3, 6
_NAMES = {dtype: name for name, dtype in CODES.items() if name != "int8"} | NAMES


class Grids(NamedTuple):
    """The scales as the kernel's words: address, strides in elements of groups, lines and blocks of k, and shifts.

    A line's entry is the line shifted down by `line_shift`, times `line`; that of a k likewise.
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


Words = tuple[int, int, int, int, int, int]
ABSENT: Words = (0, 0, 0, 0, 0, WHOLE_K)


def quantised_signature_of(spec: ProblemSpec) -> QuantisedSignature:
    """The signature of the kernel for quantised operands."""
    a, b = spec.a.scale, spec.b.scale
    return QuantisedSignature(
        a=_NAMES[spec.a.dtype],
        b=spec.b.packed or ("int8" if spec.b.dtype is torch.int8 else _NAMES[spec.b.dtype]),
        scale_a=None if a is None else _NAMES[a.dtype],
        scale_b=None if b is None else _NAMES[b.dtype],
        zero=None if b is None or b.zero is None else _NAMES[b.zero],
        **result_and_orders(spec),
    )


@cache
def code_tables(signature: QuantisedSignature) -> npt.NDArray[np.float32]:
    """The float32 value of each code, for every operand in turn; 0 for what is no code."""
    names = (signature.a, signature.b, signature.scale_a, signature.scale_b, signature.zero)
    return np.concatenate([_floats(name) for name in names])


def _floats(name: str | None) -> npt.NDArray[np.float32]:
    found, codes = torch.zeros(256), torch.arange(256).to(torch.uint8)
    if name in PACKED:
        found[:16] = quantize.decode(codes[:16].view(1, 16), str(name))[0]  # the low four bits
    elif name == "e8m0":
        found = quantize.decode_scale(codes.view(torch.float8_e8m0fnu))
    elif name in CODES:
        found = codes.view(CODES[name]).to(torch.float32)
    return found.numpy()


def grids_of(ops: Operands) -> tuple[list[int], npt.NDArray[np.int64] | None]:
    """The words of all grids, and the table of those of a list."""
    of_a, of_b = ops.spec.a.scale, ops.spec.b.scale
    given = (("scale_a", ops.scale_a, of_a), ("scale_b", ops.scale_b, of_b), ("zero_b", ops.zero_b, of_b))
    if ops.spec.form != "per_group":
        words = list[int]()
        for name, grid, of in given:
            words += ABSENT if not isinstance(grid, Tensor) or of is None else _packed(grid, of, name)
        return words, None
    table = np.zeros((ops.spec.groups, GRIDS, GRID_WORDS), dtype=np.int64)
    for which, (name, grids, _) in enumerate(given):
        for g, (a, b) in enumerate(zip(ops.a, ops.b, strict=True)):
            lines = a.shape[0] if name == "scale_a" else b.shape[1]
            table[g, which] = ABSENT if grids is None else _listed(grids[g], name, lines, a.shape[1])
    return [x for _ in given for x in ABSENT], table


def _packed(grid: Tensor, of: ScaleSpec, name: str) -> Words:
    """A grid [groups or 1, lines, K] (of b: [.., K, columns]) of a packed form."""
    line, k = (1, 2) if name == "scale_a" else (2, 1)
    return (
        Address(grid.data_ptr(), name),
        grid.stride(0) if of.by_group else 0,
        grid.stride(line) if of.rows else 0,
        grid.stride(k) if of.k else 0,
        max(of.rows, 1).bit_length() - 1,
        of.k.bit_length() - 1 if of.k else WHOLE_K,
    )


def _listed(grid: Tensor, name: str, lines: int, k: int) -> Words:
    """The grid of one matrix of a list. Its shape says what an entry covers, which may differ by matrix."""
    matrix = grid if name == "scale_a" else grid.mT
    (rows, block), (line, deep) = covered_in_list(matrix, lines, k), matrix.stride()
    return (
        grid.data_ptr(), 0, line if rows else 0, deep if block else 0, max(rows, 1).bit_length() - 1,
        block.bit_length() - 1 if block else WHOLE_K,
    )  # fmt: skip
