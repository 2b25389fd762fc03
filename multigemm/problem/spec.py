"""`ProblemSpec`: what a kernel has to know before it sees data. Frozen, hashable, without data.

Support, configs, plans and tuning keys read a `ProblemSpec` alone. Token counts enter only as buckets, so that random
group sizes never cause a recompilation; strides enter only as classes. `specify` derives the spec of a problem. Equal
specs are one object, and a call with the shapes of an earlier call finds its spec by one look-up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from multigemm.problem.arrays import dtype_name

if TYPE_CHECKING:
    from multigemm.problem.problem import GroupedGemmProblem

Form = Literal["per_group", "jagged_m", "jagged_n", "jagged_k", "batched", "masked"]
Order = Literal["row", "col", "strided"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh", "reglu", "glu"]
GluLayout = Literal["halves", "halves_up_first", "interleaved"]
Precision = Literal["ieee", "tf32"]
Accumulate = Literal["promoted", "fast"]
ByteFormat = Literal["int4", "uint4", "e2m1"]

FORMS: tuple[Form, ...] = ("per_group", "jagged_m", "jagged_n", "jagged_k", "batched", "masked")
ACTIVATIONS: tuple[Activation, ...] = ("relu", "gelu", "gelu_tanh", "silu")
GATES: tuple[Activation, ...] = ("swiglu", "geglu", "geglu_tanh", "reglu", "glu")
"""Activations that join two columns of the product, a gate and what it lets through, into one of the result."""
GLU_LAYOUTS: tuple[GluLayout, ...] = ("halves", "halves_up_first", "interleaved")
PRECISIONS: tuple[Precision, ...] = ("ieee", "tf32")
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INPUT_DTYPES = (*FLOAT_DTYPES, torch.int8)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
BIT_VIEWED = frozenset((*FLOAT8, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2))
"""Dtypes that pickles and other libraries know as bytes only."""
HALVES = (torch.float16, torch.bfloat16)
BYTE_FORMATS: tuple[ByteFormat, ...] = ("int4", "uint4", "e2m1")
ACCUMULATE: tuple[Accumulate, ...] = ("promoted", "fast")
MIXED = -1
GIANT = 2**31 - 2**26
"""Extents from this limit on can overflow a kernel's signed 32-bit index, which runs to the end of the last tile, plus
one per tile of 64 rows and more where rows are split evenly."""


@dataclass(frozen=True, slots=True)
class ScaleSpec:
    """The scale of one operand, and its zero points, as a grid [groups or 1, rows, blocks of K] (b: K before columns).

    `by_group` says that groups have numbers of their own. `rows` and `k` say how much one number covers along the axis
    that is not K, and along K: 0 all of it, 1 one line, 32, 64 or 128 so many; MIXED: the matrices of a list differ.
    Blocks of a jagged K are counted from each group's start: block j of group g is entry offsets[g] // k + g + j.
    `order` and `align` describe the grid as `OperandSpec` describes an operand; `zero` is the dtype of zero points.
    """

    dtype: torch.dtype
    by_group: bool = False
    rows: int = 0
    k: int = 0
    order: Order = "row"
    align: int = 16
    zero: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """One operand (for a list: what holds for every matrix in it).

    `order` names the contiguous direction of each matrix: "row" (last stride 1), "col" (the other
    stride 1), else "strided". `align` is the largest power of two, at most 16, that divides the base
    address and every other stride, in bytes. `dense` says that no two elements share an address by
    a zero stride or an overlap, so a tensor map or a leading dimension can express it.
    `packed` says what half-bytes hold, two of K in a byte; it is "" for elements of their own. `scale` is None where
    elements mean what they say. `shared` says that all groups use the same matrix. `wide` says that some element lies
    2^31 elements or more from the base, or that a row or column has such a number, so that 64-bit addressing is needed.
    """

    dtype: torch.dtype
    order: Order = "row"
    align: int = 16
    dense: bool = True
    shared: bool = False
    wide: bool = False
    packed: ByteFormat | Literal[""] = ""
    scale: ScaleSpec | None = None


@dataclass(frozen=True, slots=True)
class FusedSpec:
    """The fused steps before and after the products: rows picked by index, a gate, weights of rows, sums of rows.

    `a_rows`, `b_rows`, `out_rows` and `combine` hold the dtype of their indices, `row_scale` and `weights` that of
    their numbers; None is absent. `layout` is "" without a gate, whose word is `ProblemSpec.activation`; `alpha`,
    `beta` and `limit` say which of the gate's numbers are not the defaults. `preact` is the class of `preact_out`.
    `terms` is how many rows a combine sums, `rows` the bucket of how many rows a combine or `out_rows` makes.
    """

    a_rows: torch.dtype | None = None
    b_rows: torch.dtype | None = None
    layout: GluLayout | Literal[""] = ""
    alpha: bool = False
    beta: bool = False
    limit: bool = False
    preact: OperandSpec | None = None
    row_scale: torch.dtype | None = None
    combine: torch.dtype | None = None
    weights: torch.dtype | None = None
    terms: int = 0
    out_rows: torch.dtype | None = None
    rows: int = 0

    @property
    def keywords(self) -> list[str]:
        """The keywords that are in use; a gate is named `activation`."""
        names = ("a_rows", "b_rows", "preact_out", "row_scale", "combine", "out_rows")
        values = (self.a_rows, self.b_rows, self.preact, self.row_scale, self.combine, self.out_rows)
        return [name for name, x in zip(names, values, strict=True) if x is not None] + ["gate"] * bool(self.layout)

    @property
    def scatters(self) -> bool:
        """Whether rows of the result are sums of rows of the products, to which c and beta are added."""
        return self.combine is not None or self.out_rows is not None


@dataclass(frozen=True, slots=True)
class ProblemSpec:
    """A grouped GEMM without its data. `None` extents differ by group or are known only at run time.

    `m, n, k` are the extents that all groups share. `total` is the bucket (a power of two, rounded
    up) of the jagged extent T, of the sum of M over a list, or of G*M. `largest` is the bucket of
    the largest M of a group where the host knows it (lists, batched), else 0.
    `compute` is the dtype that products are formed in; it equals both operand dtypes once staged. Quantised operands
    are never cast: there it is the dtype of a.
    `longest` is the longest extent of any group, T or the number of groups, itself, where it reaches GIANT, else 0:
    a bucket says too little to refuse a problem by, and a list's N and K have none.
    `sizes` is the dtype of sizes on the device, whose running sums are int64 ends (`index`), else None.
    `accumulate` is "fast" where products of float8 may stay in the tensor core's own sums for all of K.
    `fused` is what else the problem asks for, None for products with the plain epilogue. There `m`, `n` and `total` are
    those of the products: with a gate the result has n // 2 columns, with indices of rows m tokens.
    """

    form: Form
    groups: int
    m: int | None
    n: int | None
    k: int | None
    total: int
    largest: int
    a: OperandSpec
    b: OperandSpec
    out: OperandSpec
    c: OperandSpec | None = None
    bias: torch.dtype | None = None
    compute: torch.dtype = torch.float32
    alpha: Literal["zero", "one", "any"] = "one"
    activation: Activation | None = None
    precision: Precision = "ieee"
    deterministic: bool = True
    batch_invariant: bool = False
    index: torch.dtype | None = None
    device_sizes: bool = False
    zero_unowned: bool = True
    longest: int = 0
    sizes: torch.dtype | None = None
    accumulate: Accumulate = "promoted"
    fused: FusedSpec | None = None

    @property
    def quantised(self) -> Literal["", "float8", "weights"]:
        """The class of quantised operands: float8 on both sides, or quantised weights under 16-bit activations; "" for
        neither."""
        if self.a.dtype in FLOAT8:
            return "float8"
        return "weights" if self.b.packed or self.b.dtype in FLOAT8 or self.b.scale is not None else ""

    @property
    def jagged(self) -> Literal["m", "n", "k"] | None:
        """The direction that offsets cut, or None."""
        return {"jagged_m": "m", "jagged_n": "n", "jagged_k": "k"}.get(self.form)  # type: ignore[return-value]

    @property
    def too_long(self) -> list[str]:
        """Why kernels with signed 32-bit extents cannot run this; empty if they can."""
        if not self.longest:
            return []
        return [f"an extent of {self.longest}: kernels count less than {GIANT} in 31 bits: split the problem"]

    @property
    def acc(self) -> torch.dtype:
        """The dtype of the accumulator: float64 for float64, int32 for int8, float32 for the rest."""
        return {torch.float64: torch.float64, torch.int8: torch.int32}.get(self.compute, torch.float32)


WIDE = 2**31


def describe_spec(spec: ProblemSpec) -> list[str]:
    """A spec as lines of text: form, extents and dtype, then quantised operands, then fused steps."""
    extents = [f"{name} by group" if getattr(spec, name) is None else f"{name}={getattr(spec, name)}" for name in "mnk"]
    first = f"{spec.form}: {spec.groups} groups, {', '.join(extents)}, {spec.compute}"
    return [first, *_describe_quantised(spec), *_describe_fused(spec)]


def _describe_fused(spec: ProblemSpec) -> list[str]:
    """The fused steps as text: picked rows, gates, sums."""
    if (fused := spec.fused) is None:
        return []
    picks = [f"{name} picks rows" for name in ("a_rows", "b_rows") if name in fused.keywords]
    gate = [f"{spec.activation} of columns in {fused.layout}"] if fused.layout else []
    sums = [f"combine of {fused.terms} rows"] if fused.combine else ["out_rows sums rows"] if fused.out_rows else []
    rest = [name for name in ("preact_out", "row_scale") if name in fused.keywords]
    return ["; ".join([*picks, *gate, *rest, *sums])]


def _describe_quantised(spec: ProblemSpec) -> list[str]:
    """The quantised operands as text."""
    texts = []
    for name, x in (("a", spec.a), ("b", spec.b)):
        held = f"packed {x.packed}" if x.packed else dtype_name(x.dtype)
        if (s := x.scale) is not None:
            rows = {MIXED: "as each matrix says", 0: "all lines", 1: "a line"}.get(s.rows, f"{s.rows} lines")
            k = {MIXED: "as each matrix says", 0: "all of K"}.get(s.k, f"{s.k} of K")
            zero = "" if s.zero is None else f", zero points in {dtype_name(s.zero)}"
            group = " of a group" if s.by_group else ""
            texts.append(f"{name}: {held}, one {dtype_name(s.dtype)} scale for {rows}{group}, {k}{zero}")
        elif spec.quantised and x.dtype is not spec.compute:
            texts.append(f"{name}: {held}, not scaled")
    return texts


def bucket(n: int) -> int:
    """The smallest power of two that is at least `n`; 0 for 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def half_octave(count: int) -> int:
    """The smallest power of sqrt(2), rounded down, that is at least `count`; 0 for 0."""
    top = bucket(count)
    lower = math.isqrt(top * top // 2)
    return lower if count <= lower else top


def _largest_power(value: int) -> int:
    """The largest power of two, at most 16, that divides `value`."""
    value |= 16
    return value & -value


@lru_cache(maxsize=4096)
def _classify(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], phase: int, shared: bool
) -> OperandSpec:
    size = dtype.itemsize
    rows, cols = shape[-2:]
    row, col = stride[-2] if rows > 1 else 0, stride[-1] if cols > 1 else 0
    groups, group = (shape[0], stride[0]) if len(shape) == 3 else (1, 0)
    if groups == 1:
        group = 0
    shared = shared or (groups > 1 and group == 0)
    found: list[tuple[int, Order, bool]] = []
    # (alignment, order, no element twice) for each direction that may count as contiguous
    if col == 1 or cols <= 1:
        found.append((_largest_power(phase | row * size | group * size), "row", rows <= 1 or row >= max(cols, 1)))
    if row == 1 or rows <= 1:
        found.append((_largest_power(phase | col * size | group * size), "col", cols <= 1 or col >= max(rows, 1)))
    if found:
        align, order, dense = max(found, key=lambda f: (f[2], f[0]))
    else:
        align, order, dense = _largest_power(phase | row * size | col * size | group * size), "strided", False
    reach = sum(max(n - 1, 0) * s for n, s in zip(shape, stride, strict=True))
    return OperandSpec(dtype, order, align, dense, shared, max(reach, *shape) >= WIDE)


def classify(x: Tensor, shared: bool = False) -> OperandSpec:
    """The `OperandSpec` of one matrix or stack of matrices."""
    return _classify(x.dtype, x.shape, x.stride(), x.data_ptr() & 15, shared)


def classify_fresh(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]) -> OperandSpec:
    """The `OperandSpec` of a result that multigemm will allocate: contiguous, each matrix at an aligned address."""
    strides = ((*((shape[1] * shape[2],) if len(shape) == 3 else ()), shape[-1], 1) for shape in shapes)
    return _common({_classify(dtype, s, t, 0, False) for s, t in zip(shapes, strides, strict=True)}, dtype)


def classify_list(matrices: Sequence[Tensor], dtype: torch.dtype) -> OperandSpec:
    """The `OperandSpec` that holds for every matrix of a list."""
    return _common({classify(x) for x in matrices if x.numel()}, dtype)


def _common(classes: set[OperandSpec], dtype: torch.dtype) -> OperandSpec:
    if len(classes) <= 1:
        return next(iter(classes), OperandSpec(dtype))
    orders = {c.order for c in classes}
    return replace(
        next(iter(classes)),
        order=orders.pop() if len(orders) == 1 else "strided",
        align=min(c.align for c in classes),
        dense=all(c.dense for c in classes),
        wide=any(c.wide for c in classes),
    )


KEPT = 8192
_by_geometry: dict[Any, ProblemSpec] = {}
_by_value: dict[ProblemSpec, ProblemSpec] = {}


def _geometry(x: Any) -> Any:
    if x is None:
        return None
    return (x.dtype, x.shape, x.stride(), x.data_ptr() & 15)


def specify(problem: GroupedGemmProblem, groups: int, compute: torch.dtype) -> ProblemSpec:
    """The spec of a problem whose operands, grouping and epilogue are set."""
    source = problem.cut
    index, sizes = None if source is None else source.index_dtype, None
    if problem.grouping is not None and problem.grouping.live is not None and problem.grouping.kind == "sizes":
        index, sizes = torch.int64, index
    on_device = source is not None and source.live is not None and problem.device.type != "cpu"
    alpha = "one" if problem.alpha == 1 else "zero" if problem.alpha == 0 else "any"
    bias = problem.each("bias")
    rest: tuple[Any, ...] = (
        bias[0].dtype if bias else None, compute, alpha, problem.activation, problem.precision,
        problem.deterministic, problem.batch_invariant, index, on_device, problem.out is None,
    )  # fmt: skip
    special = problem.quantisation is not None or problem.fused is not None
    if problem.extents is None:
        part, longest = _list_part(problem, compute)
        fields: tuple[Any, ...] = (*part, *rest, longest, sizes)
        spec = ProblemSpec("per_group", groups, *fields)
        return _intern(_described(spec, problem) if special else spec)
    a, b, c, out = problem.a, problem.b, problem.c, problem.out
    geometry = (_geometry(a), _geometry(b), _geometry(c), _geometry(out))
    key = (problem.form, groups, *geometry, problem.out_dtype, rest, sizes)
    found = None if special else _by_geometry.get(key)
    if found is None:
        if len(_by_geometry) >= KEPT:
            _by_geometry.clear()
        part, longest = _packed_part(problem, groups)
        fields = (*part, *rest, longest, sizes)
        spec = ProblemSpec(problem.form, groups, *fields)
        if special:
            return _intern(_described(spec, problem))
        found = _by_geometry[key] = _intern(spec)
    return found


def _described(spec: ProblemSpec, problem: GroupedGemmProblem) -> ProblemSpec:
    """The spec with the additions of quantised operands and fused steps."""
    for part in (problem.quantisation, problem.fused):
        spec = spec if part is None else part.described(spec)
    return spec


def _intern(spec: ProblemSpec) -> ProblemSpec:
    if len(_by_value) >= KEPT:
        _by_value.clear()
    return _by_value.setdefault(spec, spec)


def _giant(*extents: int) -> int:
    """The longest extent if a kernel may not be able to count it; else 0, so that usual problems share their specs."""
    longest = max(extents)
    return longest if longest >= GIANT else 0


def _packed_part(problem: GroupedGemmProblem, groups: int) -> tuple[tuple[Any, ...], int]:
    """The fields of a packed form's spec that precede the epilogue, and `longest`."""
    assert problem.extents is not None
    form, _, m, n, k = problem.extents
    jagged = form[-1] if form.startswith("jagged") else ""
    total = problem.extents.along(jagged) if jagged else groups * m
    a, b = _tensor(problem.a), _tensor(problem.b)
    fresh = problem.out is None
    part = (
        None if jagged == "m" else m,
        None if jagged == "n" else n,
        None if jagged == "k" else k,
        bucket(total),
        0 if jagged else bucket(m),
        classify(a, form == "jagged_n" and a.dim() == 2),
        classify(b, form == "jagged_m" and b.dim() == 2),
        classify_fresh(problem.out_dtype, [problem.out_shape]) if fresh else classify(_tensor(problem.out)),
        None if problem.c is None else classify(_tensor(problem.c)),
    )
    extents = (groups, m, n, k)
    if problem.fused is not None:  # operands and results whose rows are picked or summed have others
        extents += (*a.shape, *b.shape, *problem.out_shape)
    return part, _giant(*extents)


def _tensor(x: Any) -> Tensor:
    assert isinstance(x, Tensor)
    return x


def _list_part(problem: GroupedGemmProblem, compute: torch.dtype) -> tuple[tuple[Any, ...], int]:
    """The fields of a list's spec that precede the epilogue, and `longest`."""
    a, b, dtype = problem.each("a"), problem.each("b"), problem.out_dtype
    ms, ns, ks = [x.shape[0] for x in a], [y.shape[1] for y in b], [x.shape[1] for x in a]
    out: OperandSpec = classify_fresh(dtype, problem.out_shape)
    if problem.out is not None:
        out = classify_list(problem.each("out"), dtype)
    tops = [max(v, default=0) for v in (ms, ns, ks)]
    common = (top if v and min(v) == top else None for v, top in zip((ms, ns, ks), tops, strict=True))
    part = (
        *common,
        bucket(sum(ms)),
        bucket(tops[0]),
        classify_list(a, a[0].dtype if a else compute),
        classify_list(b, b[0].dtype if b else compute),
        out,
        None if problem.c is None else classify_list(problem.each("c"), dtype),
    )
    return part, _giant(*tops)
