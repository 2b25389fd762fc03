"""The problems of mutants in emulation, and which of them reach a source line.

Emulated kernels run as Python, so a trace tells which lines a problem executes. A pool of problems is traced once over
the unchanged sources: a few tiles of each kind, very many groups, stored failures. Most lines are reached by some of
them only, and time is short.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Iterator, Set
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from random import Random
from types import FrameType
from typing import Any

import torch

from multigemm.planning.staging import staged_spec
from multigemm.problem.arrays import dtype_name
from multigemm.testing import corpus
from multigemm.testing.case import Case, Layout, Scale, classes
from multigemm.testing.oracles import bind
from multigemm.testing.placed_case import DeviceCase
from multigemm.testing.strategies import (
    EMULATED,
    kinds,
    legal,
    most_new_first,
    plain_kinds,
    random_case,
    redrawn,
    settled,
)
from multigemm.testing.subject import Subject
from tests.source_mutants.compiled import Variant
from tests.source_mutants.mutations import ROOT, device_code
from tests.source_mutants.problems import KINDS, Tile, at_edges, very_many_groups
from tests.support.subjects import Adapted

LIMITS = replace(EMULATED, work=1 << 13, groups=600, quantised=6)
TILES = {"triton": Tile(16, 16, 32, 1), "numba": Tile(8, 8, 32, 1)}
"""What emulated kernels get."""
WHOLE_TILES = ("batched", "jagged_k", "jagged_m", "jagged_n")
"""Forms whose products may all be of as many whole tiles."""
MANY = 20
"""Groups above which several programs for each tile take an emulator too long."""
WHOLE_LISTS = (((16, 16, 32), (48, 32, 64), (0, 16, 32), (32, 48, 0)), ((144, 32, 32), (80, 48, 32)))
"""Lists of whole tiles, for which kernels may have a way of their own: a few, and more rows of them than a band."""
CHUNKS = (32, 256)
"""Numbers of groups that a schedule counts at once: as many, and not one less."""
SLOW = 12.0
"""Seconds above which a problem is left to lines that no other one reaches."""
FUSED = 48
"""Fused problems of the pool, which show most of what can be drawn."""
FUSED_SEEDS = 400
"""Seeds that they are chosen from."""
FUSED_LIMITS = replace(EMULATED, work=1 << 12, groups=8, longest=40, fused=1)
FUSED_TURN = 8
"""One random problem in so many is a fused one, where the change is part of other kernels as well."""
HANDLING_SECONDS = 0.5
"""Of a problem, besides its launch."""


def small_tiles(config: Any) -> Any:
    """The same config with the smallest tiles, so that small problems have several in each direction."""
    names = {"block_m", "block_n", "block_k"} & {f.name for f in fields(config)} if is_dataclass(config) else set()
    return replace(config, **{name: 32 if name == "block_k" else 16 for name in names}) if names else config


def shared_tiles(config: Any) -> Any:
    """Small tiles, each the work of several programs where a config knows that; of a few programs in turn, so that
    the parts of different tiles mix although an emulator runs one program after the other."""
    small = small_tiles(config)
    return replace(small, splits=4, programs=3, block_k=16) if hasattr(small, "splits") else small


def single_tiles(config: Any) -> Any:
    """Small tiles, a program for each where a config knows that."""
    small = small_tiles(config)
    return replace(small, programs=0) if hasattr(small, "programs") else small


PLAIN, UNLISTED, SHARED, SINGLE = 0, 3, 4, 5
"""Positions of subjects: small tiles; tiles not listed by the host; several programs for a tile; one for a tile."""


def subjects_of(backend: str) -> list[Subject]:
    """Small tiles, two configs as they are, and small tiles in ways that take very large problems elsewhere."""
    usual = [Adapted(backend, small_tiles), Subject(backend, 1), Subject(backend)]
    return [*usual, *(Adapted(backend, adapt) for adapt in (small_tiles, shared_tiles, single_tiles))]


def choose_listing(backend: str, chosen: int) -> None:
    """Has the host list the tiles of short lists, or leaves them to the kernel as those of very long lists are."""
    if backend == "triton":
        launch = import_module("multigemm.backends.triton.lists")
        vars(launch).setdefault("USUAL_MOST_LISTED", launch.MOST_LISTED)
        vars(launch)["MOST_LISTED"] = 0 if chosen == UNLISTED else launch.USUAL_MOST_LISTED


def stored_cases() -> list[Case]:
    """Stored failures that an emulator gets through, in a fixed order."""
    stored = ROOT / "tests" / "corpus"
    cases = [entry.case for entry in corpus.entries(stored)] if stored.is_dir() else []
    Random(1).shuffle(cases)
    return [case for case in cases if case.work < 20_000 and sum(m * n > 0 for m, n, _ in case.sizes()) < 400]


@cache
def pool(backend: str) -> list[tuple[Case, int]]:
    """The problems, each with the position of its subject."""
    every, tile = kinds(LIMITS, KINDS), TILES[backend]
    edges = [at_edges(kind, tile, Random(i), LIMITS) for i, kind in enumerate(every)]
    shared_b = replace(next(kind for kind in every if kind.form == "jagged_m"), shared=True)  # or many would not fit
    found = [(case, PLAIN) for case in edges] + [(case, i % 3) for i, case in enumerate(stored_cases())]
    if backend == "triton":
        found += _of_triton(edges, shared_b, tile.m)
        found += [(case, i % 3) for i, case in enumerate(fused_cases())]
    found += [(evenly(shared_b, count), PLAIN) for count in CHUNKS]
    found += [(case, PLAIN) for case in scaled_along_k()]
    return [*found, (very_many_groups(shared_b, Random(0), LIMITS), PLAIN)]


def fused_cases() -> list[Case]:
    """Problems with picked rows, gates, weights and sums of rows: most new traits first."""
    cases = [random_case(seed, FUSED_LIMITS) for seed in range(FUSED_SEEDS)]
    return list(most_new_first(cases, classes))[:FUSED]


def scaled_along_k() -> list[Case]:
    """Quantised problems with few rows and columns, and several scales along K, which lie in rows or in columns."""
    plain = Case(n=3, k=300, lengths=(2, 1), mode="uniform", b=Layout("col"))
    found = []
    for layout in (Layout(), Layout("col"), Layout(step=2)):
        scale = Scale("1x128", layout=layout)
        both = replace(plain, dtype="float8_e4m3fn", dtype_b="float8_e4m3fn", scale_a=scale, scale_b=scale)
        weights = replace(plain, dtype="bfloat16", dtype_b="int8", scale_b=scale, zero_b="uint8")
        found += [legal(case) for case in (both, weights)]
    return found


def kernels_meeting(case: Case) -> set[str]:
    """The kernels that a problem can reach; the products of a fused one may be those of the pointer kernel."""
    if case.is_fused:
        return {"fused"}
    return {"quantised"} if case.quantised else {"pointer", "generic"}


def pool_of(backend: str, kernels: Collection[str]) -> list[tuple[Case, int]]:
    """What of the pool can reach one of these kernels."""
    return [(case, chosen) for case, chosen in pool(backend) if kernels_meeting(case) & set(kernels)]


def _of_triton(edges: list[Case], shared_b: Case, side: int) -> list[tuple[Case, int]]:
    """Problems for what Triton's kernels do in several ways: lists of tiles, tiles of several programs."""
    found = [(case, UNLISTED) for case in edges if case.form == "per_group"]
    found += [(replace(kind, dims=dims, a=a, activation=act, alpha=alpha), SINGLE)
              for kind in plain_kinds(LIMITS) if kind.form == "per_group" for dims in WHOLE_LISTS
              for a, act, alpha in ((kind.a, None, 1.0), (Layout("col"), "silu", 2.0))]  # fmt: skip
    found += [(case, SINGLE) for case in edges if case.form in ("jagged_m", "jagged_n", "masked")][:8]
    whole = [case for case in edges if case.form in WHOLE_TILES]
    found += [(tall(case, side), PLAIN) for case in whole[:8]]
    rows_or_columns = [case for case in edges if case.form in ("jagged_m", "jagged_n")][:4]
    most_groups = [(side - 1,) * 18, (1,) * 18, (0,) * 16 + (1, 1)]
    found += [(full_room(case, lengths, side), SHARED) for case in rows_or_columns for lengths in most_groups]
    batches = [case for case in edges if case.form == "batched"][:2]
    found += [(legal(replace(c, m=2 * side, n=2 * side, k=40, lengths=(0,) * 3)), SHARED) for c in batches]
    lying = replace(shared_b, n=8, k=8, lengths=(8,) * 16, head=0, tail=0, where="device")
    found += [(settled(lying, LIMITS), SHARED)]  # sizes that lie claim more tiles than there can be
    found += [(in_place(case, side), chosen) for case in whole[:8] for chosen in (PLAIN, SHARED)]
    few = [(i, case) for i, case in enumerate(edges) if case.groups <= MANY]
    found += [(case, SHARED) for i, case in few if i % 6 == 1 or case.deepest > 64]
    return [*found, *((legal(replace(case, m=2 * side, n=2 * side)), SHARED) for _, case in few if case in whole)]


def tall(kind: Case, side: int) -> Case:
    """A problem of whole tiles: five rows of tiles, which are more than a band, and two columns."""
    return legal(replace(kind, m=5 * side, n=2 * side, k=8, lengths=(5 * side,) if kind.jagged in ("m", "n") else (8,)))


def in_place(kind: Case, side: int) -> Case:
    """A problem of a few tiles that adds to its result: what is done twice, or stored before it is whole, shows."""
    own = dtype_name(kind.result_dtype)
    case = replace(kind, given=True, alias=True, beta=1.0, c_dtype=own, c=kind.out, alpha=1.0, activation=None)
    lengths = (side + 1, side) if kind.jagged else (0,) * 2
    return legal(replace(case, m=side + 1, n=side + 3, k=40, lengths=lengths, head=0, tail=0))


def full_room(kind: Case, lengths: tuple[int, ...], side: int) -> Case:
    """Groups of which each may have as many tiles as there is room for: one too many for any of them counts."""
    return settled(replace(kind, m=side, n=side, k=8, lengths=lengths, head=0, tail=0), LIMITS)


def evenly(kind: Case, count: int) -> Case:
    """A jagged problem of so many groups, two thirds of which have a row."""
    lengths = tuple(min(g % 3, 1) for g in range(count))
    return settled(replace(kind, n=8, k=8, lengths=lengths, head=0, tail=0), replace(LIMITS, groups=count))


@contextmanager
def traced(backend: str) -> Iterator[dict[str, set[int]]]:
    """The lines of a backend's device code that are executed meanwhile, in all threads that begin."""
    found: dict[str, set[int]] = {}
    folder = device_code(backend)
    mark = f"/backends/{folder.relative_to(ROOT / 'backends')}/"

    def lines(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            found.setdefault(frame.f_code.co_filename.rsplit("/", 1)[-1], set()).add(frame.f_lineno)
        return lines

    def calls(frame: FrameType, event: str, argument: Any) -> Any:
        return lines if mark in frame.f_code.co_filename else None

    threading.settrace(calls)
    sys.settrace(calls)
    try:
        yield found
    finally:
        sys.settrace(None)
        threading.settrace(None)


def pool_variants(backend: str) -> list[Variant]:
    """The problems of the pool, of which nothing else is known yet."""
    return [Variant(case.to_dict(), "emulated", str(chosen)) for case, chosen in pool(backend)]


def trace(backend: str, variants: list[Variant], device: torch.device) -> list[Variant]:
    """The variants with the lines that one launch reaches and the seconds that it takes; none where the backend
    refuses the problem."""
    seen, subjects = [], subjects_of(backend)
    for variant in variants:
        choose_listing(backend, int(variant.config))
        subject, device_case = subjects[int(variant.config)], DeviceCase.from_case(Case.from_dict(variant.case), device)
        begin, lines = time.monotonic(), dict[str, set[int]]()
        if not subject.refusals(staged_spec(device_case.problem), device):
            with traced(backend) as lines:
                bind(device_case, subject)[0]()
        reached = {name: sorted(found) for name, found in lines.items()}
        seen.append(replace(variant, lines=reached, seconds=round(time.monotonic() - begin, 2)))
    return seen


def reaching(variants: list[Variant], file: str, line: int) -> list[Variant]:
    """The problems that reach a line, slow ones only where there is no other: those first that show most in least time,
    by their classes and by what of form and groups each subject meets. Groups cost too: a mutant may give each a tile
    that it has not."""
    found = [variant for variant in variants if variant.distance(file, line) == 0]
    quick = [variant for variant in found if variant.seconds < SLOW] or found

    def worth(variant: Variant, new: Set[str]) -> float:
        groups = Case.from_dict(variant.case).groups
        return len(new) / (HANDLING_SECONDS + variant.seconds + groups / 20)

    return list(most_new_first(sorted(quick, key=lambda variant: variant.seconds), _traits, worth))


def _traits(variant: Variant) -> set[str]:
    case = Case.from_dict(variant.case)
    met, subject = classes(case), f"{variant.config} {case.form}"
    return met | {f"{subject} {word}" for word in met if word.startswith(("groups:", "empty:", "alias"))}


def problem(backend: str, kernels: Collection[str], variants: list[Variant], number: int) -> tuple[Case, int]:
    """The problem of a number and the position of its subject: those that reach the line first, then in turn one
    like them with other sizes and a random one. All are such as the changed kernels may take."""
    if number < len(variants):
        return Case.from_dict(variants[number].case), int(variants[number].config)
    if not variants and number < len(offered := pool_of(backend, kernels)):
        return offered[number]
    if set(kernels) == {"fused"} or ("fused" in kernels and number % FUSED_TURN == FUSED_TURN - 2):
        return random_case(FUSED_SEEDS + number, FUSED_LIMITS), number % 3
    choose = Random(number)
    if variants and number % 2:
        kind = Case.from_dict(choose.choice(variants).case)
        if kind.is_fused:
            return redrawn(kind, choose, FUSED_LIMITS), number % 3
        if kind.groups < LIMITS.groups:
            near = at_edges(kind, TILES[backend], choose, LIMITS)
            return near, choose.choice((PLAIN, UNLISTED, SINGLE, SHARED if near.groups <= MANY else PLAIN))
    case = random_case(number, replace(LIMITS, quantised=1) if set(kernels) == {"quantised"} else LIMITS)
    return (at_edges(case, TILES[backend], choose, LIMITS) if number % 3 == 0 else case), number % 3
