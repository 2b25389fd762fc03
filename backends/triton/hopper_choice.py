"""Which configs of the warp-specialised kernel to try for a spec in 16 bits or tf32, the best guess first."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from multigemm.backends.triton.config import STRIP, Config, depth_of, mappable, problem_with, wide_tails_problem
from multigemm.backends.triton.estimates import (
    hopper_us,
    rounds_us,
    shape_of,
    tiles_in,
    typical_columns,
    typical_rows,
)
from multigemm.cuda.device import first_gpu_processors
from multigemm.problem.spec import ProblemSpec

BRIEF_US = 50.0
"""Below this many microseconds programs take so few tiles that drawing them from a counter costs more than it gains."""
UNCOPIED_ROWS = {256: 1024, 128: 256}
"""Rows per group up to which a copy of unaligned weights takes longer than tiles of that height that shift them."""
CHEAP_TO_COPY = 4 << 20
"""Elements of weights up to which a copy of them costs less than the slower products: it never leaves the L2 cache."""
DEEP = 2048
"""From that K on half as many rows again: a tile's end, which the copied way hides better, counts for less."""
WRITTEN_K, WRITTEN_ROUNDS = 128, 20
"""K per group of jagged K, if it is more than one block, up to which writing results takes most of the time, and the
rounds of tiles of 192 x 256 from which those take less of it than 128 x 256: 0.96 to 0.98 (H200, 2026-11-23, six
problems of 22 rounds and more; benchmarks/results/h200/weight-gradients.json). They take 1.02 with 64 of K, 1.00 with
96 and with 192, 1.02 to 1.12 with 256, and 0.99 and more with 512; less than 22 rounds was not measured."""
MANY_TILES = 100
"""Large tiles of a list that keep a GPU busy."""


def hopper_candidates(spec: ProblemSpec) -> list[Config]:
    """Configs of the warp-specialised kernel, the best guess first; empty if it cannot run."""
    if spec.form == "per_group":
        return _lists(spec)
    large = Config("hopper", block_m=192, block_n=256, stages=3, warps=4)
    wide = Config("hopper", block_m=128, block_n=256, stages=4, warps=4)
    tall = Config("hopper", block_m=256, block_n=128, stages=4, warps=4)
    flat = Config("hopper", block_m=128, block_n=128, stages=5, warps=4)
    along = {"a": "row", "b": "col"} if spec.compute == torch.float32 else {"a": spec.a.order, "b": spec.b.order}
    operands = (("a", spec.a), ("b", spec.b))
    pack = tuple(name for name, x in operands if not mappable(x) or x.order != along[name])
    tall = replace(tall, wide_tails="b" not in pack and _has_wide_tails(tall, spec))
    ranked = _brief_first(_ranked(spec, large, wide, tall, flat), spec)
    if "b" in pack:
        idle = spec.form == "jagged_m" and tiles_in(tall, spec) < first_gpu_processors()
        ranked = (flat, wide, tall) if idle else _narrow_first(ranked, spec)
    found = [replace(config, pack=pack, block_k=depth_of(spec)) for config in ranked]
    if "b" in pack:
        uncopied = _uncopied(spec, tall, flat, tuple(name for name in pack if name == "a"))
        found = [*uncopied, *found] if _few(uncopied, spec) else [*found, *uncopied[:1]]
    found = [config for config in found if not problem_with(config, spec)]
    return ordered(found, spec) if found else []


def _mostly_written(large: Config, spec: ProblemSpec) -> bool:
    """Whether the time is that of writing many tiles: plain results of 16 bits in rows, of a jagged K that is short."""
    plain = spec.c is None and spec.bias is None and spec.activation is None and spec.out.order == "row"
    whole = all(mappable(x) and x.dtype.itemsize == 2 for x in (spec.a, spec.b, spec.out))
    short = spec.form == "jagged_k" and large.block_k < shape_of(spec).deep <= WRITTEN_K
    return plain and whole and short and tiles_in(large, spec) >= WRITTEN_ROUNDS * first_gpu_processors()


def _ranked(spec: ProblemSpec, large: Config, wide: Config, tall: Config, flat: Config) -> tuple[Config, ...]:
    """The order of configs by rows per group, as measured on an H100 (docs/notes/triton-tuning.md)."""
    rows = shape_of(spec).rows
    if shape_of(spec).columns <= 128:
        return tall, flat
    if _mostly_written(large, spec):
        return large, wide, tall, flat
    if spec.form == "jagged_k" or (384 < rows <= 1536 and not tall.wide_tails):
        return wide, large, tall, flat
    if 32 < rows <= 1536:
        return tall, wide, large, flat
    return large, wide, tall, flat


def _has_wide_tails(tall: Config, spec: ProblemSpec) -> bool:
    """Whether tiles of 256 x 128 have tails of 256 columns: if those waste less than an eighth of them, and if groups
    have more rows than a strip or K is not short (docs/notes/triton-tuning.md)."""
    shape = shape_of(spec)
    if wide_tails_problem(tall, spec) or _mostly_padding(shape.columns):
        return False
    return shape.rows > STRIP or shape.deep >= DEEP


def _mostly_padding(columns: int) -> bool:
    """Whether tiles of 256 columns would be empty by an eighth or more, and those of 128 would not."""
    return -(-columns // 256) * 256 >= 1.125 * (-(-columns // 128) * 128)


def _narrow_first(ranked: tuple[Config, ...], spec: ProblemSpec) -> tuple[Config, ...]:
    """Puts tiles of 128 columns first if tiles of 256 would be empty by an eighth or more."""
    if not _mostly_padding(shape_of(spec).columns):
        return ranked
    return tuple(sorted(ranked, key=lambda config: config.block_n))


def _brief_first(ranked: tuple[Config, ...], spec: ProblemSpec) -> tuple[Config, ...]:
    """Puts small tiles first if programs take few tiles each: an incomplete last round then costs more than a large
    tile gains."""
    if tiles_in(ranked[0], spec) > 4 * first_gpu_processors():
        return ranked
    brief = min(ranked, key=lambda config: rounds_us(config, spec))
    if rounds_us(brief, spec) > 0.95 * rounds_us(ranked[0], spec):
        return ranked
    return brief, *(config for config in ranked if config is not brief)


def _uncopied(spec: ProblemSpec, tall: Config, flat: Config, pack: tuple[str, ...]) -> list[Config]:
    """Configs that pass unaligned weights through registers. The tall tile reads them less often; the low one takes
    three quarters of the time for half of the rows, which helps if one round of low tiles is enough."""
    tiles = (tall, replace(flat, stages=6))
    if tiles_in(tall, spec) < first_gpu_processors() and tiles_in(flat, spec) <= first_gpu_processors():
        tiles = tiles[::-1]
    found = [replace(config, shift_b=True, wide_tails=False, pack=pack, block_k=depth_of(spec)) for config in tiles]
    return [config for config in found if not problem_with(config, spec)]


def _few(uncopied: list[Config], spec: ProblemSpec) -> bool:
    """Whether groups have so few rows that shifting their weights in every tile is cheaper than copying them once."""
    shape = shape_of(spec)
    if not uncopied or shape.groups * shape.columns * shape.deep <= CHEAP_TO_COPY:
        return False
    limit = UNCOPIED_ROWS[max(config.block_m for config in uncopied)]
    return shape.rows <= (limit * 3 // 2 if shape.deep >= DEEP else limit)


def ordered(found: list[Config], spec: ProblemSpec) -> list[Config]:
    """Tiles dealt out in turn if the work is brief, else drawn; the best guess also in the other order."""
    orders: tuple[Literal["dealt", "drawn"], ...] = ("dealt", "drawn")
    usual, other = orders if hopper_us(found[0], spec) < BRIEF_US else orders[::-1]
    return [*(replace(config, order=usual) for config in found), replace(found[0], order=other)]


def _lists(spec: ProblemSpec) -> list[Config]:
    """Tiles for lists: large ones if they fill a GPU, dealt out in turn if that takes several rounds; else small
    ones."""
    wide = Config("hopper", block_m=128, block_n=256, stages=4, warps=4, width=4, programs=0, order="dealt")
    low = replace(wide, block_m=64, block_n=128)
    flat = replace(wide, block_n=128, stages=6)
    dealt = replace(wide, programs=1)
    found = [low, wide, flat, dealt]
    if _fills(wide, spec):
        found = (
            [dealt, wide, low, flat] if tiles_in(wide, spec) >= 3 * first_gpu_processors() else [wide, dealt, low, flat]
        )
    return [config for config in found if not problem_with(config, spec)]


def _fills(wide: Config, spec: ProblemSpec) -> bool:
    """Whether a list has enough large tiles, and enough columns for them. Unequal products leave a last round half
    empty."""
    enough = MANY_TILES if spec.largest <= typical_rows(spec) else 2 * MANY_TILES
    columns = typical_columns(spec)
    return tiles_in(wide, spec) >= enough and 4 * columns >= 3 * wide.block_n * -(-columns // wide.block_n)


def maps_first(spec: ProblemSpec, best: Config) -> bool:
    """Whether to use tensor maps: for lists that large tiles fill, or small tiles of a few groups. With fewer tiles,
    reading the maps takes longer than the work."""
    some = MANY_TILES <= tiles_in(best, spec) <= 2 * first_gpu_processors() and spec.groups <= 8
    return best.block_m > 64 or some
