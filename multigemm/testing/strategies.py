"""Draws cases: structure only, mostly with unaligned extents and empty groups.

One description, `draw_case`, serves two interfaces. `random_case` gives it Python's own generator with a seed, for
campaigns of a hundred thousand cases; `cases()` gives it that of hypothesis, which shrinks what a property test finds.

A *kind* is what compiled kernels are keyed by: a case apart from its sizes and values. A campaign over a fixed
set of `kinds` compiles each kernel once, and then runs problems that are `redrawn` from a kind.

Sizes are never rounded to what kernels like: a published evaluation that did so reported 96.7 % bit
equality where unrestricted sizes gave 17.8 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from multigemm.problem.arrays import dtype_name
from multigemm.problem.spec import ACTIVATIONS, FORMS, GATES, GLU_LAYOUTS, Form
from multigemm.testing.case import (
    FLOAT8,
    INDICES,
    NO_ROWS,
    PLAIN,
    UNFUSED,
    UNSCALED,
    Case,
    Fused,
    Layout,
    RowNumbers,
    Scale,
    align,
    classes,
    fit,
)

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

POOL, SMALL_POOL = 1200, 500
"""Random cases, and quantised and fused ones, that kinds and cases for every required class are chosen from."""
DTYPES = ("bfloat16", "float16", "float32", "float64", "int8")
HALVES = ("bfloat16", "float16")
DISTINCT = ("onehot", "bitmask", "precise", "cancel", "beside")
"""Modes that need distinct rows and columns, so no zero strides."""
WHOLE = ("int", "ties", "onehot", "precise", "beside")
"""Modes of whole numbers."""
EDGES = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
COUNTS = (1, 2, 15, 16, 17)
MANY = (255, 256, 257, 1023, 1024, 1025)
FLOAT_MODES = ("int", "ties", "onehot", "bitmask", "normal", "uniform", "cancel", "pow2", "special", "rowscaled",
               "precise", "tiny", "beside")  # fmt: skip
QUANTISED_MODES = ("int", "uniform", "normal", "edges")
FUSED_MODES = ("int", "normal", "special")
WEIGHTS = ("float8_e4m3fn", "float8_e5m2", "int8", "int4", "uint4", "e2m1")
"""Formats of quantised weights under 16-bit activations."""
PACKED = ("int4", "uint4", "e2m1")
COVERS = ("", "tensor", "group", "row", "1x32", "1x64", "1x128", "128x128")
"""What a scale may cover; see multigemm.testing.case.Scale."""
FLOAT8_RECIPES = (("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128"))
"""What scales of tokens and of weights cover in layers of float8."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be drawn. `work` bounds the multiply-adds, `groups` the number of groups; one case in `quantised` has
    quantised operands (0: none), whatever `dtypes` and `modes` say; one in `fused` picks rows, has a gate, weights or
    sums of rows (0: none), whatever `modes` say."""

    work: int = 1 << 20
    groups: int = 1025
    forms: tuple[Form, ...] = FORMS
    dtypes: tuple[str, ...] = DTYPES
    modes: tuple[str, ...] = FLOAT_MODES
    longest: int = 300
    quantised: int = 0
    fused: int = 0


EMULATED = Limits(work=1 << 14, groups=40, longest=80)
"""The limits for kernels that run in an interpreter on a CPU."""


def _extent(ch: Random, limits: Limits) -> int:
    if ch.randint(0, 2) == 0:
        return ch.randint(0, limits.longest)
    return ch.choice([e for e in EDGES if e <= limits.longest])


def _inner(ch: Random, limits: Limits) -> int:
    """Draws K: rarely zero, sometimes long."""
    if ch.randint(0, 15) == 0 and limits.longest >= 300:
        return ch.choice((512, 1000, 1024, 2000))
    k = _extent(ch, limits)
    return k if k or ch.randint(0, 3) == 0 else 1 + ch.randint(0, 40)


def _lengths(ch: Random, limits: Limits) -> tuple[int, ...]:
    """Draws group sizes: edges, cuts with replacement, one group with everything, mostly empty groups, very many
    groups."""
    style = ch.randint(0, 9)
    if style <= 3:
        return tuple(_extent(ch, limits) for _ in range(ch.randint(0, 8)))
    if style <= 6:
        total = ch.randint(0, 2 * limits.longest)
        cuts = sorted(ch.randint(0, total) for _ in range(ch.randint(0, 12)))
        return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
    count = min(ch.choice(MANY if ch.randint(0, 3) == 0 else COUNTS), limits.groups)
    if style == 7:
        lengths = [0] * count
        lengths[ch.randint(0, count - 1)] = _extent(ch, limits)
        return tuple(lengths)
    if style == 8:
        return tuple(ch.choice((0, 0, 0, 1, 2, 7)) for _ in range(min(count, 64)))
    return (ch.choice((0, 1, 1, 2)),) * count


def draw_layout(ch: Random, *, written: bool = False) -> Layout:
    order = ch.choice(("row", "row", "col"))
    if ch.randint(0, 3) == 0:
        return Layout(order)
    step = 2 if ch.randint(0, 9) == 0 else 1
    zero = "" if written or ch.randint(0, 11) else ch.choice(("g", "r", "c"))
    return Layout(order, ch.choice((0, 1, 3, 7, 8, 16, -16)), ch.choice((0, 0, 1, 2, 3, 4, 7, 8)), step, zero)


def _dtypes(ch: Random, limits: Limits) -> dict[str, Any]:
    dtype = ch.choice(limits.dtypes)
    if dtype == "int8":
        return {"dtype": dtype}
    floats = [d for d in limits.dtypes if d != "int8"]
    other = ch.choice(floats) if ch.randint(0, 9) == 0 else dtype
    out = ch.choice(("", "", "", "float32", "float16", "bfloat16", "float64"))
    found = {"dtype": dtype, "dtype_b": "" if other == dtype else other, "out_dtype": out}
    if dtype == other == "float32" and ch.randint(0, 3) == 0:
        found["precision"] = "tf32"
    return found


def factors(case: Case) -> tuple[float, ...]:
    """The values of alpha and beta: whole numbers if the sums must stay whole."""
    if case.mode in ("bitmask", "special", "edges"):
        return (1.0,)
    whole = case.dtype == "int8" or case.mode in WHOLE
    return (1, 1, 1, 2, -1, 3, 0) if whole else (1.0, 1.0, 0.5, -1.0, 0.3, 1.7, 0.0)


def _epilogue(ch: Random, case: Case) -> Case:
    """Draws alpha, beta, c, bias and the activation."""
    numbers = factors(case) if ch.randint(0, 1) else (1.0,)
    result = dtype_name(case.result_dtype)
    extra = ("int32",) if case.dtype == "int8" else (result if case.quantised else case.dtype, result, "float32")
    beta = ch.choice(numbers) if ch.randint(0, 2) == 0 else 0
    bias = ch.choice(("", "", "n", "gn")) if case.form not in ("jagged_n", "per_group") else ch.choice(("", "", "n"))
    acts = (None, None, "relu") if case.dtype == "int8" else (None, None, None, *ACTIVATIONS)
    return replace(
        case,
        alpha=ch.choice(numbers), beta=beta,
        c_dtype=ch.choice(extra) if beta else "", bias=bias, bias_dtype=ch.choice(extra) if bias else "",
        activation=ch.choice(acts),
    )  # fmt: skip


def _output(ch: Random, case: Case) -> Case:
    if ch.randint(0, 1) == 0:
        return case
    case = replace(case, given=True, out=draw_layout(ch, written=True))
    if case.beta and ch.randint(0, 1) == 0:
        return replace(case, alias=True, c_dtype=dtype_name(case.result_dtype), c=case.out)
    return case


def structure(ch: Random, limits: Limits) -> dict[str, Any]:
    """Draws form, sizes and the keyword that gives them."""
    form = ch.choice(limits.forms)
    if form == "per_group":
        count = ch.randint(0, 8) if ch.randint(0, 7) else min(ch.choice((33, 65, 257)), limits.groups)
        longest = limits.longest if count <= 8 else 9
        draw: Callable[[], int] = lambda: _extent(ch, limits) if longest == limits.longest else ch.randint(0, longest)  # noqa: E731
        dims = tuple((draw(), draw(), _inner(ch, limits) if count <= 8 else draw()) for _ in range(count))
        return {"form": form, "dims": dims}
    found: dict[str, Any] = {"form": form, "m": _extent(ch, limits), "n": _extent(ch, limits), "k": _inner(ch, limits)}
    if form == "batched":
        return found | {"lengths": (0,) * min(ch.choice((0, 1, 2, 3, 5, 17, 64)), limits.groups)}
    if form == "masked":
        count = min(ch.choice((0, 1, 2, 3, 5, 17, 64)), limits.groups)
        return found | {"lengths": tuple(ch.choice((0, found["m"], ch.randint(0, found["m"]))) for _ in range(count))}
    lengths = _lengths(ch, limits)
    kind = ch.choice(("offsets", "offsets", "sizes", "ends"))
    found |= {"lengths": lengths, "kind": kind, "tail": ch.choice((0, 0, 1, 3, 9))}
    found["head"] = ch.choice((0, 0, 1, 3, 9)) if kind == "offsets" else 0
    found["shared"] = form in ("jagged_m", "jagged_n") and ch.randint(0, 3) == 0
    return found


def draw_case(ch: Random, limits: Limits = Limits()) -> Case:
    """One case within the limits."""
    quantised = bool(limits.quantised) and ch.randint(1, limits.quantised) == 1
    fused = bool(limits.fused) and ch.randint(1, limits.fused) == 1
    if fused:
        limits = _where_fused(limits)
    case = _draw_quantised(ch, limits, fused) if quantised else _draw_plain(ch, limits)
    case = replace(case, where=ch.choice(("device", "device", "list", "host")))
    case = _epilogue(ch, case)
    case = _output(ch, _draw_fused(ch, case) if fused else case)
    if case.beta and not case.alias:
        case = replace(case, c=draw_layout(ch))
    found = settled(stretched(ch, replace(case, aligned=ch.randint(0, 4) == 0), limits), limits)
    if fused and not found.is_fused:  # whatever was drawn goes with other forms: this goes with all
        found = replace(found, activation="relu", fused=Fused(preact=True))
    return found if quantised else replace(found, batch_invariant=ch.randint(0, 5) == 0)


def _where_fused(limits: Limits) -> Limits:
    """Draws jagged m more often, which takes all fused keywords, and values for which bounds can tell right from
    wrong."""
    often = tuple(form for form in limits.forms for _ in range(4 if form == "jagged_m" else 1))
    modes = tuple(mode for mode in FUSED_MODES if mode in limits.modes) or limits.modes
    return replace(limits, forms=often, modes=modes)


def _draw_plain(ch: Random, limits: Limits) -> Case:
    case = Case(**structure(ch, limits), **_dtypes(ch, limits), a=draw_layout(ch), b=draw_layout(ch))
    mode = ch.choice(limits.modes) if case.dtype != "int8" else "int"
    return replace(case, mode=mode, seed=ch.randint(0, 2**31 - 1), index=ch.choice(("int32", "int64")))


def _draw_quantised(ch: Random, limits: Limits, fused: bool) -> Case:
    """Draws float8 on both sides, or quantised weights under 16-bit activations, with scales of any granularity."""
    sizes = structure(ch, limits)
    case = Case(**sizes, **_formats(ch, sizes["form"]), a=draw_layout(ch), b=draw_layout(ch).turned)
    modes = [mode for mode in QUANTISED_MODES if not fused or mode in FUSED_MODES]
    case = replace(case, mode=ch.choice(modes), seed=ch.randint(0, 2**31 - 1))
    case = replace(case, index=ch.choice(("int32", "int64")), out_dtype=ch.choice(("", "float32", "bfloat16")))
    if case.weights:
        case = replace(case, scale_b=_scale(ch, case, "b"))
        if case.weights in ("int8", "int4", "uint4") and case.scale_b.covers:
            case = replace(case, zero_b=ch.choice(("", "uint8", "int8")))
    else:
        case = replace(case, scale_a=_scale(ch, case, "a"), scale_b=_scale(ch, case, "b"))
        case = replace(case, accumulate=ch.choice(("promoted", "promoted", "promoted", "fast")))
    return deepened(ch, case, limits)


def _draw_fused(ch: Random, case: Case) -> Case:
    """Adds picked rows, a gate, weights or sums of rows, as the form allows."""
    fused = Fused(
        a_rows=_draw_rows(ch) if ch.randint(0, 1) else NO_ROWS, b_rows=_draw_rows(ch) if ch.randint(0, 1) else NO_ROWS,
        row_scale=_dtype_of_weights(ch, case) if ch.randint(0, 1) else "", preact=ch.randint(0, 1) == 0,
    )  # fmt: skip
    how = ch.choice(("", "combine", "combine", "out_rows"))
    if how == "combine":
        weights = _dtype_of_weights(ch, case) if ch.randint(0, 3) else ""
        fused = replace(fused, combine=_draw_rows(ch), terms=ch.choice((0, 1, 2, 3, 8)), weights=weights)
    elif how:
        fused = replace(fused, out_rows=_draw_rows(ch))
    if ch.randint(0, 2):
        whole = case.mode == "int"
        gate = ch.choice((*GATES, *["reglu"] * 5) if whole else (*GATES, "reglu"))
        case = replace(case, activation=gate)
        fused = replace(
            fused, glu_layout=ch.choice(GLU_LAYOUTS),
            glu_beta=ch.choice((0.0, 0.0, 1.0, -1.0) if whole else (0.0, 0.0, 1.0, 0.3)),
            glu_limit=ch.choice((None, None, None, 2.0, 7.0, 0.0) if whole else (None, None, None, 0.7, 2.0, 0.1)),
            glu_alpha=ch.choice((1.0, 1.0, 1.0, 1.702, -0.5, 0.25)) if gate == "swiglu" else 1.0,
        )  # fmt: skip
    return replace(case, fused=fused)


def _draw_rows(ch: Random) -> RowNumbers:
    how = ch.choice(("honest", "lies"))
    return RowNumbers(ch.randint(0, 29), ch.choice(("int32", "int64")), how, how == "honest" and ch.randint(0, 2) == 0)


def _dtype_of_weights(ch: Random, case: Case) -> str:
    own = "float32" if case.dtype in (*FLOAT8, "int8") else case.dtype
    return ch.choice((own, "float32", "float32"))


def _formats(ch: Random, form: str) -> dict[str, Any]:
    """The dtypes of a and b, and the format of b's bytes."""
    if ch.randint(0, 1):
        return {"dtype": ch.choice(FLOAT8), "dtype_b": ch.choice(FLOAT8)}
    weights = ch.choice([name for name in WEIGHTS if form != "jagged_k" or name not in PACKED])
    held = {"dtype_b": "uint8", "b_format": weights} if weights in PACKED else {"dtype_b": weights}
    return {"dtype": ch.choice(HALVES), **held}


def _scale(ch: Random, case: Case, side: str) -> Scale:
    covers = ch.choice(COVERS[1:] if case.weights == "int8" else COVERS)
    lines_are_jagged = case.form == ("jagged_m" if side == "a" else "jagged_n")
    if covers == "128x128" and lines_are_jagged:
        covers = "1x128"
    if covers == "row" and case.form == "jagged_k" and ch.randint(0, 1):
        covers = "group's row"
    if covers.startswith(("row", "1x")) and ch.randint(0, 7) == 0:
        covers = covers.replace("row", "all").replace("1x", "allx")
    dtypes = ["float32", "float8_e8m0fnu"]
    if case.weights and case.mode != "edges":
        dtypes.append(case.dtype)
    return Scale(covers, ch.choice(dtypes), draw_layout(ch)) if covers else UNSCALED


def deepened(ch: Random, case: Case, limits: Limits) -> Case:
    """Gives some quantised cases positive numbers and a long K, where sums in few bits show, and small other
    extents."""
    if not case.quantised or case.mode != "uniform" or limits.longest < 300:
        return case
    if case.form == "per_group":
        return replace(case, dims=tuple((min(m, 9), min(n, 9), ch.randint(1000, 3000)) for m, n, _ in case.dims[:4]))
    lengths = case.lengths
    if case.form == "jagged_k":
        lengths = tuple(ch.randint(1000, 2000) for _ in lengths[:4])
    elif case.jagged:
        lengths = tuple(min(length, 9) for length in lengths[:8])
    elif case.form == "masked":
        lengths = tuple(min(length, 9) for length in lengths)
    return replace(case, m=min(case.m, 9), n=min(case.n, 9), k=ch.randint(1000, 3000), lengths=lengths)


def stretched(ch: Random, case: Case, limits: Limits) -> Case:
    """Sometimes makes one extent so long that 16-bit counters wrap, if the work allows it, and the others short."""
    if limits.longest < 300 or ch.randint(0, 23) or case.is_fused:
        return case
    long = limits.work // ch.choice((4, 4, 16)) + ch.randint(-9, 9)
    m, n, k = (ch.randint(1, 2) for _ in "mnk")
    sizes = {"m": m, "n": n, "k": k} | {ch.choice("mnk"): long}
    if case.form == "per_group":
        return replace(case, dims=((sizes["m"], sizes["n"], sizes["k"]), (2, 3, 1)))
    lengths: tuple[int, ...] = (0,)
    if case.form == "masked":
        lengths = (max(0, sizes["m"] - ch.randint(0, 1)),)
    elif case.jagged:
        length = sizes[case.jagged]
        lengths = ch.choice(((length,), (0, length - 1, 1)))
    return replace(case, m=sizes["m"], n=sizes["n"], k=sizes["k"], lengths=lengths)


def settled(case: Case, limits: Limits) -> Case:
    """Makes a case legal and within the limits, and aligned if that was drawn and fits."""
    case = legal(fit(case, limits.work))
    if not case.aligned:
        return case
    even = legal(align(case))
    return even if even.work <= limits.work and even.storage <= 2 * limits.work else replace(case, aligned=False)


def legal(case: Case) -> Case:
    """Removes combinations that are not allowed: dropped extents, zero strides over distinct values, mixed dtypes,
    scales of operands that take none."""
    changes: dict[str, Any] = {}
    if case.b_format:  # two of K in a byte
        changes |= {"k": case.k - case.k % 2, "dims": tuple((m, n, k - k % 2) for m, n, k in case.dims)}
    if not case.quantised:
        changes |= {"scale_a": UNSCALED, "scale_b": UNSCALED, "zero_b": "", "b_format": "", "accumulate": "promoted"}
    if not case.scale_b.covers:
        changes["zero_b"] = ""
    if case.jagged:
        changes[case.jagged] = 0
    if case.form == "per_group":
        changes |= {"m": 0, "n": 0, "k": 0}
    if case.compute.is_floating_point and case.precision == "tf32" and case.dtype != "float32":
        changes["precision"] = "ieee"
    if case.mode in DISTINCT:
        changes |= {"a": replace(case.a, zero=""), "b": replace(case.b, zero="")}
    case = replace(case, **changes)
    return _legal_fused(case) if case.is_fused else case


def _legal_fused(case: Case) -> Case:
    """Drops what the form, the dtypes or the activation do not allow. Makes columns even for a gate."""
    form, fused, whole = case.form, case.fused, case.compute == torch.int8
    if case.gated and (form in ("jagged_n", "jagged_k") or whole):
        case = replace(case, activation=None)
    takes = {
        "a_rows": form == "jagged_m" or (form == "jagged_k" and not case.quantised),
        "b_rows": form == "jagged_n" or (form == "jagged_k" and not case.quantised),
        "combine": form == "jagged_m" and not whole,
        "out_rows": form == "jagged_m" and not whole and not fused.combine.given,
    }
    kept: dict[str, Any] = {name: getattr(fused, name) if takes[name] else NO_ROWS for name in INDICES}
    for name, index in kept.items():
        extent = case.total if name == "combine" else index.rows
        if index.host and (
            extent == 0 or index.how == "lies"
        ):  # the host tells honest numbers, of which there are none
            kept[name] = replace(index, host=False)
    scaled = form in ("jagged_m", "masked") and not whole
    kept |= {"row_scale": fused.row_scale if scaled else "", "preact": fused.preact and case.activation is not None}
    if not kept["combine"].given:
        kept |= {"terms": 0, "weights": ""}
    if not case.gated:
        kept |= {name: getattr(UNFUSED, name) for name in ("glu_layout", "glu_alpha", "glu_beta", "glu_limit")}
    elif case.activation != "swiglu":
        kept["glu_alpha"] = 1.0
    case = replace(case, fused=replace(fused, **kept))
    if case.gated:
        case = replace(case, n=case.n - case.n % 2, dims=tuple((m, n - n % 2, k) for m, n, k in case.dims))
        if case.fused.rows is None and case.beta:
            case = replace(case, beta=0.0, c_dtype="", alias=False, c=PLAIN)
    return case


def random_case(seed: int, limits: Limits = Limits()) -> Case:
    """Draw the case of a seed, at a fraction of the cost of hypothesis.

    Args:
        seed: Another seed, another case; the same seed and limits, the same case.
        limits: What may be drawn.

    Returns:
        A legal case within the limits.

    Example:
        >>> random_case(3) == random_case(3)
        True
    """
    return draw_case(Random(seed), limits)


def cases(limits: Limits = Limits()) -> SearchStrategy[Case]:
    """A hypothesis strategy of cases, which shrinks what a property test finds.

    Args:
        limits: What may be drawn.

    Returns:
        A strategy of cases.

    Example:
        >>> from hypothesis import given
        >>> @given(case=cases(Limits(work=4096)))
        ... def test_mine(case):
        ...     assert check_case(case, "mine").ok
    """
    from hypothesis import strategies as st

    return st.randoms(use_true_random=False).map(lambda ch: draw_case(ch, limits))


def redrawn(kind: Case, ch: Random, limits: Limits) -> Case:
    """Other sizes, values and offsets of the same kind: same form, dtypes, layouts and epilogue.

    Compiled kernels are keyed by the kind, so a campaign that draws several problems of each spends
    its time on running rather than on compiling.
    """
    sizes = structure(ch, replace(limits, forms=(kind.form,)))
    keep: dict[str, Any] = {name: sizes[name] for name in ("m", "n", "k", "lengths", "dims", "tail") if name in sizes}
    if kind.kind == "offsets" and "head" in sizes:
        keep["head"] = ch.choice((0, 0, 1, 3, 9))
    modes = _modes_like(kind, limits)
    case = replace(kind, **keep, mode=ch.choice(modes) if len(modes) > 1 else kind.mode, seed=ch.randint(0, 2**31 - 1))
    given = [name for name in INDICES if getattr(kind.fused, name).given]
    rows: dict[str, Any] = {name: replace(getattr(kind.fused, name), rows=ch.randint(0, 29)) for name in given}
    case = replace(case, fused=replace(kind.fused, **rows))
    return settled(stretched(ch, deepened(ch, case, limits), limits), limits)


def _modes_like(kind: Case, limits: Limits) -> list[str]:
    """The value modes that the epilogue, the layouts and the scales of a kind allow."""
    if kind.dtype == "int8" or kind.mode in ("bitmask", "special", "edges"):
        return [kind.mode]
    every = QUANTISED_MODES if kind.quantised else limits.modes
    if kind.is_fused:
        every = FUSED_MODES
    alike = [m for m in every if (m in WHOLE) == (kind.mode in WHOLE) and m not in ("bitmask", "special", "edges")]
    return [m for m in alike if m not in DISTINCT] if kind.a.zero or kind.b.zero else alike


def _pairs(case: Case) -> set[tuple[str, str]]:
    """Pairs of what a compiled kernel may depend on: form, dtypes, layouts, epilogue."""
    traits = [
        name
        for name in classes(case)
        if not name.startswith(("odd:", "zero:", "empty:", "groups:", "long:", "stretched:", "mode:"))
    ]
    traits += [f"result:{case.result_dtype}", f"sides:{case.a.order}{case.b.order}"]
    if case.dtype == "int8" or case.mode in ("bitmask", "special"):
        traits.append(f"mode:{case.mode}")
    return {(x, y) for x in traits for y in traits if x <= y}


def kinds(limits: Limits, count: int, seed: int = 0) -> list[Case]:
    """`count` cases: the plainest of each form first, then those that show every required class where there is room for
    them, then those that together show as many pairs of traits as a greedy choice can find.

    Sizes and values are to be drawn anew with `redrawn`: a campaign over a fixed set of kinds compiles
    each kernel once and then spends its time on running. Where one problem in 1 is quantised, or else fused, all are.
    """
    for kind in ("quantised", "fused"):
        if getattr(limits, kind) == 1:
            return _kinds_of(limits, kind, count, seed)
    first = plain_kinds(limits)[: count // 4]
    if show_every_class(limits, count, seed):
        first += covering(limits, seed)
    for kind in ("quantised", "fused"):
        wanted = count // getattr(limits, kind) if getattr(limits, kind) else 0
        there = sum(case.quantised if kind == "quantised" else case.is_fused for case in first)
        first += _kinds_of(limits, kind, max(0, min(wanted - there, count - len(first))), seed)
    left = count - len(first)
    pool = _pool(replace(limits, quantised=0, fused=0), seed, max(POOL, 12 * count))
    pool = tuple(case for case in pool if case not in first)
    fast = [case for case in pool if case.aligned and case.dtype in HALVES and not case.dtype_b]
    found = list(islice(most_new_first(fast, _pairs), left // 3))
    rest = [case for case in pool if case not in found]
    return [*first, *found, *islice(most_new_first(rest, _pairs), left - len(found))]


def _kinds_of(limits: Limits, kind: str, count: int, seed: int) -> list[Case]:
    """Quantised or fused cases that together show as many of the required classes, and of the scales of each form, as a
    greedy choice can find; every other one has the operands of `for_copy_engine`."""
    wanted = required(limits) - REQUIRED

    def traits_of(case: Case) -> Set[Any]:
        return classes(case) & wanted | {(case.form, case.scale_a.covers, case.scale_b.covers)}

    halves = tuple(dtype for dtype in limits.dtypes if dtype in HALVES)
    drawn = _pool_of(replace(limits, dtypes=halves or limits.dtypes), kind, seed)
    fast = [for_copy_engine(case, limits) for case in drawn if case.quantised or case.dtype in HALVES]
    pools = [pool for pool in (_pool_of(limits, kind, seed + SMALL_POOL), fast) if pool]
    in_turn = zip(*(most_new_first(pool, traits_of) for pool in pools))
    return list(islice(chain.from_iterable(in_turn), count))


def for_copy_engine(case: Case, limits: Limits) -> Case:
    """A quantised or 16-bit case with operands that Hopper's copy engine reads, results as layers have them, and scales
    as recipes have them."""
    orders, more = (case.a.order, case.b.order), dict[str, Any]()
    if case.form == "jagged_k":
        orders = "col", "row"
    elif case.quantised:
        orders = "row", "col"
    a, b = (Layout(order, pad=-32) for order in orders)
    if not case.quantised:
        more = {name: getattr(case, name) and case.dtype for name in ("c_dtype", "bias_dtype")}
        more |= {"dtype_b": "", "out_dtype": ""}
    elif case.weights:
        more = {"scale_b": replace(case.scale_b, dtype="float32")}
    else:
        of_tokens, of_weights = FLOAT8_RECIPES[case.seed % len(FLOAT8_RECIPES)]
        tokens, weights = ("b", "a") if case.form == "jagged_n" else ("a", "b")
        more = {f"scale_{tokens}": Scale(of_tokens), f"scale_{weights}": Scale(of_weights)}
    case = replace(case, a=a, b=b, out=PLAIN, alias=False, batch_invariant=False, **more)
    return settled(case, limits)


@lru_cache(maxsize=8)
def _pool(limits: Limits, seed: int, count: int) -> tuple[Case, ...]:
    return tuple(random_case(seed + i, limits) for i in range(count))


def _pool_of(limits: Limits, kind: str, seed: int) -> tuple[Case, ...]:
    others: dict[str, Any] = {"quantised": 0, "fused": 0} | {kind: 1}
    return _pool(replace(limits, **others), seed, SMALL_POOL)


@lru_cache(maxsize=8)
def covering(limits: Limits, seed: int = 0) -> tuple[Case, ...]:
    """A few cases that together show every required class within these limits, the most productive first."""
    pool = list(_pool(replace(limits, quantised=0, fused=0), seed, POOL))
    for kind in ("quantised", "fused"):
        pool += _pool_of(limits, kind, seed) if getattr(limits, kind) else ()
    wanted = required(limits)
    return tuple(most_new_first(pool, lambda case: classes(case) & wanted, again=False))


def show_every_class(limits: Limits, count: int, seed: int = 0) -> bool:
    """Whether so many kinds have room for those that show every required class, and not all are quantised or fused."""
    if 1 in (limits.quantised, limits.fused):
        return False
    return len(plain_kinds(limits)[: count // 4]) + len(covering(limits, seed)) <= count


def plain_kinds(limits: Limits) -> list[Case]:
    """The most common problems: 16-bit floats without an epilogue, laid out as fast kernels need them."""
    found = []
    for dtype, order, mode in (("bfloat16", "row", "int"), ("float16", "col", "normal")):
        for form in limits.forms if dtype in limits.dtypes else ():
            a, b = (Layout("col"), PLAIN) if form == "jagged_k" else (PLAIN, Layout(order))
            sizes = {"dims": ((16, 16, 16),)} if form == "per_group" else {"m": 16, "n": 16, "k": 16, "lengths": (16,)}
            case = Case(form=form, dtype=dtype, mode=mode, aligned=True, a=a, b=b, **sizes)
            found.append(legal(case))
    return found


def _divisible_like(new: int, old: int) -> int:
    """The nearest larger extent that is divisible by the same powers of two, up to 16, as the old one."""
    if not new or not old:
        return new
    low = min(old & -old, 16)
    return -(-new // 16) * 16 if low == 16 else new // (2 * low) * 2 * low + low


def keep_divisibility(kind: Case, case: Case) -> Case:
    """The case with shared extents as divisible as the kind's, because compiled kernels depend on alignment."""
    if case.form == "per_group" or kind.form != case.form:
        return case
    changed: dict[str, Any] = {name: _divisible_like(getattr(case, name), getattr(kind, name))
                               for name in "mnk" if name != case.jagged}  # fmt: skip
    if case.form == "masked":
        changed["lengths"] = tuple(min(length, changed["m"]) for length in case.lengths)
    return replace(case, **changed)


def most_new_first(
    items: Iterable[T],
    traits_of: Callable[[T], Set[Any]],
    worth: Callable[[T, Set[Any]], Any] = lambda _, new: len(new),
    *,
    again: bool = True,
) -> Iterator[T]:
    """Orders items so that each has the most traits that no earlier item has.

    Args:
        items: What is to be ordered; among equals the first one comes first.
        traits_of: The traits of an item.
        worth: What an item and its new traits are worth, where not each trait counts 1.
        again: Whether all traits count as new again once nothing new is left; otherwise that is the end.

    Yields:
        The items, each at most once.

    Example:
        >>> list(most_new_first(["ab", "abc", "d"], set))
        ['abc', 'd', 'ab']
    """
    rest, seen = [(item, traits_of(item)) for item in items], set[Any]()
    while rest:
        at = max(range(len(rest)), key=lambda i: worth(rest[i][0], rest[i][1] - seen))
        item, traits = rest[at]
        if seen and traits <= seen:
            if not again:
                return
            seen.clear()
            continue
        del rest[at]
        seen |= traits
        yield item


REQUIRED = frozenset(
    {f"form:{form}" for form in FORMS}
    | {f"dtype:{dtype}" for dtype in DTYPES}
    | {f"mode:{mode}" for mode in FLOAT_MODES}
    | {f"act:{act}" for act in (None, *ACTIVATIONS)}
    | {f"{side}:{kind}" for side in ("a", "b", "out") for kind in ("row", "col", "shifted", "stepped")}
    | {f"{side}:{kind}" for side in ("a", "b", "out") for kind in ("padded", "lined")}
    | {f"{side}:zero-{direction}" for side in "ab" for direction in "grc"}
    | {"out:own"}
    | {f"groups:{word}" for word in ("none", "one", "few", "many")}
    | {f"{word}:{name}" for word in ("zero", "odd", "stretched") for name in "mnk"}
    | {"empty:some", "empty:all", "head", "tail", "shared", "alias", "mixed", "tf32", "beta", "alpha:zero", "alpha:any",
       "wider out", "bias:n", "bias:gn", "index:int32", "index:int64", "where:list", "where:host", "where:device",
       "kind:offsets", "kind:sizes", "kind:ends", "aligned", "batch invariant"}
)  # fmt: skip
"""Classes that a campaign over everything must have met; see multigemm.testing.case.classes."""
REQUIRED_QUANTISED = frozenset(
    {"quantised", "zero point", "fast", "format:float8"}
    | {f"format:{name}" for name in WEIGHTS}
    | {f"scale_b:{covers or 'none'}" for covers in COVERS}
    | {f"scale dtype:{dtype}" for dtype in ("float32", "float8_e8m0fnu")}
)
"""Classes that it must have met beside them where quantised operands are drawn."""
REQUIRED_FUSED = frozenset(
    {f"fused:{form}" for form in FORMS}
    | {f"act:{gate}" for gate in GATES}
    | {f"glu_layout:{layout}" for layout in GLU_LAYOUTS}
    | {f"{name}:{how}" for name in INDICES for how in ("honest", "lies")}
    | {f"rows index:{place}" for place in ("int32", "int64", "host")}
    | {"glu_alpha", "glu_beta", "glu_limit", "weights", "row_scale", "preact_out"}
)
"""Classes that it must have met beside them where fused problems are drawn."""


def required(limits: Limits) -> frozenset[str]:
    """The classes that a campaign over every form and dtype must meet within these limits."""
    long = REQUIRED if limits.longest >= 300 else {name for name in REQUIRED if not name.startswith("stretched:")}
    more = (REQUIRED_QUANTISED if limits.quantised else frozenset()) | (REQUIRED_FUSED if limits.fused else frozenset())
    return more | long
