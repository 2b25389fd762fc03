"""Which configs to try for a spec, the best guess first: what measurements on an H100 support.

Nothing here depends on a token count beyond the buckets that a spec carries. docs/triton-tuning.md has
the numbers behind the order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from multigemm.backends.triton.config import Config, depth_of, is_tf32, mappable, problem_with
from multigemm.backends.triton.estimate import (
    pointer_us,
    ring_us,
    rounds_us,
    shape_of,
    shared_out,
    tiles_in,
    typical_columns,
    typical_rows,
)
from multigemm.backends.triton.wide_tiles import sixty_four_bit, thirty_two_bit
from multigemm.cuda.device import FITTED_PROCESSORS as PROCESSORS
from multigemm.problem.spec import ProblemSpec

BRIEF_US = 50.0
"""Below that, programs take so few tiles that the balance of drawing them from a counter is not worth its end."""
UNCOPIED_ROWS = {256: 1024, 128: 256}
"""Rows per group up to which a copy of unaligned weights takes longer than tiles of that height that shift them."""
CHEAP_TO_COPY = 4 << 20
"""Elements of weights up to which a copy of them costs less than the slower products: it never leaves the L2 cache."""
DEEP = 2048
"""From that K on half as many rows again: a tile's end, which the copied way hides better, counts for less."""

MANY_TILES = 100
"""Large tiles of a list that keep a GPU busy."""


def _pow2(value: int, low: int, high: int) -> int:
    return max(low, min(high, 1 << max(0, value - 1).bit_length()))


def _sixteen_bit(spec: ProblemSpec) -> list[Config]:
    rows, columns = typical_rows(spec), typical_columns(spec)
    # lists of many small products fill a GPU with larger tiles
    tiny = rows * columns <= 160 * 160 and not (spec.form == "per_group" and min(rows, columns) >= 64)
    if tiny or spec.groups * rows * columns <= PROCESSORS * 32 * 32:
        small = Config(block_m=32, block_n=32, block_k=64, warps=4, stages=3, programs=0)
        if shape_of(spec).deep > 512:
            small = replace(small, block_k=128, stages=4)
        return [small, replace(small, block_m=64), replace(small, block_n=64), replace(small, block_m=16, block_n=64)]
    if rows <= 32:
        thin = Config(block_m=_pow2(rows, 16, 32), block_n=128, block_k=64, warps=4, stages=5, programs=2)
        return [thin, replace(thin, block_n=64, stages=6, programs=3), replace(thin, block_k=128, stages=3)]
    big = Config(block_m=128, block_n=128, block_k=64, warps=8, stages=3, programs=2)
    mid = Config(block_m=128, block_n=64, block_k=64, warps=4, stages=4, programs=3)
    low = Config(block_m=64, block_n=128, block_k=64, warps=4, stages=4, programs=2)
    if heavy(spec):
        low = replace(low, block_k=32)
        return [replace(low, warps=8), replace(low, block_n=64, warps=8)]
    if spec.form == "per_group":
        square = Config(block_m=64, block_n=64, block_k=64, warps=4, stages=4, width=4, programs=0)
        wide = replace(big, stages=5, programs=0)
        return [square, low, mid, wide] if rows <= 600 else [wide, low, mid]
    square = Config(block_m=64, block_n=64, block_k=64, warps=4, stages=4, programs=0)
    sizes = [low, square, big, mid] if rows <= 96 else [big, square, mid, low]
    # too few large tiles leave multiprocessors idle
    return sizes if tiles_in(sizes[0], spec) >= PROCESSORS else [square, *(x for x in sizes if x is not square)]


def heavy(spec: ProblemSpec) -> bool:
    """Element-wise addresses or a C to read take the registers that a large tile would need."""
    aligned = min(spec.a.align, spec.b.align, spec.out.align) == 16 and spec.form != "jagged_n"
    return not aligned or spec.c is not None


def _eight_bit(spec: ProblemSpec) -> list[Config]:
    first = Config(block_m=128, block_n=128, block_k=64, warps=8, stages=3, programs=1)
    small = Config(block_m=64, block_n=64, block_k=64, warps=4, stages=3, programs=2)
    if min(spec.a.align, spec.b.align) < 16:
        return [small, replace(small, block_n=32)]
    return [first, small] if typical_rows(spec) > 64 else [small, first]


def emulated() -> list[Config]:
    """For the interpreter, whose cost is the number of operations, not of elements."""
    return [Config(block_m=64, block_n=64, block_k=64, warps=4, stages=1, width=2, programs=3)]


def _ranked(spec: ProblemSpec, large: Config, wide: Config, tall: Config, flat: Config) -> tuple[Config, ...]:
    """The order that measurements on an H100 support (docs/triton-tuning.md), by rows per group."""
    rows = shape_of(spec).rows
    if shape_of(spec).columns <= 128:
        return tall, flat
    if spec.form == "jagged_k" or 384 < rows <= 1536:
        return wide, large, tall, flat
    if 32 < rows <= 384:
        return tall, wide, large, flat
    return large, wide, tall, flat


def _narrow_first(ranked: tuple[Config, ...], spec: ProblemSpec) -> tuple[Config, ...]:
    """Where columns of 256 would be empty for an eighth or more, those of 128 come first."""
    columns = shape_of(spec).columns
    if -(-columns // 256) * 256 < 1.125 * (-(-columns // 128) * 128):
        return ranked
    return tuple(sorted(ranked, key=lambda config: config.block_n))


def _brief_first(ranked: tuple[Config, ...], spec: ProblemSpec) -> tuple[Config, ...]:
    """Where programs take few tiles each, what an incomplete last round costs outweighs what a tile is good for."""
    if tiles_in(ranked[0], spec) > 4 * PROCESSORS:
        return ranked
    brief = min(ranked, key=lambda config: rounds_us(config, spec))
    if rounds_us(brief, spec) > 0.95 * rounds_us(ranked[0], spec):
        return ranked
    return brief, *(config for config in ranked if config is not brief)


def hopper_candidates(spec: ProblemSpec) -> list[Config]:
    """Configs of the warp-specialised kernel, the best guess first; empty where it cannot run."""
    if spec.form == "per_group":
        return _lists(spec)
    large = Config("hopper", block_m=192, block_n=256, stages=3, warps=4)
    wide = Config("hopper", block_m=128, block_n=256, stages=4, warps=4)
    tall = Config("hopper", block_m=256, block_n=128, stages=4, warps=4)
    flat = Config("hopper", block_m=128, block_n=128, stages=5, warps=4)
    along = {"a": "row", "b": "col"} if spec.compute == torch.float32 else {"a": spec.a.order, "b": spec.b.order}
    operands = (("a", spec.a), ("b", spec.b))
    pack = tuple(name for name, x in operands if not mappable(x) or x.order != along[name])
    ranked = _brief_first(_ranked(spec, large, wide, tall, flat), spec)
    if "b" in pack:
        idle = spec.form == "jagged_m" and tiles_in(tall, spec) < PROCESSORS
        ranked = (flat, wide, tall) if idle else _narrow_first(ranked, spec)
    found = [replace(config, pack=pack, block_k=depth_of(spec)) for config in ranked]
    if "b" in pack:
        uncopied = _uncopied(spec, tall, flat, tuple(name for name in pack if name == "a"))
        found = [*uncopied, *found] if _few(uncopied, spec) else [*found, *uncopied[:1]]
    found = [config for config in found if not problem_with(config, spec)]
    return _ordered(found, spec) if found else []


def _lists(spec: ProblemSpec) -> list[Config]:
    """Tiles of lists: large ones where they fill a GPU, dealt out where that takes several rounds; else small ones."""
    wide = Config("hopper", block_m=128, block_n=256, stages=4, warps=4, width=4, programs=0, order="dealt")
    low = replace(wide, block_m=64, block_n=128)
    flat = replace(wide, block_n=128, stages=6)
    dealt = replace(wide, programs=1)
    found = [low, wide, flat, dealt]
    if _fills(wide, spec):
        found = [dealt, wide, low, flat] if tiles_in(wide, spec) >= 3 * PROCESSORS else [wide, dealt, low, flat]
    return [config for config in found if not problem_with(config, spec)]


def _fills(wide: Config, spec: ProblemSpec) -> bool:
    """Whether a list has enough large tiles, and columns for them: unequal products leave a last round half empty."""
    enough = MANY_TILES if spec.largest <= typical_rows(spec) else 2 * MANY_TILES
    columns = typical_columns(spec)
    return tiles_in(wide, spec) >= enough and 4 * columns >= 3 * wide.block_n * -(-columns // wide.block_n)


def _maps_first(spec: ProblemSpec, best: Config) -> bool:
    """Lists that large tiles fill, or small ones of a few groups: fewer are over before maps are read."""
    some = MANY_TILES <= tiles_in(best, spec) <= 2 * PROCESSORS and spec.groups <= 8
    return best.block_m > 64 or some


def _uncopied(spec: ProblemSpec, tall: Config, flat: Config, pack: tuple[str, ...]) -> list[Config]:
    """Unaligned weights through registers, by the tiles that can: the tall one reads them less often, the low one
    takes three quarters of the time for half of the rows, which helps where one round of low tiles does it all."""
    tiles = (tall, replace(flat, stages=6))
    if tiles_in(tall, spec) < PROCESSORS and tiles_in(flat, spec) <= PROCESSORS:
        tiles = tiles[::-1]
    found = [replace(config, carry=True, pack=pack, block_k=depth_of(spec)) for config in tiles]
    return [config for config in found if not problem_with(config, spec)]


def _few(uncopied: list[Config], spec: ProblemSpec) -> bool:
    """Whether groups have so few rows that their weights are better shifted in every tile than copied once."""
    shape = shape_of(spec)
    if not uncopied or shape.groups * shape.columns * shape.deep <= CHEAP_TO_COPY:
        return False
    limit = UNCOPIED_ROWS[max(config.block_m for config in uncopied)]
    return shape.rows <= (limit * 3 // 2 if shape.deep >= DEEP else limit)


def _ordered(found: list[Config], spec: ProblemSpec) -> list[Config]:
    """Tiles dealt out where the work is brief, else drawn; the best guess also the other way."""
    orders: tuple[Literal["dealt", "drawn"], ...] = ("dealt", "drawn")
    usual, other = orders if ring_us(found[0], spec) < BRIEF_US else orders[::-1]
    return [*(replace(config, order=usual) for config in found), replace(found[0], order=other)]


def pointer_candidates(spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> list[Config]:
    """Valid configs of the pointer kernel, the best guess first."""
    size = spec.compute.itemsize
    by_size = {1: lambda: _eight_bit(spec), 2: lambda: _sixteen_bit(spec), 4: lambda: thirty_two_bit(spec)}
    found = by_size.get(size, lambda: sixty_four_bit(spec))()
    found = [shared_out(found[0], spec), *found]
    if capability[0] >= 10:
        # four warps get 128 registers each there, and spill
        found = [replace(x, warps=8) if (x.block_m, x.block_n, x.warps) == (64, 64, 4) else x for x in found]
    return [config for config in dict.fromkeys(found) if not problem_with(config, spec)]


def candidates(spec: ProblemSpec, capability: tuple[int, int]) -> list[Config]:
    """Valid configs for a spec on a device, the best guess first."""
    plain = pointer_candidates(spec, capability)
    fast = hopper_candidates(spec) if capability[0] == 9 else []
    if not fast:
        return plain
    if spec.form == "per_group":
        return [*fast, *plain] if _maps_first(spec, fast[0]) else [*plain, *fast]
    # what is known of both in tf32 is how large tiles compare
    fitted = max(plain, key=lambda x: x.block_m * x.block_n) if is_tf32(spec) else plain[0]
    if ring_us(fast[0], spec) < pointer_us(fitted, spec):
        return [*fast, *plain]
    return [*plain, fast[0]]
