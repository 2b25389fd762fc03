"""Quantised operands: which dtypes go together, what a scale's shape means, and every refusal.

An element means its value times its scale; an element of an integer weight means its value minus the zero point, times
the scale. A scale is a number for all, a vector for the groups, or a grid with as many dimensions as its operand. Along
K a grid has one entry, or one per 32, 64 or 128; along the other axis one entry, one per line, or (with 128 along K)
one per 128.

A jagged K [.., T] has one entry, one for each group, or T // q + G entries for blocks of q, counted from the start of
their group: block j of group g is entry offsets[g] // q + g + j. Since o' = o + K_g gives
o' // q + 1 >= o // q + ceil(K_g / q), ranges of two groups never meet, and an entry needs no offset but its group's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.problem.arrays import Operand, dtype_name, is_list
from multigemm.problem.epilogue import one_of
from multigemm.problem.forms import Take
from multigemm.problem.spec import (
    ACCUMULATE,
    BYTE_FORMATS,
    FLOAT8,
    HALVES,
    MIXED,
    Form,
    ProblemSpec,
    ScaleSpec,
    classify,
    classify_list,
)

BLOCKS = (128, 64, 32)
"""How much of K one number may cover."""
ROW_BLOCK = 128
BYTES = (torch.uint8, torch.int8)
FLOAT4 = torch.float4_e2m1fn_x2
E8M0 = torch.float8_e8m0fnu
LATER = {
    torch.float8_e4m3fnuz: "the fnuz formats come later: convert to float8_e4m3fn",
    torch.float8_e5m2fnuz: "the fnuz formats come later: convert to float8_e5m2",
}


class Operands(NamedTuple):
    """The operands that scales are checked against. Shapes count elements, two per packed byte; a list of shapes for
    per_group.

    `squeezed`: the caller gave two matrices, and the shapes begin with a group that the caller does not know.
    `in_memory`: scales have addresses, which their specs use; in a trace they have none.
    """

    form: Form
    groups: int
    a: torch.dtype
    b: torch.dtype
    a_shape: Any
    b_shape: Any
    squeezed: bool = False
    in_memory: bool = True

    def shape(self, side: str) -> Any:
        """The shape of a or b."""
        return self.a_shape if side == "a" else self.b_shape


class Given(NamedTuple):
    """The keywords of quantised operands as given; `b_format` may also follow from the dtype of b."""

    scale_a: Any = None
    scale_b: Any = None
    zero_b: Any = None
    accumulate: Any = "promoted"


@dataclass(frozen=True, slots=True)
class Scale:
    """A scale as the caller gave it, and as a grid [groups or 1, rows, K] (of b: [.., K, columns]).

    For lists both are lists, without a group dimension.
    """

    given: Operand
    grid: Operand
    spec: ScaleSpec

    def of_group(self, g: int, rows: slice, ks: slice, side: str, jagged_k: bool = False) -> Tensor:
        """The entries of one group, which broadcast against its matrix [rows, ks] (of b: [ks, rows])."""
        grid = self.grid[g] if isinstance(self.grid, list) or self.spec.by_group else self.grid[0]
        if side == "b":
            grid = grid.mT
        row_block, k_block = self.spec.rows, self.spec.k
        if isinstance(self.grid, list):
            row_block, k_block = covered_in_list(grid, rows.stop, ks.stop)
        if row_block == 1:
            grid = grid[rows]
        elif row_block:
            grid = grid.index_select(0, torch.arange(rows.start, rows.stop, device=grid.device) // row_block)
        if k_block:
            first = ks.start // k_block + g if jagged_k else 0
            blocks = torch.arange(ks.stop - ks.start, device=grid.device) // k_block
            grid = grid.index_select(1, blocks + first)
        return grid.mT if side == "b" else grid


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The scales, zero points and formats of a problem with quantised operands. `b_format` is "" if b is not packed."""

    a: Scale | None = None
    b: Scale | None = None
    zero: Scale | None = None
    b_format: Any = ""
    accumulate: Any = "promoted"

    def described(self, spec: ProblemSpec) -> ProblemSpec:
        """The spec of a problem, with the description of its scales that a backend may know."""
        a, b = (None if x is None else x.spec for x in (self.a, self.b))
        blocked = any(x is not None and x.k for x in (a, b))
        fast = self.accumulate == "fast" and spec.a.dtype in FLOAT8 and not blocked
        return replace(
            spec,
            a=replace(spec.a, scale=a),
            b=replace(spec.b, packed=self.b_format, scale=b),
            accumulate="fast" if fast else "promoted",
        )

    def each(self) -> list[tuple[str, Scale]]:
        """The scales and zero points that exist, by keyword."""
        named = (("scale_a", self.a), ("scale_b", self.b), ("zero_b", self.zero))
        return [(name, x) for name, x in named if x is not None]

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments that state this quantisation."""
        given = {name: scale.given for name, scale in self.each()}
        return {**given, "b_format": self.b_format or None, "accumulate": self.accumulate}


# --- bytes of b ---------------------------------------------------------------------------------------


def check_words(b_format: Any, accumulate: Any) -> None:
    """Checks `b_format` and `accumulate`."""
    if b_format is not None:
        one_of(b_format, "b_format", BYTE_FORMATS)
    one_of(accumulate, "accumulate", ACCUMULATE)


def format_of(dtype: torch.dtype, b_format: str | None) -> str:
    """The format of a packed b's bytes; "" if b is not packed."""
    if dtype is FLOAT4:
        if b_format not in (None, "e2m1"):
            raise InvalidProblem(f"b is {dtype_name(dtype)}, which holds e2m1, and b_format={b_format!r}: leave it out")
        return "e2m1"
    if dtype is torch.uint8 and b_format is None:
        raise InvalidProblem("b is uint8: say what it holds with b_format='int4', 'uint4' or 'e2m1'")
    if b_format is not None and dtype not in BYTES:
        raise InvalidProblem(f"b_format={b_format!r} says what bytes hold, and b is {dtype_name(dtype)}: leave it out")
    return b_format or ""


def as_bytes(b: Tensor) -> Tensor:
    """A packed b as a tensor of bytes over the same memory."""
    return b.view(torch.uint8) if b.dtype is FLOAT4 else b


def unpacked_shape(a: Tensor, b: Tensor, names: tuple[str, str] = ("a", "b")) -> Tensor:
    """A tensor without memory that has the shape of a packed b counted in elements."""
    if a.dim() < 2 or b.dim() < 2:
        return b
    k, held = a.shape[-1], 2 * b.shape[-2]
    if k != held:
        raise InvalidProblem(
            f"{names[0]} has K = {k} and {names[1]} holds {held} (two in a byte): K must be twice the extent of "
            f"{names[1]}, so even"
        )
    return torch.empty((*b.shape[:-2], held, b.shape[-1]), dtype=torch.uint8, device="meta")


# --- dtypes -------------------------------------------------------------------------------------------


def is_quantised(a: torch.dtype, b: torch.dtype, packed: str, given: Given) -> bool:
    """Whether the operands are quantised. Raises for dtypes and keywords that contradict each other."""
    for name, dtype in (("a", a), ("b", b)):
        if dtype in LATER:
            raise InvalidProblem(f"{name} is {dtype_name(dtype)}: {LATER[dtype]}")
    if a in FLOAT8:
        if packed:
            _refuse_pair(a, b, packed, "float8 with packed weights comes later: convert a to bfloat16")
        if b not in FLOAT8:
            _refuse_pair(a, b, packed, "float8 multiplies float8 only: convert a or b")
        return True
    scaled_int8 = b is torch.int8 and a is not torch.int8 and given.scale_b is not None
    if not (packed or b in FLOAT8 or scaled_int8):
        if not given.scale_a is given.scale_b is given.zero_b is None:
            _refuse_scales(a, b, given)
        return False
    if a not in HALVES:
        _refuse_pair(a, b, packed, "quantised weights multiply bfloat16 or float16: convert a")
    return True


def _refuse_pair(a: torch.dtype, b: torch.dtype, packed: str, why: str) -> NoReturn:
    raise InvalidProblem(f"a is {dtype_name(a)} and b is {f'packed {packed}' if packed else dtype_name(b)}: {why}")


def _refuse_scales(a: torch.dtype, b: torch.dtype, given: Given) -> None:
    """Refuses scales and zero points beside operands that take none."""
    if given.zero_b is not None and given.scale_b is None:
        raise InvalidProblem("zero_b without scale_b: pass both, or leave it out")
    for name, scale, dtype in (("scale_a", given.scale_a, a), ("scale_b", given.scale_b, b)):
        if scale is None:
            continue
        if a is b is torch.int8:
            raise InvalidProblem(f"{name}: scales of int8 x int8 products come later: scale the result")
        raise InvalidProblem(f"{name} scales {name[-1]}, which is {dtype_name(dtype)} and needs none: leave it out")


def refuse_gradient(name: str, x: Tensor) -> None:
    """Refuses an operand, a scale or zero points that ask for a gradient and have none."""
    if not x.requires_grad:
        return
    if name not in ("a", "b"):
        raise InvalidProblem(f"{name} asks for a gradient, and scales and zero points have none: pass {name}.detach()")
    if x.dtype in (*FLOAT8, FLOAT4):
        raise InvalidProblem(
            f"{name} asks for a gradient, and {dtype_name(x.dtype)} operands give none: pass {name}.detach()"
        )


# --- scales -------------------------------------------------------------------------------------------


def read(take: Take, operands: Operands, given: Given, packed: str) -> Quantisation:
    """Reads scales and zero points and checks them against the operands. `take` adopts an array by its keyword."""
    if packed and operands.form == "jagged_k":
        raise InvalidProblem(f"b is packed {packed} and jagged='k' cuts K, where bytes hold two: pass 8-bit weights")
    weights = operands.a not in FLOAT8
    if given.scale_a is not None and weights:
        raise InvalidProblem(
            f"scale_a scales a, which is {dtype_name(operands.a)} and needs none: leave it out (scales of 16-bit "
            "operands come later)"
        )
    check_zero("zero_b", given.zero_b, given.scale_b, operands.b, packed)
    plain = (torch.float32, E8M0)
    a = _scale(take, operands, given.scale_a, "scale_a", plain)
    b = _scale(take, operands, given.scale_b, "scale_b", (*plain, operands.a) if weights else plain)
    zero = read_zero(take, operands, given.zero_b, "zero_b", b)
    if zero is not None and b is not None:
        b = replace(b, spec=_with_points(b.spec, zero.spec))
    return Quantisation(a, b, zero, packed, given.accumulate)


def _with_points(scale: ScaleSpec, points: ScaleSpec) -> ScaleSpec:
    """A grid and the zero points beside it, which lie as it does: in the order of both, aligned to as many numbers."""
    order = scale.order if points.order == scale.order else "strided"
    return replace(scale, zero=points.dtype, order=order, align=min(scale.align, points.align * scale.dtype.itemsize))


def check_zero(name: str, zero: Any, scale: Any, dtype: torch.dtype, packed: str) -> None:
    """Refuses zero points without a scale, or of an operand that holds no integers."""
    if zero is None:
        return
    side = name[-1]
    if scale is None:
        raise InvalidProblem(f"{name} without scale_{side}: pass both, or leave it out")
    if packed == "e2m1" or (not packed and dtype is not torch.int8):
        seen = packed or dtype_name(dtype)
        raise InvalidProblem(
            f"{name} belongs to integer weights (int8, int4, uint4), and {side} is {seen}: leave it out"
        )


def read_zero(take: Take, operands: Operands, x: Any, name: str, scale: Scale | None) -> Scale | None:
    """Reads zero points and checks that they are laid out as the scale that was read."""
    zero = _scale(take, operands, x, name, BYTES)
    if zero is not None and scale is not None and _shapes(zero.given) != _shapes(scale.given):
        of_scale = f"scale_{name[-1]}"
        raise InvalidProblem(
            f"{name} has shape {_shapes(zero.given)} and {of_scale} {_shapes(scale.given)}: it must be laid out as "
            f"{of_scale}"
        )
    return zero


def _shapes(x: Operand) -> Any:
    return tuple(x.shape) if isinstance(x, Tensor) else [tuple(t.shape) for t in x]


def _scale(take: Take, operands: Operands, x: Any, name: str, dtypes: Sequence[torch.dtype]) -> Scale | None:
    if x is None:
        return None
    if is_list(x):
        if operands.form != "per_group":
            raise InvalidProblem(f"{name} is a list; a {operands.form} problem takes one array: stack it")
        if len(x) != operands.groups:
            raise InvalidProblem(f"{name} is a list of {len(x)}; the problem has {operands.groups} groups")
        each = [_checked(take(t, f"{name}[{g}]"), f"{name}[{g}]", dtypes) for g, t in enumerate(x)]
        if len({t.dtype for t in each}) > 1:
            raise InvalidProblem(f"{name} mixes dtypes: convert the list to one")
        return _list_scale(operands, each, each, name) if each else None
    scale = _checked(take(x, name), name, dtypes)
    if operands.form != "per_group":
        return _packed_scale(operands, scale, name)
    if scale.dim() > 1 or (scale.dim() == 1 and scale.shape[0] != operands.groups):
        raise InvalidProblem(
            f"{name} has shape {tuple(scale.shape)}: lists take a number for all, a vector with one number for each of "
            f"the {operands.groups} groups, or a list of grids"
        )
    each = list(scale.unbind(0)) if scale.dim() else [scale] * operands.groups
    return _list_scale(operands, scale, each, name) if each else None


def _checked(x: Tensor, name: str, dtypes: Sequence[torch.dtype]) -> Tensor:
    allowed = " or ".join((", ".join(map(dtype_name, dtypes[:-1])), dtype_name(dtypes[-1])))
    if torch.is_grad_enabled():
        refuse_gradient(name, x)
    if x.dtype in dtypes:
        return x
    if name.startswith("zero"):
        later = "float zero points come later; " if x.dtype.is_floating_point else ""
        raise InvalidProblem(f"{name} has dtype {dtype_name(x.dtype)}; {later}it must be {allowed}: convert it")
    if x.dtype is torch.uint8:
        raise InvalidProblem(f"{name} has dtype uint8; it must be {allowed}: view them as torch.float8_e8m0fnu")
    if x.dtype is torch.float8_e4m3fn:
        raise InvalidProblem(f"{name} has dtype float8_e4m3fn, and scales in e4m3 (nvfp4) come later: use {allowed}")
    raise InvalidProblem(f"{name} has dtype {dtype_name(x.dtype)}; it must be {allowed}: convert it")


# --- what a shape covers ------------------------------------------------------------------------------


def _block(count: int, extent: int, blocks: Sequence[int]) -> int | None:
    """How many elements of an extent one of `count` entries covers: 0 for all, else one of `blocks`. None if no choice
    fits."""
    if count == 1:
        return 0
    return next((q for q in blocks if -(-extent // q) == count), None)


def covered_in_list(grid: Tensor, rows: int, k: int) -> tuple[int, int]:
    """How many rows and how much of K one entry of a grid [rows, K] covers in one matrix of a list; 0 for all."""
    return _block(grid.shape[0], rows, (1, ROW_BLOCK)) or 0, _block(grid.shape[1], k, BLOCKS) or 0


def _packed_scale(operands: Operands, x: Tensor, name: str) -> Scale:
    side, groups = name[-1], operands.groups
    rank = len(operands.shape(side)) - operands.squeezed
    if x.dim() == 0:
        return _on_grid(operands, x, x.reshape(1, 1, 1), False, 0, 0)
    if x.dim() == 1 and x.shape[0] == groups:
        return _on_grid(operands, x, x[:, None, None], groups != 1, 0, 0)
    if x.dim() == 1:
        _refuse_vector(x, name, rank, groups)
    if x.dim() != rank:
        raise InvalidProblem(
            f"{name} has shape {tuple(x.shape)} for {_seen(operands, side)}: it must be a number, a vector of the "
            f"{groups} groups, or a grid of {rank} dimensions"
        )
    if rank == 3 and x.shape[0] not in (1, groups):
        raise InvalidProblem(
            f"{name} has shape {tuple(x.shape)} for {_seen(operands, side)}: its first extent must be 1 or {groups}"
        )
    return _grid_scale(operands, x, name)


def _refuse_vector(x: Tensor, name: str, rank: int, groups: int) -> None:
    line, cut = {
        ("a", 2): ("row", "[:, None]"), ("a", 3): ("row", "[None, :, None]"),
        ("b", 2): ("column", "[None, :]"), ("b", 3): ("column", "[None, None, :]"),
    }[name[-1], rank]  # fmt: skip
    raise InvalidProblem(
        f"{name} has shape {tuple(x.shape)}: a vector holds one number for each of the {groups} groups; one for each "
        f"{line} is {name}{cut}"
    )


class _Axes(NamedTuple):
    """The two axes of an operand that a grid follows: length, name, and the numbers of entries that are allowed."""

    rows: int
    k: int
    row_name: str
    row_blocks: tuple[int, ...]
    k_counts: list[tuple[int, int]]
    """Entries along K, and how much of it one covers: 0 for all. The first of equal counts holds."""


def _axes(form: Form, groups: int, side: str, shape: Sequence[int]) -> _Axes:
    rows, k = (shape[-2], shape[-1]) if side == "a" else (shape[-1], shape[-2])
    jagged_rows = form == ("jagged_m" if side == "a" else "jagged_n")
    row_name = "T" if jagged_rows else "M" if side == "a" else "N"
    counts = [(1, 0)]
    if form == "jagged_k":
        counts += [(groups, 0), *((k // q + groups, q) for q in BLOCKS)]
    else:
        counts += [(-(-k // q), q) for q in BLOCKS]
    return _Axes(rows, k, row_name, (1,) if jagged_rows else (1, ROW_BLOCK), counts)


def _read_grid(axes: _Axes, shape: Sequence[int], side: str, refuse: Callable[[str], Any]) -> tuple[int, int]:
    """How many rows and how much of K one entry covers."""
    along_rows, along_k = (shape[-2], shape[-1]) if side == "a" else (shape[-1], shape[-2])
    rows = _block(along_rows, axes.rows, axes.row_blocks)
    k = next((q for count, q in axes.k_counts if count == along_k), None)
    if rows is None or k is None:
        refuse(f"along K it takes {_k_text(axes)}, along {axes.row_name} {_row_text(axes)}")
    assert rows is not None and k is not None
    if rows == ROW_BLOCK and k != ROW_BLOCK and axes.k > ROW_BLOCK:
        refuse(f"128 along {axes.row_name} goes with 128 along K only, {-(-axes.k // ROW_BLOCK)} blocks")
    return rows, k


def _k_text(axes: _Axes) -> str:
    first: dict[str, int] = {}
    for n, q in axes.k_counts:
        first.setdefault(str(n), q)
    return _either([f"{n} (blocks of 128)" if q == 128 else n for n, q in first.items()])


def _row_text(axes: _Axes) -> str:
    counts = (1, axes.rows, *(-(-axes.rows // q) for q in axes.row_blocks[1:]))
    return _either(list(dict.fromkeys(map(str, counts))))


def _either(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def _seen(operands: Operands, side: str) -> str:
    return f"{side} of shape {tuple(operands.shape(side)[operands.squeezed :])}"


def _grid_scale(operands: Operands, x: Tensor, name: str) -> Scale:
    side, groups = name[-1], operands.groups

    def refuse(why: str) -> None:
        raise InvalidProblem(f"{name} has shape {tuple(x.shape)} for {_seen(operands, side)}: {why}")

    axes = _axes(operands.form, groups, side, operands.shape(side))
    rows, k = _read_grid(axes, x.shape, side, refuse)
    if x.dim() == 3:
        return _on_grid(operands, x, x, groups != 1 and x.shape[0] == groups, rows, k)
    along_k = x.shape[-1 if side == "a" else -2]
    if operands.form == "jagged_k" and k == 0 and along_k != 1:  # one entry for each group
        grid = x.t().unsqueeze(2) if side == "a" else x.unsqueeze(1)
        return _on_grid(operands, x, grid, True, rows, 0)
    return _on_grid(operands, x, x.unsqueeze(0), False, rows, k)


def _on_grid(operands: Operands, x: Tensor, grid: Tensor, by_group: bool, rows: int, k: int) -> Scale:
    if not operands.in_memory:
        return Scale(x, grid, ScaleSpec(grid.dtype, by_group, rows, k))
    found = classify(grid)
    return Scale(x, grid, ScaleSpec(grid.dtype, by_group, rows, k, found.order, found.align))


def _list_scale(operands: Operands, given: Operand, each: list[Tensor], name: str) -> Scale:
    side, grids, of_rows, of_k = name[-1], [], [], []
    for g, (x, shape) in enumerate(zip(each, operands.shape(name[-1]), strict=True)):

        def refuse(why: str, g: int = g, x: Tensor = x, shape: Any = shape) -> None:
            raise InvalidProblem(
                f"{name}[{g}] has shape {tuple(x.shape)} for {side}[{g}] of shape {tuple(shape)}: {why}"
            )

        if x.dim() not in (0, 2):
            refuse("it must be a number or a grid of 2 dimensions")
        grid = x.reshape(1, 1) if x.dim() == 0 else x
        axes = _axes("per_group", 1, side, shape)
        _read_grid(axes, grid.shape, side, refuse)
        along_rows, along_k = grid.shape if side == "a" else grid.mT.shape
        of_rows.append((along_rows, axes.rows))
        of_k.append((along_k, axes.k))
        grids.append(grid)
    rows, k = _common(of_rows, (1, ROW_BLOCK)), _common(of_k, BLOCKS)
    found = classify_list(grids, grids[0].dtype)
    return Scale(given, grids, ScaleSpec(grids[0].dtype, True, rows, k, found.order, found.align))


def _common(counts: list[tuple[int, int]], blocks: Sequence[int]) -> int:
    """What one entry covers, if that is the same in every matrix of a list."""
    if all(n == 1 for n, _ in counts):
        return 0
    return next((q for q in blocks if all(-(-extent // q) == n for n, extent in counts)), MIXED)
