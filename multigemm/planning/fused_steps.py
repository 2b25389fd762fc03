"""Fused problems in steps: separate kernels before and after a plain product.

    gather   copies the rows of a and b that indices pick, zeros where there is no row
    product  a plain product by a backend's kernel, in the accumulator's dtype if a later step rounds
    finish   preact_out, activation or gate, row_scale; rounds once
    sum      combine, or out_rows, whose destinations are sorted before

A backend runs in steps what its own kernel lacks, and what a separate product does faster than a fused one. The caller
of the launch lends the memory between the steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from multigemm.backend import Launch, Recipe, fused_reasons
from multigemm.cuda import nvrtc
from multigemm.cuda.arguments import ACTIVATION_CODES, words
from multigemm.cuda.launch import NOTHING
from multigemm.planning.fused import columns_of, lending, rows_dtype, sort_step
from multigemm.planning.operands import ABSENT, Operands, address_of, strides_of
from multigemm.problem.fused import PICKED, Fused, Index
from multigemm.problem.spec import FusedSpec, OperandSpec, ProblemSpec, classify, classify_fresh

SOURCE = nvrtc.source_of(Path(__file__).with_suffix(".cu"))
TYPE_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
LAYOUT_CODES = {"": 0, "halves": 1, "halves_up_first": 2, "interleaved": 3}
GATE_ACTIVATIONS = {"swiglu": 4, "geglu": 2, "geglu_tanh": 3, "reglu": 1, "glu": 5}
"""What a gate applies to g, as `ACT` of the kernel: glu takes its sigmoid."""
CUTS = {"jagged_m": 1, "jagged_n": 2, "masked": 3}
THREADS, BLOCKS = 256, 16 * 132
"""Of a launch, at most: a block takes one row after another."""
ALIGNED = 256
"""The alignment in bytes of the parts of the lent memory."""
EIGHT = 8


def needs_finish(spec: ProblemSpec) -> bool:
    """Whether a step after the product rounds its sums."""
    fused = cast(FusedSpec, spec.fused)
    return bool(fused.layout) or fused.preact is not None or fused.row_scale is not None


def gathered_spec(spec: ProblemSpec) -> ProblemSpec:
    """The spec after picked rows were copied into consecutive rows."""
    fused = cast(FusedSpec, spec.fused)
    a, b, tokens = spec.a, spec.b, max(spec.total, 2)
    if fused.a_rows is not None:
        a = _copied(a, tokens, spec.k if spec.jagged == "m" else spec.m, PICKED["a_rows"][cast(str, spec.jagged)])
    if fused.b_rows is not None:
        b = _copied(b, tokens, spec.n if spec.jagged == "k" else spec.k, PICKED["b_rows"][cast(str, spec.jagged)])
    rest = replace(fused, a_rows=None, b_rows=None)
    return replace(spec, a=a, b=b, fused=rest if rest.keywords else None)


def product_spec(spec: ProblemSpec) -> ProblemSpec:
    """The spec of the plain product among the steps."""
    fused = cast(FusedSpec, spec.fused)
    found = replace(gathered_spec(spec), fused=None)
    if needs_finish(spec):
        found = replace(found, out=classify_fresh(spec.acc, [_shape_of(spec)]), activation=None, zero_unowned=False)
    elif fused.scatters:
        found = replace(found, out=classify_fresh(rows_dtype(spec), [_shape_of(spec)]), zero_unowned=False)
    return replace(found, c=None) if fused.scatters else found


def _copied(x: OperandSpec, tokens: int, width: int | None, axis: int) -> OperandSpec:
    """The `OperandSpec` of an operand after rows (axis 0) or columns were copied into consecutive ones."""
    copy = torch.empty((tokens, cast(int, width)), dtype=x.dtype, device="meta")
    return classify(copy if axis == 0 else copy.t())


def _shape_of(spec: ProblemSpec) -> tuple[int, ...]:
    """The shape of the products' result as far as the spec knows it, with the token count rounded up to its bucket."""
    tokens = max(spec.total, 2)
    m, n = (tokens if extent is None else extent for extent in (spec.m, spec.n))
    if spec.form == "jagged_m":
        return tokens, n
    return (m, tokens) if spec.form == "jagged_n" else (spec.groups, m, n)


def steps_reasons(spec: ProblemSpec) -> list[str]:
    """Why a fused problem cannot run in steps; empty if it can, apart from limits of the product itself."""
    if spec.form == "per_group":
        return ["fused keywords with lists: the steps round a product take packed operands: pack them, or use 'triton'"]
    if spec.acc not in TYPE_CODES and needs_finish(spec):
        return [f"preact_out of {spec.compute} products, whose sums are {spec.acc}: use 'triton' or 'cpu'"]
    return []


def taken_in_steps(spec: ProblemSpec) -> bool:
    """Whether a backend without fused kernels runs this problem in steps."""
    return spec.fused is not None and not spec.quantised and not steps_reasons(spec)


def fused_reasons_in_steps(spec: ProblemSpec) -> list[str]:
    """Why a backend that runs fused problems in steps refuses this one, apart from limits of the product itself."""
    if spec.fused is None or taken_in_steps(spec):
        return []
    if spec.quantised:
        return fused_reasons(spec)
    if spec.batch_invariant and needs_finish(spec):
        return ["batch_invariant=True with a gate in a step of its own: name a backend whose kernel has the gate"]
    return steps_reasons(spec)


def plan_in_steps(spec: ProblemSpec, inner: Recipe, index: int) -> Recipe:
    """The recipe of a fused problem, built round the recipe of its `product_spec`, on GPU `index`."""
    fused = cast(FusedSpec, spec.fused)
    names = ["gather"] * (fused.a_rows is not None) + ["gather"] * (fused.b_rows is not None) + [inner.kernel]
    names += ["finish"] * needs_finish(spec) + ["sort"] * (fused.out_rows is not None) + ["sum"] * fused.scatters
    steps = _Steps(spec, inner, index)
    said = f"in steps: {len(names)} launches, {', '.join(names)}"
    return replace(
        inner, kernel=", then ".join(names), bind=steps.bind, why="; ".join(filter(None, (inner.why, said))),
        sums_sizes=False,
    )  # fmt: skip


def _gather(ops: Operands, name: str, index: Index, copy: Tensor, lent: Tensor | None, device: int) -> Launch:
    if not copy.numel():
        return NOTHING
    x = cast(Tensor, ops.a if name == "a_rows" else ops.b)
    picked = x if PICKED[name][cast(str, ops.spec.jagged)] == 0 else x.t()
    size = x.element_size()
    (extent, width), (row, col) = picked.shape, picked.stride()
    each = _largest_unit(picked) // size if col == 1 or width == 1 else 1
    values = [address_of(x, name[0]), address_of(index.values, name), address_of(copy, "", lent), copy.shape[0],
              extent, row // each, col if each == 1 else 1, width // each]  # fmt: skip
    defines = {"INDEX": index.values.element_size(), "UNIT": each * size}
    return _bound("gather_rows", defines, device, values, copy.shape[0], width // each, ops)


def gather_steps(ops: Operands, device: int) -> tuple[list[Launch], dict[str, Any], Tensor | None]:
    """The launches that copy picked rows on GPU `device`, the resulting operands, and their memory."""
    memory, parts = _allocated(_copies(ops), ops.device)
    return *_copied_rows(ops, parts, memory, device), memory


def _copied_rows(
    ops: Operands, parts: dict[str, Tensor], memory: Tensor | None, device: int
) -> tuple[list[Launch], dict[str, Any]]:
    """The launches that copy picked rows to their parts of `memory`, and the operands "a" and "b" that these are."""
    picks, jagged = cast(Fused, ops.fused).picks, cast(str, ops.spec.jagged)
    steps = [_gather(ops, name, index, parts[name], memory, device) for name, index in picks.items()]
    return steps, {name[0]: parts[name] if PICKED[name][jagged] == 0 else parts[name].t() for name in picks}


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of one spec on one device, ready to be bound to problems."""

    spec: ProblemSpec
    inner: Recipe
    index: int

    def bind(self, ops: Operands) -> Launch:
        """Binds the launches of one problem and lays out the memory between them."""
        fused, wanted, shape = cast(Fused, ops.fused), _copies(ops), _product_shape(ops)
        if needs_finish(self.spec):
            wanted["sums"] = shape, self.spec.acc
        if fused.scatters:
            wanted["rows"] = (shape[0], columns_of(self.spec, shape[1])), rows_dtype(self.spec)
        lent, parts = _allocated(wanted, ops.device)
        steps, copies = _copied_rows(ops, parts, lent, self.index)
        rows = parts["rows"] if fused.scatters else cast(Tensor, ops.out)
        result = parts["sums"] if needs_finish(self.spec) else rows
        steps.append(self.inner.bind(self._product(ops, copies, result, lent)) if result.numel() else NOTHING)
        if needs_finish(self.spec) and result.numel():
            steps.append(self._finish(ops, result, rows, lent))
        if fused.scatters and cast(Tensor, ops.out).numel():
            steps += self._sums(ops, rows, lent)
        return lending(steps, lent)

    def _product(self, ops: Operands, copies: dict[str, Any], result: Tensor, lent: Tensor | None) -> Operands:
        """The plain product among the steps, as a backend binds it."""
        if self.spec.fused is not None and self.spec.fused.scatters:
            copies = {**copies, "c": None, "beta": 0.0}
        return replace(ops, spec=product_spec(self.spec), fused=None, out=result, lent=lent, **copies)

    def _finish(self, ops: Operands, sums: Tensor, out: Tensor, lent: Tensor | None) -> Launch:
        spec, fused = self.spec, cast(Fused, ops.fused)
        preact, gate, scale = cast("Tensor | None", fused.preact), fused.gate, fused.row_scale
        o, p = strides_of(out, "out", lent), ABSENT if preact is None else strides_of(preact, "preact")
        rows, columns = out.shape[-2:]
        sizes = ops.valid_rows if spec.form == "masked" else ops.ends if spec.form in CUTS else None
        numbers = (1.0, 0.0, 0.0) if gate is None else (gate.alpha, gate.beta, gate.limit or 0.0)
        unowned = spec.zero_unowned and not fused.scatters
        values = [
            address_of(sums, "", lent), o.ptr, p.ptr, address_of(scale, "row_scale"), _sizes_address(ops, sizes),
            spec.groups if out.dim() == 3 else 1, rows, columns, spec.groups, int(ops.head), CUTS.get(spec.form, 0),
            int(unowned), o.group, o.row, o.col, p.group, p.row, p.col,
            scale.shape[1] if scale is not None and scale.dim() == 2 else 0, *map(float, numbers),
            int(gate is not None and gate.limit is not None),
        ]  # fmt: skip
        eight = columns % EIGHT == 0 and spec.form != "jagged_n" and all(map(_in_words, _given(out, preact)))
        act = ACTIVATION_CODES.get(spec.activation, 0) if gate is None else GATE_ACTIVATIONS[gate.kind]
        defines = {
            "SUM": TYPE_CODES[sums.dtype], "OUT": TYPE_CODES[out.dtype], "ACT": act,
            "PREACT": TYPE_CODES[out.dtype if preact is None else preact.dtype],
            "SCALE": TYPE_CODES[torch.float32 if scale is None else scale.dtype], "EACH": EIGHT if eight else 1,
            "LAYOUT": LAYOUT_CODES["" if gate is None else gate.layout],
            "ENDS": 4 if sizes is None else sizes.element_size(),
        }  # fmt: skip
        lines = rows * (spec.groups if out.dim() == 3 else 1)
        return _bound("finish_rows", defines, self.index, values, lines, columns // defines["EACH"], ops)

    def _sums(self, ops: Operands, rows: Tensor, lent: Tensor | None) -> list[Launch]:
        fused, out, c = cast(Fused, ops.fused), cast(Tensor, ops.out), cast("Tensor | None", ops.c)
        index, steps, order = cast(Index, fused.combine or fused.out_rows).values, list[Launch](), 0
        keep: tuple[object, ...] = ()
        at, terms = address_of(index, "index"), -1
        if fused.combine is not None:
            terms = index.shape[1]
        else:
            index, ordered, sort = sort_step(index)
            steps, keep = [sort], (index, ordered)
            at, order = index.data_ptr(), ordered.data_ptr()
        o, given = strides_of(out, "out"), ABSENT if c is None else strides_of(c, "c")
        values = [
            address_of(rows, "", lent), o.ptr, given.ptr, _sizes_address(ops, ops.ends), at,
            address_of(fused.weights, "weights"), order, rows.shape[0], rows.shape[1], out.shape[0], self.spec.groups,
            int(ops.head), o.row, o.col, given.row, given.col, float(ops.beta),
        ]  # fmt: skip
        eight = rows.shape[1] % EIGHT == 0 and all(map(_in_words, _given(out, c)))
        weights = torch.float32 if fused.weights is None else fused.weights.dtype
        defines = {
            "SUM": TYPE_CODES[self.spec.acc], "OUT": TYPE_CODES[out.dtype], "ROWS": TYPE_CODES[rows.dtype],
            "ADDED": TYPE_CODES[out.dtype if c is None else c.dtype], "SCALE": TYPE_CODES[weights], "TERMS": terms,
            "INDEX": index.element_size(), "ENDS": cast(Tensor, ops.ends).element_size(), "EACH": EIGHT if eight else 1,
        }  # fmt: skip
        chunks = rows.shape[1] // defines["EACH"]
        return [*steps, _bound("sum_rows", defines, self.index, values, out.shape[0], chunks, ops, keep)]


Wanted = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""The shapes and dtypes of tensors between the steps, by name."""


def _copies(ops: Operands) -> Wanted:
    """The tensors that hold the rows picked by `a_rows` and `b_rows`."""
    found: Wanted = {}
    for name, index in cast(Fused, ops.fused).picks.items():
        x = cast(Tensor, ops.a if name == "a_rows" else ops.b)
        width = x.shape[1 - PICKED[name][cast(str, ops.spec.jagged)]]
        found[name] = (index.values.shape[0], width), x.dtype
    return found


def _allocated(wanted: Wanted, device: torch.device) -> tuple[Tensor | None, dict[str, Tensor]]:
    """One allocation for all these tensors, None for no tensor, and the tensors as views of it."""
    if not wanted:
        return None, {}
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in wanted.values()]
    *starts, end = accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0)
    lent = torch.empty(max(1, end), dtype=torch.uint8, device=device)
    return lent, {
        name: lent[start : start + size].view(dtype).view(shape)
        for (name, (shape, dtype)), start, size in zip(wanted.items(), starts, sizes, strict=True)
    }


def _product_shape(ops: Operands) -> tuple[int, ...]:
    """The shape of the products, before a gate merges columns and before rows are summed."""
    a, b, fused, form = cast(Tensor, ops.a), cast(Tensor, ops.b), cast(Fused, ops.fused), ops.spec.form
    m, n = a.shape[-2], b.shape[-1]
    if form == "jagged_m":
        return (m if fused.a_rows is None else fused.a_rows.values.shape[0]), n
    if form == "jagged_n":
        return m, n if fused.b_rows is None else fused.b_rows.values.shape[0]
    return ops.spec.groups, m, n


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _in_words(x: Tensor) -> bool:
    """Whether any eight neighbouring elements that start at a multiple of eight columns are aligned words."""
    step = 16 if x.element_size() < 8 else 1
    size = x.element_size()
    return x.stride(-1) == 1 and x.data_ptr() % step == 0 and all(s * size % step == 0 for s in x.stride()[:-1])


def _largest_unit(x: Tensor) -> int:
    """The largest unit in bytes of which every row of a matrix consists, from its start on."""
    size = x.element_size()
    extents = x.data_ptr() | x.shape[1] * size | (x.stride(0) * size if x.shape[0] > 1 else 0) | 16
    return extents & -extents


def _sizes_address(ops: Operands, sizes: Tensor | None) -> int:
    return address_of(sizes, "valid_rows" if ops.spec.form == "masked" else "ends")


def _bound(
    name: str, defines: dict[str, int], index: int, values: list[Any], lines: int, width: int, ops: Operands,
    keep: tuple[object, ...] = (),
) -> Launch:  # fmt: skip
    """A bound launch of a kernel of `fused_steps.cu` over this many lines; each line takes the work of `width`
    threads."""
    kernel = nvrtc.loaded(SOURCE, name, tuple(f"-D{key}={value}" for key, value in sorted(defines.items())), index)
    threads = min(THREADS, max(32, -(-width // 32) * 32))
    return kernel.bound(words(*values), grid=max(1, min(lines, BLOCKS)), threads=threads, keep=keep)
