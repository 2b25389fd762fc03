"""Binds the copies that bring operands into aligned rows before the fast kernel reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from multigemm.backends.triton.compile import Cubin, KernelSource
from multigemm.backends.triton.config import Config
from multigemm.backends.triton.hopper_forms import packed_order
from multigemm.backends.triton.pointer_sources import TYPES
from multigemm.planning.operands import Operands, Packed, Strided, packed
from multigemm.planning.tiles import tiles_of
from multigemm.problem.spec import OperandSpec, ProblemSpec

BLOCK_ROWS, BLOCK_COLUMNS = 32, 128


def pack_source(operand: OperandSpec, name: str, spec: ProblemSpec) -> KernelSource:
    """The copy of one operand into aligned rows."""
    order = packed_order(spec, name)
    along = "none" if operand.order == "strided" else "row" if operand.order == order else "col"
    types = "*" + TYPES[operand.dtype]
    numbers = {**dict.fromkeys(("rows", "columns"), "i32"),
               **dict.fromkeys(("group", "row", "col", "target_group", "target_row"), "i64")}  # fmt: skip
    return KernelSource("multigemm.backends.triton.packing", "pack_kernel",
                        tuple({"source": types, "target": types, **numbers}.items()),
                        (("BM", BLOCK_ROWS), ("BN", BLOCK_COLUMNS), ("ALONG", along)),
                        (("target", 16), ("target_group", 8), ("target_row", 8)))  # fmt: skip


def line_of(columns: int, size: int) -> int:
    """Elements from row to row of a copy: whole lines of 128 bytes, which are read at once, or pieces of 16."""
    whole = 128 // size if columns >= 256 else 8
    return -(-columns // whole) * whole


def _pack_one(source: Strided, target: Tensor, columns: int, code: Cubin) -> Callable[[], None]:
    """The copy of [groups, rows, columns] into the first columns of `target`."""
    from multigemm.backends.triton.driver import index_of, launcher

    groups, rows, line = target.shape
    values = [source.ptr, target.data_ptr(), rows, columns, source.group, source.row, source.col, rows * line, line]
    blocks = groups * tiles_of(rows, BLOCK_ROWS) * tiles_of(columns, BLOCK_COLUMNS)
    return launcher(code, index_of(target.device), max(1, blocks), values, (target,))


def packed_operands(
    ops: Operands, config: Config, kernels: dict[str, Cubin]
) -> tuple[Packed, list[Callable[[], None]]]:
    """Addresses as the kernel will see them, and the copies that have to run first.

    An operand that the kernel wants as "col" is copied as its transpose, row by row.
    """
    shape = packed(ops)
    copies: list[Callable[[], None]] = []
    for name in config.pack:
        x: Strided = getattr(shape, name)
        groups = shape.groups if x.group else 1
        rows, columns = (shape.m, shape.k) if name == "a" else (shape.k, shape.n)
        turned = packed_order(ops.spec, name) == "col"
        if turned:
            rows, columns, x = columns, rows, Strided(x.ptr, x.group, x.col, x.row)
        dtype = getattr(ops.spec, name).dtype
        line = line_of(columns, dtype.itemsize)
        target = torch.empty((groups, rows, line), dtype=dtype, device=ops.device)
        row, col = (1, line) if turned else (line, 1)
        moved = Strided(target.data_ptr(), rows * line if groups > 1 else 0, row, col)
        shape = replace(shape, a=moved) if name == "a" else replace(shape, b=moved)
        if x.ptr:  # else it has no elements: weights of no group count as one, which a copy would read at address 0
            copies.append(_pack_one(x, target, columns, kernels[f"pack {name}"]))
    return shape, copies
