"""Draws cases: structure only, with the unaligned and the empty as the rule.

One description serves two masters. `cases()` is a hypothesis strategy, so that a property test
shrinks what it finds; `random_case` draws the same from a seed at a fraction of the cost, for
campaigns of a hundred thousand. Both go through `draw_case` and a `Chooser`.

Sizes are never rounded to what kernels like: a published evaluation that did so reported 96.7 % bit
equality where unrestricted sizes gave 17.8 %.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from multigemm.problem.spec import ACTIVATIONS, FORMS, Form
from multigemm.testing.case import Case, Layout, align, fit

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

DTYPES = ("bfloat16", "float16", "float32", "float64", "int8")
DISTINCT = ("onehot", "bitmask", "precise", "cancel", "beside")
"""Modes that need distinct rows and columns, so no zero strides."""
WHOLE = ("int", "ties", "onehot", "precise", "beside")
"""Modes of whole numbers."""
EDGES = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
COUNTS = (1, 2, 15, 16, 17)
MANY = (255, 256, 257, 1023, 1024, 1025)
FLOAT_MODES = ("int", "ties", "onehot", "bitmask", "normal", "uniform", "cancel", "pow2", "special", "rowscaled",
               "precise", "tiny", "beside")  # fmt: skip


class Chooser(Protocol):
    """The two questions that a drawing asks."""

    def integer(self, low: int, high: int) -> int: ...

    def choice(self, options: Sequence[T]) -> T: ...


class RandomChooser:
    """Answers from a seeded generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def choice(self, options: Sequence[T]) -> T:
        return options[self._random.randrange(len(options))]


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be drawn. `work` bounds the multiply-adds, `groups` the number of groups."""

    work: int = 1 << 20
    groups: int = 1025
    forms: tuple[Form, ...] = FORMS
    dtypes: tuple[str, ...] = DTYPES
    modes: tuple[str, ...] = FLOAT_MODES
    longest: int = 300


EMULATED = Limits(work=1 << 14, groups=40, longest=80)
"""For kernels that run in an interpreter on a CPU."""


def _extent(ch: Chooser, limits: Limits) -> int:
    if ch.integer(0, 2) == 0:
        return ch.integer(0, limits.longest)
    return ch.choice([e for e in EDGES if e <= limits.longest])


def _inner(ch: Chooser, limits: Limits) -> int:
    """K: rarely zero, sometimes long."""
    if ch.integer(0, 15) == 0 and limits.longest >= 300:
        return ch.choice((512, 1000, 1024, 2000))
    k = _extent(ch, limits)
    return k if k or ch.integer(0, 3) == 0 else 1 + ch.integer(0, 40)


def _lengths(ch: Chooser, limits: Limits) -> tuple[int, ...]:
    """Group sizes: edges, cuts with replacement, one takes all, mostly empty, very many."""
    style = ch.integer(0, 9)
    if style <= 3:
        return tuple(_extent(ch, limits) for _ in range(ch.integer(0, 8)))
    if style <= 6:
        total = ch.integer(0, 2 * limits.longest)
        cuts = sorted(ch.integer(0, total) for _ in range(ch.integer(0, 12)))
        return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
    count = min(ch.choice(MANY if ch.integer(0, 3) == 0 else COUNTS), limits.groups)
    if style == 7:
        lengths = [0] * count
        lengths[ch.integer(0, count - 1)] = _extent(ch, limits)
        return tuple(lengths)
    if style == 8:
        return tuple(ch.choice((0, 0, 0, 1, 2, 7)) for _ in range(min(count, 64)))
    return (ch.choice((0, 1, 1, 2)),) * count


def draw_layout(ch: Chooser, *, written: bool = False, spacious: bool = True) -> Layout:
    order = ch.choice(("row", "row", "col"))
    if ch.integer(0, 3) == 0:
        return Layout(order)
    step = 2 if spacious and ch.integer(0, 9) == 0 else 1
    zero = "" if written or ch.integer(0, 11) else ch.choice(("g", "r", "c"))
    return Layout(order, ch.choice((0, 1, 3, 7, 8, 16, -16)), ch.choice((0, 0, 1, 2, 3, 4, 7, 8)), step, zero)


def _dtypes(ch: Chooser, limits: Limits) -> dict[str, Any]:
    dtype = ch.choice(limits.dtypes)
    if dtype == "int8":
        return {"dtype": dtype}
    floats = [d for d in limits.dtypes if d != "int8"]
    other = ch.choice(floats) if ch.integer(0, 9) == 0 else dtype
    out = ch.choice(("", "", "", "float32", "float16", "bfloat16", "float64"))
    found = {"dtype": dtype, "dtype_b": "" if other == dtype else other, "out_dtype": out}
    if dtype == other == "float32" and ch.integer(0, 3) == 0:
        found["precision"] = "tf32"
    return found


def factors(case: Case) -> tuple[float, ...]:
    """What alpha and beta may be: whole numbers where the sums must stay whole."""
    if case.mode in ("bitmask", "special"):
        return (1.0,)
    whole = case.dtype == "int8" or case.mode in WHOLE
    return (1, 1, 1, 2, -1, 3, 0) if whole else (1.0, 1.0, 0.5, -1.0, 0.3, 1.7, 0.0)


def _epilogue(ch: Chooser, case: Case) -> Case:
    """alpha, beta, c, bias and the activation."""
    from multigemm.testing.case import dtype_name

    numbers = factors(case) if ch.integer(0, 1) else (1.0,)
    extra = ("int32",) if case.dtype == "int8" else (case.dtype, dtype_name(case.result_dtype), "float32")
    beta = ch.choice(numbers) if ch.integer(0, 2) == 0 else 0
    bias = ch.choice(("", "", "n", "gn")) if case.form not in ("jagged_n", "per_group") else ch.choice(("", "", "n"))
    acts = (None, None, "relu") if case.dtype == "int8" else (None, None, None, *ACTIVATIONS)
    return replace(
        case,
        alpha=ch.choice(numbers), beta=beta,
        c_dtype=ch.choice(extra) if beta else "", bias=bias, bias_dtype=ch.choice(extra) if bias else "",
        activation=ch.choice(acts),
    )  # fmt: skip


def _output(ch: Chooser, case: Case) -> Case:
    from multigemm.testing.case import dtype_name

    if ch.integer(0, 1) == 0:
        return case
    case = replace(case, given=True, out=draw_layout(ch, written=True))
    if case.beta and ch.integer(0, 1) == 0:
        return replace(case, alias=True, c_dtype=dtype_name(case.result_dtype), c=case.out)
    return case


def structure(ch: Chooser, limits: Limits) -> dict[str, Any]:
    """Form, sizes and how they are told."""
    form = ch.choice(limits.forms)
    if form == "per_group":
        count = ch.integer(0, 8) if ch.integer(0, 7) else min(ch.choice((33, 65, 257)), limits.groups)
        longest = limits.longest if count <= 8 else 9
        draw: Callable[[], int] = lambda: _extent(ch, limits) if longest == limits.longest else ch.integer(0, longest)  # noqa: E731
        dims = tuple((draw(), draw(), _inner(ch, limits) if count <= 8 else draw()) for _ in range(count))
        return {"form": form, "dims": dims}
    found: dict[str, Any] = {"form": form, "m": _extent(ch, limits), "n": _extent(ch, limits), "k": _inner(ch, limits)}
    if form == "batched":
        return found | {"lengths": (0,) * min(ch.choice((0, 1, 2, 3, 5, 17, 64)), limits.groups)}
    if form == "masked":
        count = min(ch.choice((0, 1, 2, 3, 5, 17, 64)), limits.groups)
        return found | {"lengths": tuple(ch.choice((0, found["m"], ch.integer(0, found["m"]))) for _ in range(count))}
    lengths = _lengths(ch, limits)
    kind = ch.choice(("offsets", "offsets", "sizes", "ends"))
    found |= {"lengths": lengths, "kind": kind, "tail": ch.choice((0, 0, 1, 3, 9))}
    found["head"] = ch.choice((0, 0, 1, 3, 9)) if kind == "offsets" else 0
    found["shared"] = form in ("jagged_m", "jagged_n") and ch.integer(0, 3) == 0
    return found


def draw_case(ch: Chooser, limits: Limits = Limits()) -> Case:
    """One case within the limits."""
    case = Case(**structure(ch, limits), **_dtypes(ch, limits), a=draw_layout(ch), b=draw_layout(ch))
    mode = ch.choice(limits.modes) if case.dtype != "int8" else "int"
    case = replace(case, mode=mode, seed=ch.integer(0, 2**31 - 1), index=ch.choice(("int32", "int64")))
    case = replace(case, where=ch.choice(("device", "device", "list", "host")))
    case = _output(ch, _epilogue(ch, case))
    if case.beta and not case.alias:
        case = replace(case, c=draw_layout(ch))
    found = settled(stretched(ch, replace(case, aligned=ch.integer(0, 4) == 0), limits), limits)
    return replace(found, batch_invariant=ch.integer(0, 5) == 0)


def stretched(ch: Chooser, case: Case, limits: Limits) -> Case:
    """Now and then one extent is so long that counters of 16 bits wrap where the work allows it, the others short."""
    if limits.longest < 300 or ch.integer(0, 23):
        return case
    long = limits.work // ch.choice((4, 4, 16)) + ch.integer(-9, 9)
    m, n, k = (ch.integer(1, 2) for _ in "mnk")
    sizes = {"m": m, "n": n, "k": k} | {ch.choice("mnk"): long}
    if case.form == "per_group":
        return replace(case, dims=((sizes["m"], sizes["n"], sizes["k"]), (2, 3, 1)))
    lengths: tuple[int, ...] = (0,)
    if case.form == "masked":
        lengths = (max(0, sizes["m"] - ch.integer(0, 1)),)
    elif case.jagged:
        length = sizes[case.jagged]
        lengths = ch.choice(((length,), (0, length - 1, 1)))
    return replace(case, m=sizes["m"], n=sizes["n"], k=sizes["k"], lengths=lengths)


def settled(case: Case, limits: Limits) -> Case:
    """Within the limits, legal, and aligned where that was drawn and fits."""
    case = legal(fit(case, limits.work))
    if not case.aligned:
        return case
    even = legal(align(case))
    return even if even.work <= limits.work and even.storage <= 2 * limits.work else replace(case, aligned=False)


def legal(case: Case) -> Case:
    """Settles what cannot go together: dropped extents, zero strides over distinct values, mixed dtypes."""
    changes: dict[str, Any] = {}
    if case.jagged:
        changes[case.jagged] = 0
    if case.form == "per_group":
        changes |= {"m": 0, "n": 0, "k": 0}
    if case.compute.is_floating_point and case.precision == "tf32" and case.dtype != "float32":
        changes["precision"] = "ieee"
    if case.mode in DISTINCT:
        changes |= {"a": replace(case.a, zero=""), "b": replace(case.b, zero="")}
    return replace(case, **changes)


def random_case(seed: int, limits: Limits = Limits()) -> Case:
    """The case of a seed."""
    return draw_case(RandomChooser(seed), limits)


def cases(limits: Limits = Limits()) -> SearchStrategy[Case]:
    """The same as a hypothesis strategy."""
    from hypothesis import strategies as st

    class Drawing:
        def __init__(self, draw: Any) -> None:
            self._draw = draw

        def integer(self, low: int, high: int) -> int:
            return int(self._draw(st.integers(low, high)))

        def choice(self, options: Sequence[T]) -> T:
            found: T = self._draw(st.sampled_from(list(options)))
            return found

    @st.composite
    def strategy(draw: Any) -> Case:
        return draw_case(Drawing(draw), limits)

    return strategy()


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
