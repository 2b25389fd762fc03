"""A test problem as plain data: structure, a value mode and a seed. Never an array.

A case is what the fuzzer draws, shrinks, stores as JSON and prints: everything that a run needs to
happen again, byte for byte, on any machine. `classes(case)` names the kinds of situation it stands
for, so that a campaign can prove what it has covered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from multigemm.problem.spec import GATES, Form


@dataclass(frozen=True, slots=True)
class Layout:
    """How one operand lies in memory. `zero` lists directions of stride 0: g(roup), r(ow), c(olumn).

    `pad` elements follow each line; -p: as many as make its length a multiple of p, so that odd lines begin aligned.
    """

    order: str = "row"
    pad: int = 0
    shift: int = 0
    step: int = 1
    zero: str = ""

    @property
    def turned(self) -> Layout:
        """The same layout with lines along the other axis."""
        return replace(self, order="col" if self.order == "row" else "row")


PLAIN = Layout()


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of an operand: what one number covers, the dtype of the numbers, and how they lie.

    `covers` is "" (no scale), "tensor", "group", or what a number of a grid covers: "row" (a row of a, a column of b),
    "all", "group's row" (a row within the group's part of a jagged K) or rows x K, as in "1x32", "128x128", "allx64".
    """

    covers: str = ""
    dtype: str = "float32"
    layout: Layout = PLAIN

    @property
    def block(self) -> tuple[int, int] | None:
        """How many lines, and how much of K, one entry of a grid covers, 0 for all; None for no grid."""
        if self.covers in ("", "tensor", "group"):
            return None
        lines, _, k = self.covers.partition("x")
        return {"all": 0, "128": 128}.get(lines, 1), int(k or 0)


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """The contents of an index of rows. `rows`: the number of rows of the operand that is picked from, or of the
    result; negative for no index.

    `how` is "honest" (all valid), "lies" (some are no row: below 0, past the end, up to 64 bits) or "every" (0, 1, 2,
    ...). `host`: the index is given on the host.
    """

    rows: int = -1
    dtype: str = "int64"
    how: str = "honest"
    host: bool = False

    @property
    def given(self) -> bool:
        return self.rows >= 0


NO_ROWS = RowNumbers()


@dataclass(frozen=True, slots=True)
class Fused:
    """Picked rows, gate, weights and sums of rows. The kind of gate is the case's activation.

    `combine` has `terms` numbers for each row of the result; `weights` and `row_scale` are dtypes, "" for none.
    """

    a_rows: RowNumbers = NO_ROWS
    b_rows: RowNumbers = NO_ROWS
    combine: RowNumbers = NO_ROWS
    out_rows: RowNumbers = NO_ROWS
    terms: int = 0
    weights: str = ""
    row_scale: str = ""
    preact: bool = False
    glu_layout: str = "halves"
    glu_alpha: float = 1.0
    glu_beta: float = 0.0
    glu_limit: float | None = None

    @property
    def rows(self) -> int | None:
        """The number of rows of the result if they are sums of rows."""
        return next((sums.rows for sums in (self.combine, self.out_rows) if sums.given), None)


INDICES = ("a_rows", "b_rows", "combine", "out_rows")
UNFUSED = Fused()
UNSCALED = Scale()
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, slots=True)
class Case:
    """One problem. `m, n, k` are the shared extents; `lengths` the jagged ones, or masked's valid rows.

    per_group uses `dims` alone; batched takes its number of groups from `lengths`. dtypes go by name.
    `given` passes an `out=`, `alias` makes it the very `c`. `index` is int32 or int64; `where` is
    "list", "host" or "device". `aligned` says that extents and strides were rounded so that fast
    kernels accept them. With `batch_invariant` relations between problems hold to the last bit, whatever ran.
    Quantised operands: `b_format` says what bytes (`dtype_b` "uint8") hold, `zero_b` is the dtype of zero points.
    """

    form: Form = "jagged_m"
    dtype: str = "float32"
    m: int = 0
    n: int = 1
    k: int = 1
    lengths: tuple[int, ...] = ()
    dims: tuple[tuple[int, int, int], ...] = ()
    head: int = 0
    tail: int = 0
    dtype_b: str = ""
    out_dtype: str = ""
    shared: bool = False
    kind: str = "offsets"
    index: str = "int64"
    where: str = "device"
    alpha: float = 1.0
    beta: float = 0.0
    c_dtype: str = ""
    bias: str = ""
    bias_dtype: str = ""
    activation: str | None = None
    precision: str = "ieee"
    given: bool = False
    alias: bool = False
    aligned: bool = False
    batch_invariant: bool = False
    mode: str = "int"
    seed: int = 0
    a: Layout = field(default=PLAIN)
    b: Layout = field(default=PLAIN)
    c: Layout = field(default=PLAIN)
    out: Layout = field(default=PLAIN)
    scale_a: Scale = field(default=UNSCALED)
    scale_b: Scale = field(default=UNSCALED)
    zero_b: str = ""
    b_format: str = ""
    accumulate: str = "promoted"
    fused: Fused = field(default=UNFUSED)

    @property
    def groups(self) -> int:
        return len(self.dims) if self.form == "per_group" else len(self.lengths)

    @property
    def jagged(self) -> str:
        return self.form[-1] if self.form.startswith("jagged") else ""

    @property
    def total(self) -> int:
        """The jagged extent T."""
        return self.head + sum(self.lengths) + self.tail

    def sizes(self) -> list[tuple[int, int, int]]:
        """(m, n, k) of every group."""
        if self.form == "per_group":
            return list(self.dims)
        place = {"m": 0, "n": 1, "k": 2}
        made = []
        for length in self.lengths:
            extents = [self.m, self.n, self.k]
            if self.form == "masked":
                extents[0] = length
            elif self.jagged:
                extents[place[self.jagged]] = length
            made.append((extents[0], extents[1], extents[2]))
        return made

    @property
    def work(self) -> int:
        """Multiply-adds, and at least one per output element."""
        return sum(m * n * max(k, 1) for m, n, k in self.sizes())

    @property
    def storage(self) -> int:
        """Elements of A, B and the result."""
        if self.form == "per_group":
            return sum(m * k + k * n + m * n for m, n, k in self.dims)
        extents = {"m": self.m, "n": self.n, "k": self.k} | ({self.jagged: self.total} if self.jagged else {})
        count = max(self.groups, 1)
        a = extents["m"] * extents["k"] * (1 if self.jagged in ("m", "k") or self.shared else count)
        b = extents["k"] * extents["n"] * (1 if self.jagged in ("n", "k") or self.shared else count)
        return a + b + extents["m"] * extents["n"] * (1 if self.jagged in ("m", "n") else count)

    @property
    def deepest(self) -> int:
        return max((k for _, _, k in self.sizes()), default=0)

    @property
    def quantised(self) -> bool:
        return self.dtype in FLOAT8 or (self.dtype != "int8" and self.dtype_b in (*FLOAT8, "int8", "uint8"))

    @property
    def gated(self) -> bool:
        return self.activation in GATES

    @property
    def is_fused(self) -> bool:
        return self.gated or self.fused != UNFUSED

    @property
    def weights(self) -> str:
        """The format of quantised weights under 16-bit activations; "" if there are none."""
        return (self.b_format or self.dtype_b) if self.quantised and self.dtype not in FLOAT8 else ""

    @property
    def compute(self) -> torch.dtype:
        if self.quantised:
            return as_dtype(self.dtype)
        return torch.promote_types(as_dtype(self.dtype), as_dtype(self.dtype_b or self.dtype))

    @property
    def result_dtype(self) -> torch.dtype:
        if self.out_dtype:
            return as_dtype(self.out_dtype)
        if self.dtype in FLOAT8:
            return torch.bfloat16
        return torch.int32 if self.compute == torch.int8 else self.compute

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        plain, own = asdict(Case()), asdict(self)
        return {name: value for name, value in own.items() if value != plain[name] or name in ("form", "dtype")}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Case:
        known = {f.name for f in fields(Case)}
        if unknown := set(data) - known:
            raise ValueError(f"a case has no field {sorted(unknown)[0]!r}; it has {', '.join(sorted(known))}")
        values = dict(data)
        for name in ("a", "b", "c", "out"):
            if name in values:
                values[name] = Layout(**values[name])
        for name in ("scale_a", "scale_b"):
            if name in values:
                values[name] = Scale(**(values[name] | {"layout": Layout(**values[name].get("layout", {}))}))
        if "fused" in values:
            given = dict(values["fused"])
            values["fused"] = Fused(**(given | {name: RowNumbers(**given[name]) for name in INDICES if name in given}))
        if "lengths" in values:
            values["lengths"] = tuple(values["lengths"])
        if "dims" in values:
            values["dims"] = tuple(tuple(d) for d in values["dims"])
        return Case(**values)

    def __repr__(self) -> str:
        return f"Case({', '.join(f'{name}={getattr(self, name)!r}' for name in self.to_dict())})"


def as_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16"."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def fit(case: Case, budget: int) -> Case:
    """The same case with its largest extents halved until the work, and the memory, fit the budget."""
    while case.work > budget or case.storage > 2 * budget:
        if case.form == "per_group":
            worst = max(range(case.groups), key=lambda g: _size(*case.dims[g]))
            dims = list(case.dims)
            dims[worst] = _halve_largest(dims[worst])
            case = replace(case, dims=tuple(dims))
            continue
        longest = max(case.lengths, default=0) if case.form != "batched" else 0
        extents = {name: getattr(case, name) for name in "mnk" if name != case.jagged}
        widest = max(extents, key=lambda name: extents[name])
        if longest > extents[widest] or (case.groups > 64 and longest > 1 and case.form != "masked"):
            case = replace(case, lengths=tuple(length // 2 if length == longest else length for length in case.lengths))
        else:
            case = _halve_extent(case, widest, extents[widest])
    return case


def _size(m: int, n: int, k: int) -> int:
    return m * n * k + m * k + k * n + m * n


def _halve_largest(size: tuple[int, int, int]) -> tuple[int, int, int]:
    largest = size.index(max(size))
    m, n, k = (e // 2 if i == largest else e for i, e in enumerate(size))
    return m, n, k


def _halve_extent(case: Case, name: str, extent: int) -> Case:
    if extent <= 1 and case.groups <= 1:
        return replace(case, head=case.head // 2, tail=case.tail // 2, lengths=tuple(n // 2 for n in case.lengths))
    if extent <= 1:
        return replace(case, lengths=case.lengths[: case.groups // 2])
    half = {"m": case.m, "n": case.n, "k": case.k} | {name: extent // 2}
    lengths = case.lengths
    if case.form == "masked" and name == "m":
        lengths = tuple(min(length, extent // 2) for length in lengths)
    return replace(case, m=half["m"], n=half["n"], k=half["k"], lengths=lengths)


def align(case: Case) -> Case:
    """The same case as fast kernels need it: extents in multiples of 16, dense rows on 16-byte boundaries; jagged
    lengths are kept."""

    def even(extent: int) -> int:
        return extent // 16 * 16 or min(extent, 1) * 16

    sides = {
        name: replace(layout, pad=layout.pad // 16 * 16, shift=16 if layout.shift >= 4 else 0, step=1, zero="")
        for name in ("a", "b", "c", "out")
        for layout in [getattr(case, name)]
    }
    found = replace(
        case, aligned=True, m=even(case.m), n=even(case.n), k=even(case.k),
        dims=tuple((m, even(n), even(k)) for m, n, k in case.dims), **sides,
    )  # fmt: skip
    if found.form == "masked":
        return replace(found, lengths=tuple(min(length, found.m) for length in found.lengths))
    return replace(found, tail=found.tail + -found.total % 16) if found.jagged in ("n", "k") else found


def _layout_classes(name: str, layout: Layout) -> set[str]:
    found = {f"{name}:{layout.order}"}
    for word, present in (
        ("padded", layout.pad > 0),
        ("lined", layout.pad < 0),
        ("shifted", layout.shift),
        ("stepped", layout.step > 1),
    ):
        if present:
            found.add(f"{name}:{word}")
    return found | {f"{name}:zero-{direction}" for direction in layout.zero}


def _size_classes(case: Case) -> set[str]:
    sizes, count = case.sizes(), case.groups
    edges = ((0, "none"), (1, "one"), (16, "few"), (256, "many"), (1 << 30, "over 256"))
    found = {"groups:" + next(word for limit, word in edges if count <= limit)}
    empty = [m == 0 or n == 0 for m, n, _ in sizes]
    if any(empty):
        found.add("empty:all" if all(empty) else "empty:some")
    found |= {f"zero:{name}" for i, name in enumerate("mnk") if any(size[i] == 0 for size in sizes)}
    found |= {f"odd:{name}" for i, name in enumerate("mnk") if any(size[i] % 8 for size in sizes)}
    found |= {f"long:{name}" for i, name in enumerate("mnk") if any(size[i] > 128 for size in sizes)}
    found |= {f"stretched:{name}" for i, name in enumerate("mnk") if any(size[i] > 1500 for size in sizes)}
    return found


def _quantised_classes(case: Case) -> set[str]:
    found = {"quantised", f"format:{case.weights or 'float8'}"}
    for side, scale in (("a", case.scale_a), ("b", case.scale_b)):
        found.add(f"scale_{side}:{scale.covers or 'none'}")
        if scale.covers:
            found |= {f"scale dtype:{scale.dtype}"} | _layout_classes("scale", scale.layout)
    flags = {"zero point": case.zero_b, "fast": case.accumulate == "fast"}
    return found | {name for name, present in flags.items() if present}


def _fused_classes(case: Case) -> set[str]:
    fused, found = case.fused, {"fused", f"fused:{case.form}"}
    for name in INDICES:
        index: RowNumbers = getattr(fused, name)
        if index.given:
            found |= {f"{name}:{index.how}", f"rows index:{'host' if index.host else index.dtype}"}
    if case.gated:
        found.add(f"glu_layout:{fused.glu_layout}")
    flags = {
        "glu_alpha": fused.glu_alpha != 1, "glu_beta": fused.glu_beta, "glu_limit": fused.glu_limit is not None,
        "weights": fused.weights, "row_scale": fused.row_scale, "preact_out": fused.preact,
    }  # fmt: skip
    return found | {name for name, present in flags.items() if present}


def classes(case: Case) -> set[str]:
    """The classes of problems that a case belongs to; campaigns count them and demand them.

    Args:
        case: The problem.

    Returns:
        Names, each a subject and what it is, as in the example.

    Example:
        >>> sorted(name for name in classes(Case(form="batched", m=8, n=8, k=8)) if name.startswith("groups"))
        ['groups:none']
    """
    found = {f"form:{case.form}", f"dtype:{case.dtype}", f"mode:{case.mode}", f"act:{case.activation}"} | _size_classes(
        case
    )
    found |= _layout_classes("a", case.a) | _layout_classes("b", case.b)
    found |= _layout_classes("out", case.out) if case.given else {"out:own"}
    flags = {
        "aligned": case.aligned, "batch invariant": case.batch_invariant,
        "head": case.head, "tail": case.tail, "shared": case.shared, "alias": case.alias,
        "mixed": case.dtype_b and case.dtype_b != case.dtype, "tf32": case.precision == "tf32",
        "beta": case.beta, "alpha:zero": case.alpha == 0, "alpha:any": case.alpha not in (0, 1),
        "wider out": case.out_dtype and case.result_dtype != case.compute,
    }  # fmt: skip
    found |= {name for name, present in flags.items() if present}
    if case.bias:
        found.add(f"bias:{case.bias}")
    if case.quantised:
        found |= _quantised_classes(case)
    if case.is_fused:
        found |= _fused_classes(case)
    if case.jagged or case.form == "masked":
        found |= {f"index:{case.index}", f"where:{case.where}"}
    if case.jagged:
        found.add(f"kind:{case.kind}")
    return found
