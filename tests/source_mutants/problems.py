"""The problems that mutants meet: sizes at the edges of a config's tiles, which separate a right kernel from one that
is off by one.

A kernel's behaviour changes where an extent passes a multiple of its tile, where K passes a multiple of the ring's
depth, and where groups are more than one pass of a schedule counts. Ordinary problems of a campaign are smaller than
one tile of a fast kernel; these are a few tiles in one direction at a time, so that the reference can still afford
them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

from multigemm.problem.arrays import dtype_name
from multigemm.testing.case import Case, Layout
from multigemm.testing.strategies import (
    Limits,
    draw_case,
    draw_layout,
    factors,
    keep_divisibility,
    kinds,
    legal,
    plain_kinds,
    random_case,
    redrawn,
    settled,
)

SPAN = 96
"""Problems that are drawn for a burst: of those that need what is compiled already it takes the first."""
VERY_MANY_BURSTS = (2, 3, 4, 7, 10, 11, 14)
"""Bursts that begin with 66,000 groups, which take a second or two."""
KINDS, POOL = 60, 300
"""Kinds, and random problems beside them, to choose compiled variants from."""
WORK, TALL_WORK = 1 << 21, 1 << 22
"""Multiply-adds that a few tiles of a fast kernel need, and that more than a band of tiles needs."""
LONG = 260
"""Rows of a group that arithmetic bounds and not memory: kernels may treat it in another way than short ones."""
TALL = 5
"""The style of sizes that needs TALL_WORK."""
OFFSETS = (-9, -8, -7, -1, 0, 0, 0, 1, 2, 3, 7, 8, 9, 16)
COUNTS = (16, 17, 31, 32, 33, 64, 130, 256, 257, 300, 513, 960, 961, 1025)


@dataclass(frozen=True, slots=True)
class Tile:
    """What one tile of a config covers, in a direction of the result as in the other where kernels may
    exchange their sides; `depth` blocks of `k` are in flight."""

    m: int
    n: int
    k: int
    depth: int


def tile_of(config: Any) -> Tile:
    """The tile of any backend's config, by the names that they have in common; a guess where it has none."""

    def named(names: tuple[str, ...], default: int) -> int:
        return next((value for name in names if (value := getattr(config, name, 0))), default)

    side = named(("tile",), 0)
    m = named(("block_m", "bm", "n_max", "rows"), side or 64)
    n = named(("block_n", "bn"), side if side and not getattr(config, "rows", 0) else 128 * named(("cluster",), 1))
    return Tile(m, n, named(("block_k", "bk"), 64), named(("stages",), 3))


def _near(ch: Random, unit: int, counts: tuple[int, ...]) -> int:
    """A few units and a little more or less."""
    return max(0, unit * ch.choice(counts) + ch.choice((*OFFSETS, unit // 2)))


def _extents(ch: Random, tile: Tile, style: int) -> dict[str, int]:
    """One direction is long: through the ring of K, across, down, or none of them; or more than a band of tiles
    down and some across."""
    few, many = (0, 1, 1, 2), (2, 3, 4, 5, 9, 10, 17, 20)
    m, n = (tile.m, tile.n) if ch.randint(0, 1) else (tile.n, tile.m)
    shallow = ch.choice((0, 1, 2, 3, 7, 8, 9, 16, 17, tile.k, tile.k))
    if style == TALL:
        tall = {"m": _near(ch, m, (8, 9, 10)), "n": n * ch.choice((1, 2)) + ch.choice((0, 0, -1, 1, 9)), "k": 1}
        return tall if ch.randint(0, 2) else {"m": tall["n"], "n": tall["m"], "k": tall["k"]}
    if style == 0:
        deep = tuple(range(tile.depth - 1, 3 * tile.depth + 2))
        thin = ch.choice((1, 7, 8, 9, 16, 24))  # or k would be cut to what is affordable
        return {"m": _near(ch, m, (0, 1)), "n": thin, "k": _near(ch, tile.k, deep)}
    if style == 1:
        return {"m": _near(ch, m, (0, 1)), "n": _near(ch, n, many), "k": shallow}
    if style == 2:
        return {"m": _near(ch, m, many), "n": _near(ch, n, (0, 1)), "k": shallow}
    if style == 3:
        return {"m": _near(ch, m, few), "n": _near(ch, n, few), "k": _near(ch, tile.k, (0, 1, 2))}
    return {"m": ch.choice((1, 2, 5, 8, 9, 17)), "n": ch.choice((1, 2, 8, 9, 17, 40)), "k": ch.choice((0, 1, 8, 9, 33))}


def _lengths(ch: Random, longest: int, limits: Limits, most: int = 6) -> tuple[int, ...]:
    """The jagged extent cut into groups: even, with a remainder, with empty ones, all in one; or very many, of which
    a few may be long."""
    style = ch.randint(0, most)
    if style == 6:
        short = [
            ch.choice((0, 1, 1, 2)) for _ in range(ch.choice([count for count in COUNTS if count <= limits.groups]))
        ]
        for _ in range(ch.choice((1, 1, 2, 3))):
            short[ch.randint(0, len(short) - 1)] = max(longest, LONG) if limits.work >= WORK else longest
        return tuple(short)
    if style == 5:
        count = ch.choice([count for count in COUNTS if count <= limits.groups])
        each, rarely = ch.choice((0, 1, 1, 2, max(1, longest // 64))), limits.work < WORK  # each group may cost a tile
        if not ch.randint(0, 2):  # no group may have a tile more than it needs
            return (each,) * count
        sizes = (0,) * 40 + (each, each + 1) if rarely else (0, each, each, each + 1)
        return tuple(ch.choice(sizes) for _ in range(count))
    if style == 0:
        return (longest,)
    if style == 1:
        return (0, longest, 0, 0, 1)
    if style == 2:
        return (longest, 1, longest // 2, 0, 8)
    cuts = sorted(ch.randint(0, longest) for _ in range(ch.randint(1, 20)))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, longest], strict=True))


def at_edges(kind: Case, tile: Tile, ch: Random, limits: Limits, *, free: bool = False) -> Case:
    """A problem of a kind whose sizes lie at the edges of tiles; `free`: of any divisibility."""
    few, style = limits.work < WORK, ch.choice((0, 0, 1, 2, 3, 4, TALL))
    sizes = _extents(ch, tile, style)
    if style == 0 and ch.randint(0, 1):
        sizes |= {"m": sizes["n"], "n": sizes["m"]}
    if style == TALL and not few:
        limits = replace(limits, work=TALL_WORK)
    changes: dict[str, Any] = {"seed": ch.randint(0, 2**31 - 1)}
    if kind.compute == torch.float64 and kind.result_dtype.itemsize == 2 and ch.randint(0, 1):
        changes["mode"] = "beside"
    if kind.form == "per_group":
        first = tuple(sizes[name] for name in "mnk")
        rest = [tuple(max(0, size // ch.choice((1, 2, 3, 64)) + ch.choice(OFFSETS)) for size in first)
                for _ in range(ch.choice((0, 1, 2, 4) if few else (0, 1, 2, 4, 15, 16, 32, 140)))]  # fmt: skip
        changes["dims"] = _whole_tiles(ch, tile, limits.work) if ch.randint(0, 3) == 0 else (first, *rest)
    elif kind.jagged:
        changes |= {name: size for name, size in sizes.items() if name != kind.jagged}
        changes["lengths"] = _lengths(ch, sizes[kind.jagged], limits, 2 if style == TALL else 6)
        changes["tail"] = ch.choice((0, 0, 1, 9, 40, 40 if few else 1300))  # more than all warps zero at once
        changes["head"] = ch.choice((0, 0, 1, 9, 40)) if kind.kind == "offsets" else 0
    else:
        many = (1, 2) if style == TALL else (1, 2, 3, 17, 40, 140, 300)
        count = ch.choice((1, 2, 3, 5) if few else many)
        rows = tuple(min(sizes["m"], _near(ch, tile.m, (0, 0, 1, 2))) for _ in range(count))
        changes |= sizes | {"lengths": rows if kind.form == "masked" else (0,) * count}
    case = replace(kind, **changes)
    return settled(case if free else keep_divisibility(kind, case), limits)


def _whole_tiles(ch: Random, tile: Tile, work: int) -> tuple[tuple[int, int, int], ...]:
    """A list whose tiles are all whole, for which some kernels have a way of their own; as many as are affordable."""
    found: list[tuple[int, int, int]] = []
    for _ in range(5):
        m, n = (tile.m, tile.n) if ch.randint(0, 1) else (tile.n, tile.m)
        size = (m * ch.choice((1, 1, 2, 3)), n * ch.choice((1, 1, 2, 9)), tile.k * ch.choice((0, 1, 1, 2, 5)))
        if sum(x * y * max(z, 1) for x, y, z in (*found, size)) <= work:
            found.append(size)
    return tuple(found)


def many_groups(kind: Case, tile: Tile, ch: Random) -> Case:
    """A problem with more or fewer groups than a kernel searches by itself, and mostly with more tiles than a device
    has multiprocessors; a few may be long among many short ones. Of rows, or columns, each group may have as many
    tiles as there is room for, and results are a little wider than a tile."""
    count = ch.choice((40, 120, 200, 257, 300, 960))
    few, more, mixed = (0,) * (count - 2) + (1, 1), (64, 0) * (count // 2), (LONG + 40, *(1,) * (count - 2), LONG + 40)
    lengths = ch.choice(((1,) * count, few, (65,) * min(count, 300), more, mixed, (192,) * 16))
    across = ch.choice((tile.n, tile.n + 9, 2 * tile.n))
    sizes: dict[str, Any] = {"m": across, "n": across, "k": ch.choice((1, 8))}
    if kind.jagged == "k":
        sizes |= {"m": ch.choice((9, 17, tile.m)), "n": ch.choice((9, 16, 40))}
    elif kind.form == "masked":  # every group takes as much memory as the longest
        lengths = tuple(min(length, 65) for length in lengths)
        sizes["m"] = max(lengths)
    case = replace(kind, **sizes, lengths=lengths, head=0, tail=0)
    return settled(keep_divisibility(kind, case), Limits(work=1 << 24, groups=count))


VERY_MANY = 66_000
"""Groups: more than two levels of 256 pivots tell apart."""


def very_many_groups(kind: Case, ch: Random, limits: Limits) -> Case:
    """A problem of a jagged kind with very many groups, of which a few at the edges of a search are not empty."""
    lengths = [0] * VERY_MANY
    for at in (0, 31, 32, 255, 256, 257, 1023, 1024, 4095, 33_333, 65_535, 65_536, VERY_MANY - 1):
        lengths[at] = ch.randint(1, 9)
    sizes: dict[str, Any] = {name: min(getattr(kind, name), 20 if kind.shared else 8) for name in "mnk"}
    return settled(replace(kind, **sizes, lengths=tuple(lengths), head=0, tail=3), limits)


def compiled_problem(backend: str, kind: Case, config: Any, number: int) -> Case:
    """The problem of a number for a compiled variant: at the edges of its config's tiles or ordinary; and, where a
    kernel decides on them at run time, of another form, with another epilogue or none, with other factors."""
    choose, ordinary, case = Random(number), Limits(work=1 << 16), kind
    if backend != "triton":
        case = _other_run_time_traits(case, number, choose, ordinary)
    case = _other_layout(case, kind, number, choose)
    if number % 10 == 6 and case.form in ("jagged_m", "jagged_n"):
        case = replace(case, shared=not case.shared)
    if number % SPAN == 0 and number // SPAN in VERY_MANY_BURSTS and case.form in ("jagged_m", "jagged_n"):
        return very_many_groups(replace(case, shared=True) if backend != "triton" else case, choose, ordinary)
    if number % 8 == 3 and (case.jagged or case.form == "masked"):
        case = many_groups(case, tile_of(config), choose)
    elif number % 5 == 4:
        return keep_divisibility(case, redrawn(case, choose, ordinary))
    else:
        case = at_edges(case, tile_of(config), choose, Limits(work=WORK), free=number % 3 == 1)
    if number % 3 == 0 and case.given and case.c_dtype == dtype_name(case.result_dtype):
        return replace(case, alias=True, c=case.out)  # where a tile that is done twice shows
    return case


def _related(kind: Case, ch: Random, limits: Limits) -> Case:
    """Another problem with the kind's dtypes and the layouts of its operands; its own form and epilogue."""
    if kind.dtype_b or kind.quantised:
        return redrawn(kind, ch, limits)
    other = draw_case(ch, replace(limits, dtypes=(kind.dtype,)))
    kept = {name: getattr(kind, name) for name in ("precision", "a", "b", "aligned")}
    if {other.c_dtype, other.bias_dtype} <= {"", kind.dtype, "float32"} and not other.alias:
        kept["out_dtype"] = kind.out_dtype
    if kind.a.zero or kind.b.zero:
        kept["mode"] = kind.mode
    return settled(replace(other, **kept), limits)


def _other_run_time_traits(case: Case, number: int, choose: Random, limits: Limits) -> Case:
    """The case with what most kernels decide on at run time drawn anew: factors, form, epilogue."""
    case = replace(case, alpha=choose.choice(factors(case)))
    if number % 2:
        case = _related(case, choose, limits)
    if number % 4 == 1:
        return replace(case, beta=0, c_dtype="", alias=False, bias="", activation=None)
    if number % 4 == 2 and case.dtype != "int8":
        own, activation = dtype_name(case.result_dtype), choose.choice((None, "gelu", "gelu_tanh", "silu"))
        return replace(case, beta=0.5, c_dtype=own, alias=False, bias="n", bias_dtype=own, activation=activation)
    return case


def _other_layout(case: Case, kind: Case, number: int, choose: Random) -> Case:
    """The case in another memory layout."""
    if number % 8 in (1, 4):  # a result without gaps
        case = replace(case, out=Layout())
    if number % 8 == 5:  # or two columns apart, or in lines of whole pieces, or by columns
        case = replace(case, given=True, out=Layout(step=2) if number % 16 == 5 else Layout(pad=-16))
    if number % 8 == 6:
        case = replace(case, given=True, out=Layout("col"))
    if number % 6 == 2:  # strides are known at run time only, where the compiler's key does not name them
        case = replace(case, a=draw_layout(choose), b=draw_layout(choose))
    if number % 6 == 4:
        case = replace(case, a=Layout(case.a.order), b=Layout(case.b.order))
    if number % 12 == 8:  # two elements apart, where the compiler takes that for rows
        a, b = (Layout(step=2) if side.order == "row" else side for side in (kind.a, kind.b))
        case = replace(case, a=a, b=b, aligned=False)
    return case


def rare_cases() -> list[Case]:
    """Problems that `compiled_cases` has few of: with more groups than a kernel searches by itself, so that another one
    lists them first, and with weights in lines of odd length."""
    rows_or_columns = [kind for kind in plain_kinds(Limits()) if kind.form in ("jagged_m", "jagged_n", "masked")]
    many = [legal(replace(kind, m=16, n=64, k=64, lengths=(1,) * 304)) for kind in rows_or_columns]
    rows = [case for case in many if case.form == "jagged_m"]
    odd = [replace(case, n=63, b=Layout(), aligned=False) for case in rows]
    odd += [replace(case, k=63, a=Layout(pad=-16), b=Layout("col"), aligned=False) for case in rows]
    few = [replace(case, lengths=(300, 5)) for case in odd]
    return [*many, *few, *odd, *(replace(case, a=Layout("col")) for case in rows)]


def compiled_cases() -> list[Case]:
    """Problems to choose compiled variants from: plain ones, varied ones, and some whose K fills whole blocks."""
    limits = Limits(work=1 << 16, groups=64, quantised=6)
    rest = [random_case(seed, limits) for seed in range(POOL)]
    rich = [
        replace(case, bias="n", bias_dtype=case.dtype)
        for case in rest[1::3]
        if not (case.bias or case.dtype_b or case.dtype == "int8")
    ]
    deep = [replace(case, k=128) for case in rest[::3] if case.form not in ("jagged_k", "per_group") and case.k]
    return [*kinds(limits, KINDS), *rest, *rich, *deep]
