"""Fused keywords: rows picked by index, a gate, weights of rows, sums of rows.

The products P = alpha * A @ B + bias [T, N] of jagged rows are followed by these steps, in this order:

    a_rows, b_rows   a token is a row of a (jagged k: a column of a, a row of b) by number, zeros where there is none
    activation       also a gate: two columns of P, g and u, give one column act(min(g, limit)) * (clamp(u) + beta)
    preact_out       receives P, rounded
    row_scale        each row times a number
    combine          out[r] = sum over j of weights[r, j] * y[index[r, j]], j ascending, y the rows above
    out_rows         out[r] = sum of the rows s with out_rows[s] = r, s ascending

An index below 0 or past the end means "no row". Index tensors on the operands' device are followed in place and never
read back; those on the host are checked, and copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.problem import epilogue
from multigemm.problem.arrays import Operand, OperandReader, adopt, common_dtype, is_list
from multigemm.problem.forms import Result
from multigemm.problem.grouping import INT32_MAX, INT64_MAX, Int64s, read_index_array, read_list
from multigemm.problem.scales import E8M0, Quantisation, Scale
from multigemm.problem.spec import (
    GATES,
    GLU_LAYOUTS,
    Activation,
    FusedSpec,
    GluLayout,
    ProblemSpec,
    bucket,
    classify,
    classify_list,
)


class FusedKeywords(TypedDict, total=False):
    """The keywords that this module reads; `GroupedGemmProblem` describes them."""

    a_rows: Any
    b_rows: Any
    glu_layout: str
    glu_alpha: float
    glu_beta: float
    glu_limit: float | None
    preact_out: Any
    row_scale: Any
    combine: Any
    out_rows: Any
    rows: int | None


GATE_DEFAULTS = {"glu_layout": "halves", "glu_alpha": 1.0, "glu_beta": 0.0, "glu_limit": None}
PICKED = {"a_rows": {"m": 0, "k": 1}, "b_rows": {"k": 0, "n": 1}}
"""The axis of a, and of b, that the indices of rows pick from, by the jagged direction."""


class Gate(NamedTuple):
    """A gate: its activation, where the columns of g and u lie, and its numbers."""

    kind: Activation
    layout: GluLayout = "halves"
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    def split(self, x: Any) -> tuple[Any, Any]:
        """The columns of g and of u, as views of an array whose last axis holds both."""
        if self.layout == "interleaved":
            return x[..., 0::2], x[..., 1::2]
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        return (first, second) if self.layout == "halves" else (second, first)


class Index(NamedTuple):
    """Row numbers. A `live` index lies on the operands' device and may change between launches; otherwise it is a copy
    on the host."""

    values: Tensor
    live: bool

    def on_host(self) -> Tensor:
        """The numbers on the host; waits for the device."""
        return self.values.detach().cpu()


_NO_ROWS = Index(torch.empty((0, 0), dtype=torch.int32), False)


@dataclass(frozen=True, slots=True)
class Fused:
    """The fused part of a problem. Absent parts are None.

    `rows` is the number of rows of the result if they are sums of rows, else None. `given_preact` is the object that
    the caller passed.
    """

    gate: Gate | None = None
    preact: Operand | None = None
    row_scale: Tensor | None = None
    a_rows: Index | None = None
    b_rows: Index | None = None
    combine: Index | None = None
    weights: Tensor | None = None
    out_rows: Index | None = None
    rows: int | None = None
    given_preact: Any = None

    @property
    def scatters(self) -> bool:
        """Whether rows of the result are sums of rows of the products, to which c and beta are added."""
        return self.rows is not None

    @property
    def picks(self) -> dict[str, Index]:
        """The indices of rows of a and b by keyword."""
        return {name: x for name, x in (("a_rows", self.a_rows), ("b_rows", self.b_rows)) if x is not None}

    @property
    def indices(self) -> dict[str, Index]:
        """The index tensors by their keywords."""
        sums = {name: x for name, x in (("combine", self.combine), ("out_rows", self.out_rows)) if x is not None}
        return self.picks | sums

    @property
    def numbers(self) -> dict[str, Tensor]:
        """The weights of rows by their keywords."""
        named = (("row_scale", self.row_scale), ("combine weights", self.weights))
        return {name: x for name, x in named if x is not None}

    def read(self) -> list[tuple[str, Tensor]]:
        """Every tensor that a launch reads, by name."""
        return [*((name, x.values) for name, x in self.indices.items() if x.live), *self.numbers.items()]

    def preacts(self) -> list[Tensor]:
        """The tensors of `preact_out`."""
        if self.preact is None:
            return []
        return [self.preact] if isinstance(self.preact, Tensor) else self.preact

    def tensors(self) -> list[Tensor]:
        """Every tensor that a launch reads or writes."""
        return [*(x.values for x in self.indices.values()), *self.numbers.values(), *self.preacts()]

    @property
    def moves(self) -> bool:
        """Whether a bound launch can take later calls' tensors in place: indices on the device, all tensors without
        gaps."""
        read = [*(x.values for x in self.indices.values()), *self.numbers.values()]
        return all(x.live for x in self.indices.values()) and all(x.is_contiguous() for x in read)

    def without_tensors(self) -> Fused:
        """A copy without tensors: what calls have in common that differ only in the addresses of tensors."""
        return Fused(gate=self.gate, combine=self.combine and _NO_ROWS, rows=self.rows)

    def with_tensors(
        self, a_rows: Tensor | None = None, b_rows: Tensor | None = None, preact: Tensor | None = None,
        row_scale: Tensor | None = None, index: Tensor | None = None, weights: Tensor | None = None, *, squeezed: bool,
    ) -> Fused:  # fmt: skip
        """A copy with these tensors. `index` is that of combine or out_rows; `squeezed`: preact is a single matrix."""
        a_at, b_at = (None if x is None else Index(x, True) for x in (a_rows, b_rows))
        at = None if index is None else Index(index, True)
        combine, out_rows = (at, None) if self.combine is not None else (None, at)
        held = preact.unsqueeze(0) if squeezed and preact is not None else preact
        return Fused(self.gate, held, row_scale, a_at, b_at, combine, weights, out_rows, self.rows, preact)

    def columns(self, n: int) -> int:
        """The columns of the result, if the products have n columns."""
        return n if self.gate is None else n // 2

    def gather(self, form: str, a: Any, b: Any) -> tuple[Any, Any]:
        """a and b on the host as the products read them: zeros where an index means "no row"."""
        found = {"a_rows": a, "b_rows": b}
        found |= {name: picked(found[name], x.on_host(), PICKED[name][form[-1]]) for name, x in self.picks.items()}
        return found["a_rows"], found["b_rows"]

    def gather_scales(self, q: Quantisation, a: Any, b: Any) -> Quantisation:
        """The scales and zero points of the picked rows, on the host.

        A row of zeros is 0 times a scale that all rows share, but not 0 minus a zero point that all rows share.
        """
        found = {}
        for name, x, axis, rows in (("a", a, 0, self.a_rows), ("b", b, 1, self.b_rows), ("zero", b, 1, self.b_rows)):
            scale: Scale | None = getattr(q, name)
            if scale is not None and rows is not None and (scale.spec.rows == 1 or name == "zero"):
                found[name] = _picked_scale(scale, rows, axis + 1, x.shape[axis], 0 if name == "zero" else 1)
        return replace(q, **found)

    def result_elements(self, sizes: Sequence[tuple[int, int, int]]) -> int:
        """The number of result elements for at least one product of these sizes."""
        if self.rows is not None:
            return self.rows * self.columns(sizes[0][1])
        return sum(m * self.columns(n) for m, n, _ in sizes)

    def described(self, spec: ProblemSpec) -> ProblemSpec:
        """The spec of a problem, with the fused part that a backend may know."""
        gate, dtypes = self.gate, {name: x.values.dtype for name, x in self.indices.items()}
        preact = None
        if self.preact is not None:
            each = self.preacts()
            preact = classify(each[0]) if isinstance(self.preact, Tensor) else classify_list(each, spec.out.dtype)
        return replace(
            spec,
            fused=FusedSpec(
                **dtypes,
                layout="" if gate is None else gate.layout,
                alpha=gate is not None and gate.alpha != 1,
                beta=gate is not None and gate.beta != 0,
                limit=gate is not None and gate.limit is not None,
                preact=preact,
                row_scale=None if self.row_scale is None else self.row_scale.dtype,
                weights=None if self.weights is None else self.weights.dtype,
                terms=0 if self.combine is None else self.combine.values.shape[1],
                rows=bucket(self.rows or 0),
            ),
        )

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments that state this fused part."""
        found: dict[str, Any] = {name: _given(x) for name, x in self.indices.items()}
        if self.combine is not None:
            found["combine"] = (found["combine"], self.weights)
        if self.out_rows is not None:
            found["rows"] = self.rows
        if self.gate is not None:
            _, layout, alpha, beta, limit = self.gate
            found |= {"glu_layout": layout, "glu_alpha": alpha, "glu_beta": beta, "glu_limit": limit}
        found |= {"preact_out": self.given_preact, "row_scale": self.row_scale}
        return _asked(found)


def _given(index: Index) -> Any:
    return index.values if index.live else index.values.numpy()


def picked(x: Tensor, rows: Tensor, axis: int) -> Tensor:
    """The rows (axis 0) or columns of a matrix with these numbers, in order; zeros where a number means "no row"."""
    found = x.new_zeros((len(rows), x.shape[1]) if axis == 0 else (x.shape[0], len(rows)))
    for s, row in enumerate(rows.tolist()):
        if 0 <= row < x.shape[axis]:
            found.select(axis, s).copy_(x.select(axis, row))
    return found


def _picked_scale(scale: Scale, rows: Index, axis: int, extent: int, absent: int) -> Scale:
    """The entries of a scale for the picked rows, if it has one per row (`extent`); `absent` where there is no row."""
    grid = scale.grid
    assert isinstance(grid, Tensor)
    wide = grid.dtype is E8M0
    bits = grid.detach().cpu().view(torch.uint8) if wide else grid.detach().cpu()
    shape = list(bits.shape)
    shape[axis] = 1
    none = bits.new_full(shape, 127 if wide else absent)
    shape[axis] = extent
    numbers = rows.on_host().long()
    at = torch.where((numbers >= 0) & (numbers < extent), numbers, extent)
    found = torch.cat([bits.expand(shape), none], axis).index_select(axis, at)
    return replace(scale, grid=found.view(E8M0) if wide else found, spec=replace(scale.spec, rows=1))


# --- reading the keywords -----------------------------------------------------------------------------


def refuse_in_operator(keywords: Iterable[str]) -> None:
    """Raises for a keyword that the torch operator, and thus a compiled graph, does not take."""
    if "preact_out" in keywords:
        raise InvalidProblem(
            "preact_out: the torch operator writes no memory of the caller's: call multigemm.grouped_gemm outside of "
            "torch.compile, or take the activation in torch behind the product"
        )


def fused_shapes(
    product: Result, activation: str | None, combine: Tensor | None, out_rows: Tensor | None, rows: Any
) -> Result:
    """The shape of the result, as `FusedReader.result` derives it, without reading any value."""
    shape = _gated_shape(product, activation) if activation in GATES else product.shape
    if combine is None and out_rows is None:
        return product._replace(shape=shape)
    if product.form != "jagged_m" or (combine is not None and out_rows is not None):
        raise InvalidProblem(f"combine or out_rows, one of them, sums rows of jagged m; this one is {product.form}")
    if out_rows is not None and rows is None:
        raise InvalidProblem("out_rows without out: say with rows= how many rows the result has")
    return product._replace(shape=(rows if combine is None else combine.shape[0], shape[1]))


def _gated_shape(product: Result, activation: Any) -> Any:
    """The shape of the products after a gate; refuses products whose columns it cannot join."""
    if product.form in ("jagged_n", "jagged_k"):
        raise InvalidProblem(
            f"activation={activation!r} with jagged={product.form[-1]!r}: a gate joins columns of jagged m, "
            "batched, masked and lists: apply it afterwards"
        )
    listed = product.form == "per_group"
    shapes = product.shape if listed else [product.shape]
    for g, shape in enumerate(shapes):
        if shape[-1] % 2:
            raise InvalidProblem(
                f"{f'b[{g}]' if listed else 'b'} has {shape[-1]} columns; activation={activation!r} joins them in "
                "pairs: pass an even number"
            )
    halved = [(*shape[:-1], shape[-1] // 2) for shape in shapes]
    return halved if listed else halved[0]


def picked_like(x: Tensor, rows: Tensor | None, name: str, jagged: str) -> Tensor:
    """A tensor without memory that has an operand's shape after rows were picked."""
    if rows is None:
        return x
    axis = PICKED[name].get(jagged)
    if axis is None or x.dim() != 2:
        raise InvalidProblem(f"{name} with jagged={jagged!r} and {x.dim()} dimensions: index the operand yourself")
    return x.new_empty((rows.shape[0], x.shape[1]) if axis == 0 else (x.shape[0], rows.shape[0]))


def reader_of(given: FusedKeywords, activation: Any, full: bool) -> FusedReader | None:
    """A `FusedReader` if any fused keyword is used, else None."""
    gated = type(activation) is str and activation in GATES
    asked = _asked(given)
    return FusedReader(asked, activation if gated else None, activation is not None, full) if gated or asked else None


def _asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fused keywords that differ from their defaults."""
    return {name: x for name, x in given.items() if not (x is None or _is_default(name, x))}


def _is_default(name: str, x: Any) -> bool:
    is_value = isinstance(x, str | int | float) and not isinstance(x, bool)
    return name in GATE_DEFAULTS and is_value and x == GATE_DEFAULTS[name]


class FusedReader:
    """Reads the fused keywords of one problem, step by step as the shapes that they are checked against become
    known."""

    __slots__ = ("_activated", "_combine", "_full", "_gate", "_gated", "_given", "_out_rows", "_picks", "_rows")

    def __init__(self, given: Mapping[str, Any], gated: Activation | None, activated: bool, full: bool) -> None:
        self._given, self._gated, self._activated, self._full = given, gated, activated, full
        self._picks: dict[str, Index] = {}
        self._gate: Gate | None = None
        self._combine: tuple[Index, Tensor | None] | None = None
        self._out_rows: Index | None = None
        self._rows: int | None = None

    # --- rows of the operands ---

    def pick(self, a: Tensor, b: Tensor, jagged: Any, grouped: bool, device: torch.device) -> tuple[Tensor, Tensor]:
        """a and b, or tensors without memory of the shapes that they have after rows were picked."""
        x, y = self._pick("a_rows", a, jagged, grouped, device), self._pick("b_rows", b, jagged, grouped, device)
        if self._picks and jagged == "k" and x.dim() == y.dim() == 2 and x.shape[1] != y.shape[0]:
            first, second = (f"{n}_rows" if f"{n}_rows" in self._picks else n for n in "ab")
            raise InvalidProblem(
                f"{first} has {x.shape[1]} tokens and {second} has {y.shape[0]}: pass as many row numbers as there are "
                "tokens"
            )
        return x, y

    def _pick(self, name: str, x: Tensor, jagged: Any, grouped: bool, device: torch.device) -> Tensor:
        given = self._given.get(name)
        if given is None:
            return x
        axis = PICKED[name].get(jagged) if grouped else None
        if axis is None:
            self.refuse_picks(f"with jagged={jagged!r}" if grouped else "without offsets, sizes or ends")
        if x.dim() != 2:
            return x  # the form refuses it
        assert axis is not None
        index = self._picks[name] = self._index(given, name, device, 1, x.shape[axis])
        return picked_like(x.to("meta"), index.values, name, jagged)

    def refuse_picks(self, seen: str) -> None:
        """Refuses `a_rows` and `b_rows` in a form whose tokens no offsets cut."""
        where = {"a_rows": "jagged='m' (rows of a) and jagged='k' (columns of a)",
                 "b_rows": "jagged='k' (rows of b) and jagged='n' (columns of b)"}  # fmt: skip
        for name, text in where.items():
            if name in self._given:
                raise InvalidProblem(f"{name} {seen}: it picks the tokens of {text}: index the operand yourself")

    def refuse_quantised_picks(self) -> None:
        """Refuses picked rows with scales of a jagged K: they count from each group's start, and have no entry per
        token."""
        for name in PICKED.keys() & self._given.keys():
            raise InvalidProblem(
                f"{name} with quantised operands and jagged='k' comes later: index the operand yourself, and scale "
                "it for the groups as they lie then"
            )

    # --- the result ---

    def result(
        self, product: Result, compute: torch.dtype, device: torch.device, out: Any, beta: float, c: Any
    ) -> Result:
        """The shape of the result. Reads the gate and the indices of sums of rows."""
        self._refuse_int8(compute)
        shape = product.shape if self._gated is None else _gated_shape(product, self._gated)
        self._gate = self._read_gate(compute)
        self._read_sums(product, device, out)
        if self._rows is not None:
            shape = (self._rows, shape[1])
        elif self._gate is not None and (c is not None or beta != 0):
            seen = "c" if c is not None else f"beta={beta}"
            raise InvalidProblem(
                f"{seen} with activation={self._gated!r}: a gate joins the columns that c would be added to: add it "
                "afterwards, or pass combine or out_rows, whose result c is added to"
            )
        return product._replace(shape=shape)

    def _refuse_int8(self, compute: torch.dtype) -> None:
        if compute is not torch.int8:
            return
        for name in ("row_scale", "combine", "out_rows"):
            if name in self._given:
                raise InvalidProblem(f"{name} with int8 operands, whose sums are int32: scale or add the rows yourself")

    def _read_gate(self, compute: torch.dtype) -> Gate | None:
        given = {name: self._given[name] for name in GATE_DEFAULTS if name in self._given}
        if self._gated is None:
            for name in given:
                words = ", ".join(map(repr, GATES))
                raise InvalidProblem(f"{name} without a gate: pass activation= one of {words}, or leave it out")
            return None
        return self._gate_of({**GATE_DEFAULTS, **given}, compute)

    def _gate_of(self, given: dict[str, Any], compute: torch.dtype) -> Gate:
        assert self._gated is not None
        layout = epilogue.one_of(given["glu_layout"], "glu_layout", GLU_LAYOUTS)
        alpha = epilogue.scalar(given["glu_alpha"], "glu_alpha", compute, "leave it out")
        beta = epilogue.scalar(given["glu_beta"], "glu_beta", compute, "leave it out")
        if alpha != 1 and self._gated != "swiglu":
            raise InvalidProblem(f"glu_alpha={alpha} with activation={self._gated!r}: only swiglu has it, leave it out")
        limit = given["glu_limit"]
        if limit is not None:
            limit = epilogue.scalar(limit, "glu_limit", compute, "leave it out for no limit")
            if limit < 0:
                raise InvalidProblem(f"glu_limit={limit} is negative; u lies in -limit..limit: pass 0 or more")
        return Gate(self._gated, layout, alpha, beta, limit)

    def _read_sums(self, product: Result, device: torch.device, out: Any) -> None:
        """Reads `combine`, or `out_rows` with `rows`."""
        given = {name: self._given[name] for name in ("combine", "out_rows", "rows") if name in self._given}
        if not given:
            return
        if "combine" in given and len(given) > 1:
            raise InvalidProblem(f"combine and {' and '.join(list(given)[1:])} were given together: pass one of them")
        if given.keys() == {"rows"}:
            raise InvalidProblem(
                f"rows={given['rows']!r} without out_rows: it says how many rows they make, leave it out"
            )
        if product.form != "jagged_m":
            name = next(iter(given))
            raise InvalidProblem(
                f"{name} sums rows of the form jagged_m; this one is {product.form}: sum them yourself"
            )
        tokens = product.shape[0]
        if "combine" in given:
            self._read_combine(given["combine"], tokens, device)
            return
        self._rows = _result_rows(given.get("rows"), out)
        index = self._out_rows = self._index(given["out_rows"], "out_rows", device, 1, self._rows)
        if index.values.shape[0] != tokens:
            raise InvalidProblem(
                f"out_rows has length {index.values.shape[0]}; it must have one number for each of the {tokens} tokens"
            )

    def _read_combine(self, given: Any, tokens: int, device: torch.device) -> None:
        if not is_list(given) or len(given) != 2:
            seen = f"a {type(given).__name__}" + (f" of {len(given)}" if is_list(given) else "")
            raise InvalidProblem(f"combine is {seen}; it must be a pair (index [R, k], weights [R, k] or None)")
        index = self._index(given[0], "combine index", device, 2, tokens)
        self._rows, self._combine = index.values.shape[0], (index, given[1])

    # --- everything else, once the dtype of the result is known ---

    def fused(
        self, reader: OperandReader, product: Result, out_dtype: torch.dtype, extras: Sequence[torch.dtype]
    ) -> Fused:
        """The fused part of the problem. `extras`: dtypes that weights may have besides float32."""
        index, weights = (None, None) if self._combine is None else self._combine
        if weights is not None and index is not None:
            shape = tuple(index.values.shape)
            weights = _numbers(reader, weights, "combine weights", shape, "the shape of its index", extras)
        return Fused(
            self._gate, self._read_preact(reader, product, out_dtype), self._read_row_scale(reader, product, extras),
            self._picks.get("a_rows"), self._picks.get("b_rows"), index, weights, self._out_rows, self._rows,
            self._given.get("preact_out"),
        )  # fmt: skip

    def _read_preact(self, reader: OperandReader, product: Result, out_dtype: torch.dtype) -> Operand | None:
        given = self._given.get("preact_out")
        if given is None:
            return None
        if not self._activated:
            raise InvalidProblem("preact_out without an activation: it would be the result itself, leave it out")
        preact = product._replace(called="the products").take(reader.result, given, "preact_out")
        found = out_dtype if is_list(preact) and not preact else common_dtype(preact, "preact_out")
        if found is not out_dtype:
            raise InvalidProblem(f"preact_out has dtype {found}; it must be {out_dtype}, the dtype of the result")
        return preact

    def _read_row_scale(self, reader: OperandReader, product: Result, extras: Sequence[torch.dtype]) -> Tensor | None:
        given = self._given.get("row_scale")
        if given is None:
            return None
        if product.form not in ("jagged_m", "masked"):
            raise InvalidProblem(
                f"row_scale with the form {product.form}: it scales rows of jagged m and masked: scale the result"
            )
        return _numbers(reader, given, "row_scale", tuple(product.shape[:-1]), "a number for each row", extras)

    def _index(self, x: Any, name: str, device: torch.device, dims: int, extent: int) -> Index:
        """Row numbers below `extent`. Those on the device are taken as they are, those on the host are checked and
        copied."""
        values = _read_index(x, name, device, dims)
        if isinstance(values, Tensor):
            if self._full:
                _check_range(values.detach().cpu().numpy(), name, extent)
            return Index(values, True)
        _check_range(values, name, extent)
        return Index(torch.from_numpy(values.astype(np.int32) if extent <= INT32_MAX else values.copy()), False)


def _read_index(x: Any, name: str, device: torch.device, dims: int) -> Tensor | Int64s:
    if dims == 2 and is_list(x):
        rows = []
        for r, row in enumerate(x):
            if not is_list(row) and getattr(row, "ndim", 0) != 1:
                raise InvalidProblem(f"{name}[{r}] is {row!r}; it must be a list of k numbers: pass an array [R, k]")
            rows.append(read_list(row, f"{name}[{r}]"))
        lengths = {len(row) for row in rows}
        if len(lengths) > 1:
            seen = " and ".join(map(str, sorted(lengths)))
            raise InvalidProblem(f"{name} has rows of {seen} numbers; all must have as many: pass an array [R, k]")
        width = lengths.pop() if lengths else 0
        return np.array(rows, dtype=np.int64).reshape(len(rows), width)
    return read_index_array(x, name, device, dims)


def _check_range(values: Any, name: str, extent: int) -> None:
    wrong = (values < 0) | (values >= extent)
    if wrong.any():
        at = tuple(map(int, np.argwhere(wrong)[0]))
        limit = f"it must lie in 0..{extent - 1}" if extent else "there are no rows"
        raise InvalidProblem(
            f"{name}{list(at)} is {values[at]}; {limit}: only a tensor on the operands' device may hold others, which "
            "mean no row there"
        )


def _result_rows(rows: Any, out: Any) -> int:
    """The number of result rows of `out_rows`, from the keyword `rows` or the rows of `out`."""
    held = None
    if out is not None:
        shape = tuple(adopt(out, "out").tensor.shape)
        if len(shape) != 2:
            raise InvalidProblem(f"out has shape {shape}; out_rows sums rows into a matrix: pass out [R, N]")
        held = shape[0]
    if rows is None:
        if held is None:
            raise InvalidProblem("out_rows without out: say with rows= how many rows the result has")
        return held
    if isinstance(rows, bool) or not hasattr(rows, "__index__") or not 0 <= int(rows) <= INT64_MAX:
        raise InvalidProblem(f"rows={rows!r} must be a whole number, 0 or more, that fits in 64 bits")
    if held is not None and held != int(rows):
        raise InvalidProblem(f"rows={rows} and out has {held}: leave rows out")
    return int(rows)


def _numbers(
    reader: OperandReader, x: Any, name: str, shape: tuple[int, ...], what: str, extras: Sequence[torch.dtype]
) -> Tensor:
    """Reads weights of rows: float32 or an operand's dtype. They are never rounded."""
    found = reader.extra(x, name)
    if tuple(found.shape) != shape:
        raise InvalidProblem(f"{name} has shape {tuple(found.shape)}; it must be {shape}, {what}")
    allowed = {torch.float32, *extras}
    if found.dtype not in allowed:
        raise InvalidProblem(f"{name} has dtype {found.dtype}; it must be {epilogue.any_of(allowed)}: convert it")
    return found
