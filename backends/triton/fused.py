"""Fused problems: their kernels' sources, and the binding of a problem's data.

Rows picked by index, gates, `preact_out` and `row_scale` are parts of one kernel that takes any form. Rows are summed
by a second kernel after the products. The products are a problem of their own, which any kernel may solve: rows in the
operands' dtype, in memory of the launch. For `out_rows` the destinations are sorted first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.backend import Launch, Recipe
from multigemm.backends.triton.build import KernelSource, compile_all, load, starts_early
from multigemm.backends.triton.config import Config
from multigemm.backends.triton.generic import (
    ACCUMULATORS,
    CHUNK,
    TYPES,
    argument_types,
    bits_of,
    chunk_of,
    chunks,
    constants,
    hints,
    numbers,
    prefix_source,
    programs,
    sizes_address,
    sums_sizes,
    uniform,
)
from multigemm.cuda.device import processors, to_device
from multigemm.cuda.launch import in_turn, without_move
from multigemm.planning.fused import bind_sums, columns_of, kernel_text, products_spec, view_of_tokens
from multigemm.planning.fused_steps import plan_in_steps, product_spec
from multigemm.planning.operands import (
    ABSENT,
    NO_VIEW,
    TABLE,
    Operands,
    Packed,
    address_of,
    group_table,
    strides_of,
)
from multigemm.planning.tiles import list_tiles, most_packed_tiles, tiles_of
from multigemm.problem.fused import Fused
from multigemm.problem.spec import FusedSpec, OperandSpec, ProblemSpec

PREACT, PREACT_ROW = 17, 18
"""Columns of a list's table that its products leave free."""
NOT_HERE = ("MULTIPLE", "SPLITS", "INTERPRETED")
"""Constants of the generic kernel that this one has not, or gets last."""
SUMMED_COLUMNS = 1024
"""Columns of a row that one program sums, at most."""
UNROLLED_TERMS = 16
"""Terms up to which all of them are on their way at once."""


def bits(x: float) -> int:
    """The bits of a number as a float64."""
    return int(np.float64(x).view(np.int64))


# --- the kernel of products ---------------------------------------------------------------------------


def view_of_result(ops: Operands) -> Packed:
    """The address formula of a problem: extents count tokens, and n is that of the result. `NO_VIEW` for a list."""
    shape = view_of_tokens(ops)
    return shape if shape is NO_VIEW else replace(shape, n=columns_of(ops.spec, shape.n))


def table_of(ops: Operands) -> npt.NDArray[np.int64]:
    """A table row for each product of a list, with the extents of `view_of_result`."""
    table = group_table(ops)
    table[:, TABLE.N] = [columns_of(ops.spec, n) for n in table[:, TABLE.N]]
    for g, preact in enumerate(cast(Fused, ops.fused).preacts()):
        s = strides_of(preact)
        table[g, PREACT], table[g, PREACT_ROW], table[g, PREACT_ROW + 1] = s.ptr, s.row, s.col
    return table


def _preact_of(spec: ProblemSpec) -> OperandSpec:
    return cast(FusedSpec, spec.fused).preact or OperandSpec(spec.out.dtype)


def fused_types(spec: ProblemSpec) -> dict[str, str]:
    """The types of the arguments, in the kernel's order."""
    fused, types = cast(FusedSpec, spec.fused), argument_types(spec)
    pointers = {name: types.pop(name) for name in ("a", "b", "c", "out", "bias", "ends", "table", "prefix")}
    pointers["preact"] = "*" + TYPES[_preact_of(spec).dtype]
    pointers["row_scale"] = "*" + TYPES[fused.row_scale or torch.float32]
    pointers |= {name: "*" + TYPES[getattr(fused, name) or torch.int32] for name in ("a_rows", "b_rows")}
    extents = {name: types.pop(name) for name in ("m", "n", "k", "groups", "head")}
    for name in ("partials", "arrived", "places"):
        del types[name]
    own = ("preact_group", "preact_row", "preact_col", "scale_group", "gate_alpha_bits", "gate_beta_bits", "limit_bits")
    return {**pointers, **extents, "a_extent": "i32", "b_extent": "i32", **types, **dict.fromkeys(own, "i64")}


def fused_constants(spec: ProblemSpec, config: Config, chunk: int = CHUNK, early: bool = False) -> dict[str, Any]:
    """The constexpr arguments. `early`: the kernel is launched before its predecessor is over, and waits for it."""
    fused, preact = cast(FusedSpec, spec.fused), _preact_of(spec)
    found = {name: x for name, x in constants(spec, config, 1, chunk).items() if name not in NOT_HERE}
    return found | {
        "WIDE": found["WIDE"] or preact.wide,
        "PREACT_ORDER": preact.order,
        "PREACT_BYTES": preact.align,
        "GATE": fused.layout,
        "GATE_ALPHA": fused.alpha,
        "GATE_BETA": fused.beta,
        "LIMIT": fused.limit,
        "PREACT_OUT": fused.preact is not None,
        "ROW_SCALE": fused.row_scale is not None,
        "A_ROWS": fused.a_rows is not None,
        "B_ROWS": fused.b_rows is not None,
        "EARLY": early,
        "INTERPRETED": False,
    }


def _hints(spec: ProblemSpec) -> tuple[tuple[str, int], ...]:
    """`generic.hints`, with n of the result."""
    n = None if spec.n is None else columns_of(spec, spec.n)
    found, preact = dict(hints(replace(spec, n=n))), _preact_of(spec)
    if spec.form != "per_group":
        each = preact.align // preact.dtype.itemsize
        found |= {"preact": preact.align, **dict.fromkeys(("preact_group", "preact_row", "preact_col"), each)}
    return tuple(hint for hint in found.items() if hint[1] > 1)


def fused_source(spec: ProblemSpec, config: Config, chunk: int = CHUNK, early: bool = False) -> KernelSource:
    return KernelSource(
        module="multigemm.backends.triton.kernels.fused",
        name="fused_kernel",
        signature=tuple(fused_types(spec).items()),
        constants=tuple(fused_constants(spec, config, chunk, early).items()),
        divisibility=_hints(spec),
        warps=config.warps,
        stages=config.stages,
    )


def result_tile(spec: ProblemSpec, config: Config) -> Config:
    """The config as the scheduler sees it, with the result's columns of a tile."""
    return replace(config, block_n=columns_of(spec, config.block_n))


def fused_sources(spec: ProblemSpec, config: Config, early: bool = False) -> dict[str, KernelSource]:
    """The kernels of a plan: the main one for few groups and for many, and the one that counts tiles."""
    found = {f"main {chunk}": fused_source(spec, config, chunk, early) for chunk in chunks(spec, config)}
    return found if uniform(spec) else {**found, "prefix": prefix_source(spec, result_tile(spec, config))}


def most_tiles(ops: Operands, shape: Packed, config: Config) -> int:
    """An upper bound of the number of tiles, without knowing sizes on the device."""
    rows, columns = config.block_m, columns_of(ops.spec, config.block_n)
    if ops.spec.form != "per_group":
        return most_packed_tiles(shape.jagged, shape.groups, shape.m, shape.n, rows, columns)
    sizes = ((a.shape[0], columns_of(ops.spec, b.shape[1])) for a, b in zip(ops.a, ops.b, strict=True))
    return list_tiles(sizes, rows, columns)


def fused_tensors(ops: Operands) -> dict[str, Tensor | None]:
    """The operands that this kernel has and the generic one has not, by argument name."""
    fused = cast(Fused, ops.fused)
    preact = fused.preact if isinstance(fused.preact, Tensor) else None
    rows = (None if x is None else x.values for x in (fused.a_rows, fused.b_rows))
    return dict(zip(("preact", "row_scale", "a_rows", "b_rows"), (preact, fused.row_scale, *rows), strict=True))


def fused_numbers(ops: Operands, shape: Packed) -> list[int]:
    """The arguments after the pointers."""
    fused, gate, axes = cast(Fused, ops.fused), cast(Fused, ops.fused).gate, {"m": (0, 0), "k": (1, 0), "n": (0, 1)}
    extents = numbers(ops, shape, ops.spec.groups, 0)
    del extents[5]  # places
    picked = [0, 0]
    if ops.spec.jagged is not None:
        shapes = cast(Tensor, ops.a).shape, cast(Tensor, ops.b).shape
        for side, rows in enumerate((fused.a_rows, fused.b_rows)):
            if rows is not None:
                picked[side] = shapes[side][axes[ops.spec.jagged][side]]
    preact = strides_of(fused.preact) if isinstance(fused.preact, Tensor) else ABSENT
    scale = fused.row_scale
    by_group = scale.shape[1] if scale is not None and scale.dim() == 2 else 0
    gate_numbers = [0, 0, 0] if gate is None else [bits(gate.alpha), bits(gate.beta), bits(gate.limit or 0.0)]
    return [*extents[:5], *picked, *extents[5:], *preact[1:], by_group, *gate_numbers]


class FusedPlan:
    """The kernels of one spec and config, loaded on one device."""

    __slots__ = ("_config", "_count", "_early", "_index", "_main")

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        # programs that stay take what room there is while the launch ahead still runs: some processors get one too
        # many, and the others wait for them (Mixtral, 64 tokens, H200: 765 us a layer instead of 696)
        self._early = config.programs == 0 and starts_early(index)
        sources = fused_sources(spec, config, self._early)
        compile_all(sources, index)
        self._config, self._index, self._main = config, index, load(sources[f"main {chunk_of(spec, config)}"], index)
        counted = spec.groups > CHUNK and "prefix" in sources
        self._count = load(sources["prefix"], index) if counted else None

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem. For many groups a kernel counts the tiles first."""
        shape, groups, listed = view_of_result(ops), ops.spec.groups, ops.spec.form == "per_group"
        table = to_device(table_of(ops), ops.device) if listed else None
        prefix = None if self._count is None else torch.empty(groups, dtype=torch.int32, device=ops.device)
        sizes = 0 if listed else sizes_address(ops, sums_sizes(ops.spec))
        at, counted = (0 if x is None else x.data_ptr() for x in (table, prefix))
        grid = programs(most_tiles(ops, shape, self._config), self._config, processors(self._index))
        own = (address_of(x, name) for name, x in fused_tensors(ops).items())
        data = [shape.a.ptr, shape.b.ptr, (shape.c or ABSENT).ptr, shape.out.ptr, (shape.bias or ABSENT).ptr, sizes, at,
                counted, *own]  # fmt: skip
        values = [*data, *fused_numbers(ops, shape)]
        main = self._main.bound(values, grid, (table, prefix), overlap=self._early)
        if self._count is None:
            return without_move(main) if listed else main
        values = [counted, sizes, at, shape.m, shape.n, groups, int(ops.head)]
        count = self._count.bound(values, 1, (table, prefix))
        return in_turn([without_move(count), without_move(main)] if listed else [count, main])


# --- sums of rows -------------------------------------------------------------------------------------


def sum_types(spec: ProblemSpec, sums: bool) -> dict[str, str]:
    """The types of the arguments. `sums`: the preceding launch read sizes instead of ends."""
    fused = cast(FusedSpec, spec.fused)
    pointers = {
        "y": products_spec(spec).out.dtype,
        "out": spec.out.dtype,
        "c": spec.c.dtype if spec.c else spec.out.dtype,
        "ends": (spec.sizes if sums else spec.index) or torch.int32,
        "index": fused.combine or fused.out_rows or torch.int32,
        "weights": fused.weights or torch.float32,
        "order": torch.int64,
    }
    extents = ("tokens", "n", "rows", "groups", "head")
    strides = ("out_row", "out_col", "c_row", "c_col", "beta_bits")
    types = {name: "*" + TYPES[dtype] for name, dtype in pointers.items()}
    return {**types, **dict.fromkeys(extents, "i32"), **dict.fromkeys(strides, "i64")}


def sum_constants(spec: ProblemSpec, sums: bool, early: bool = False) -> dict[str, Any]:
    """The constexpr arguments. `early` as in `fused_constants`."""
    fused = cast(FusedSpec, spec.fused)
    wide = 1 << max(4, (columns_of(spec, cast(int, spec.n)) - 1).bit_length())
    return {
        "TERMS": fused.terms,
        "UNROLLED": fused.terms <= UNROLLED_TERMS,
        "BLOCK": min(SUMMED_COLUMNS, wide),
        "OUT_ORDER": spec.out.order,
        "SCATTERS": fused.out_rows is not None,
        "HAS_C": spec.c is not None,
        "WEIGHTED": fused.weights is not None,
        "ACC": ACCUMULATORS[spec.acc],
        "SIZES": sums,
        "CHUNK": CHUNK,
        "EARLY": early,
        "INTERPRETED": False,
    }


def sum_source(spec: ProblemSpec, sums: bool, early: bool = False) -> KernelSource:
    out, each = spec.out, 16 // products_spec(spec).out.dtype.itemsize
    columns = columns_of(spec, cast(int, spec.n))
    aligned = {"y": 16, "n": each if columns % each == 0 else 1}
    if out.order == "row":
        aligned |= {"out": out.align, "out_row": out.align // out.dtype.itemsize}
    return KernelSource(
        module="multigemm.backends.triton.kernels.fused",
        name="sum_rows_kernel",
        signature=tuple(sum_types(spec, sums).items()),
        constants=tuple(sum_constants(spec, sums, early).items()),
        divisibility=tuple(hint for hint in aligned.items() if hint[1] > 1),
    )


def sum_operands(ops: Operands, rows: Tensor, index: Tensor, order: Tensor | None) -> dict[str, Tensor | None]:
    """The tensors that a sum of rows reads and writes, except for the groups' boundaries."""
    c = cast("Tensor | None", ops.c)
    return {"y": rows, "out": cast(Tensor, ops.out), "c": c, "ends": None, "index": index,
            "weights": cast(Fused, ops.fused).weights, "order": order}  # fmt: skip


def sum_numbers(ops: Operands, tokens: int) -> list[int]:
    """The arguments after the pointers."""
    out, c = strides_of(cast(Tensor, ops.out)), ABSENT if ops.c is None else strides_of(cast(Tensor, ops.c))
    rows, columns = cast(Tensor, ops.out).shape
    extents = [tokens, columns, rows, ops.spec.groups, int(ops.head)]
    return [*extents, out.row, out.col, c.row, c.col, bits_of(ops.beta, ops.spec)]


def sum_grid(spec: ProblemSpec, ops: Operands) -> int:
    """The grid: a program for each row and block of columns of the result."""
    rows, columns = cast(Tensor, ops.out).shape
    return rows * tiles_of(columns, cast(int, sum_constants(spec, False)["BLOCK"]))


class SumPlan:
    """The kernel that sums rows, after a recipe that makes them."""

    __slots__ = ("_early", "_inner", "_kernel", "_sums")

    def __init__(self, spec: ProblemSpec, inner: Recipe, index: int) -> None:
        self._inner, self._early = inner, starts_early(index)
        self._sums = inner.sums_sizes and spec.sizes is not None
        self._kernel = load(sum_source(spec, self._sums, self._early), index)

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem."""
        return bind_sums(ops, self._inner.bind, self._bind_sum)

    def _bind_sum(self, ops: Operands, rows: Tensor, index: Tensor, order: Tensor | None) -> Launch:
        tensors = sum_operands(ops, rows, index, order)
        data = {name: address_of(x, name, rows) for name, x in tensors.items() if name != "order"}
        data |= {"ends": sizes_address(ops, self._sums), "order": 0}
        keep: tuple[object, ...] = ()
        if order is not None:  # sorted anew by each launch, in memory of its own
            data, keep = data | {"index": index.data_ptr(), "order": order.data_ptr()}, (index, order)
        values = [*data.values(), *sum_numbers(ops, rows.shape[0])]
        return self._kernel.bound(values, sum_grid(ops.spec, ops), keep, overlap=self._early)


def plan_fused(spec: ProblemSpec, config: Config, index: int, why: str, plan: Callable[..., Recipe]) -> Recipe:
    """Compiles (or loads) the kernels of a fused problem. `plan` makes the recipe of plain products."""
    products = products_spec(spec)
    if products.fused is not None and config.kernel == "hopper":
        return plan_in_steps(spec, plan(product_spec(spec), config, index, why), index)
    if products.fused is None:
        inner = plan(products, config, index, why)
    else:
        bind, sums = FusedPlan(products, config, index).bind, sums_sizes(products)
        inner = Recipe("pointer", config, bind, why, sums_sizes=sums)
    kernel = kernel_text(inner.kernel, spec)
    if products is spec:
        return replace(inner, kernel=kernel)
    return replace(inner, kernel=kernel, bind=SumPlan(spec, inner, index).bind)
