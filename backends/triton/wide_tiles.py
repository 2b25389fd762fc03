"""Tiles of the pointer kernel for products in 32 and 64 bits: the one whose rounds on the busiest multiprocessor
take least, padding included.

A program alone on a multiprocessor takes `alone` us for a block of K, several beside each other `busy` us each, and a
tile's start and end as long as ENDS elements of K. Fitted to an H100 (docs/triton-tuning.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from multigemm.backends.triton.config import Config
from multigemm.backends.triton.estimate import crossed, shape_of, shared_out, tiles_in
from multigemm.cuda.device import FITTED_PROCESSORS as PROCESSORS
from multigemm.problem.spec import ProblemSpec

ENDS = 48


@dataclass(frozen=True, slots=True)
class Timed:
    """A tile, and how many us a block of K takes."""

    config: Config
    alone: float
    busy: float


def _timed(tile: tuple[int, int, int], warps: int, stages: int, programs: int, alone: float, busy: float) -> Timed:
    m, n, k = tile
    config = Config(block_m=m, block_n=n, block_k=k, warps=warps, stages=stages, programs=programs)
    return Timed(config, alone, busy)


DOUBLE = (
    _timed((64, 64, 16), 4, 4, 2, 0.70, 0.40),
    _timed((32, 128, 16), 4, 4, 2, 0.75, 0.41),
    _timed((32, 32, 32), 2, 4, 3, 0.50, 0.25),
    _timed((16, 64, 32), 4, 4, 2, 0.60, 0.32),
)
"""float64: few rows per group waste most of 64, and low tiles read shared memory more often."""
ALONG = (
    _timed((128, 128, 32), 8, 3, 1, 0.62, 0.62),
    _timed((64, 64, 32), 4, 5, 2, 0.36, 0.25),
    _timed((32, 32, 64), 4, 4, 3, 0.50, 0.25),
)
"""tf32 along memory: wgmma, from 64 rows on."""
ACROSS = (
    _timed((128, 128, 32), 8, 3, 1, 1.66, 1.66),
    _timed((32, 64, 32), 4, 4, 4, 0.42, 0.22),
    _timed((32, 32, 64), 4, 4, 3, 0.50, 0.25),
)
"""tf32 otherwise: operands turn on their way from shared memory to registers."""
SINGLE = (
    Config(block_m=64, block_n=64, block_k=16, warps=4, stages=3, programs=3),
    Config(block_m=32, block_n=32, block_k=16, warps=4, stages=3, programs=4),
)
"""float32 across k."""
CROSSED = (Timed(SINGLE[0], 1.60, 1.60), _timed((16, 32, 32), 4, 4, 4, 1.16, 1.16))
"""float32 whose weights run along k: reading them from shared memory is what a program waits for, alone or not. Of 28
rows, tiles of 32 x 32 took 1.3 to 1.45 times as long as those of 64 x 64."""


def busiest_us(timed: Timed, spec: ProblemSpec) -> float:
    """How long the multiprocessor with most tiles takes; who shares a tile also has a part of it to write and read."""
    config = shared_out(timed.config, spec)
    most = -(-tiles_in(config, spec) * config.splits // PROCESSORS)
    ends = ENDS if config.splits == 1 else 2 * ENDS
    steps = -(-shape_of(spec).deep // (config.block_k * config.splits)) + ends / config.block_k
    rounds = -(-most // config.programs) if config.programs else 1
    return steps * max(rounds * timed.alone, most * timed.busy)


def ranked(tiles: tuple[Timed, ...], spec: ProblemSpec) -> list[Config]:
    """The tiles, the briefest first."""
    return [timed.config for timed in sorted(tiles, key=lambda timed: busiest_us(timed, spec))]


def sixty_four_bit(spec: ProblemSpec) -> list[Config]:
    found = ranked(DOUBLE, spec)
    return [replace(x, warps=2 * x.warps) if x.block_m > 16 else x for x in found] if burdened(spec) else found


def burdened(spec: ProblemSpec) -> bool:
    """Whether addresses, a C or a function of each element take registers that half the warps do not have."""
    operands = (spec.a, spec.b, spec.out)
    single = spec.form == "jagged_n" or any(x.align < 16 or x.order == "strided" for x in operands)
    return single or spec.c is not None or spec.activation not in (None, "relu")


def thirty_two_bit(spec: ProblemSpec) -> list[Config]:
    if spec.precision == "tf32":
        along = (spec.a.order, spec.b.order) == ("row", "col")
        # low tiles read more single elements for each product
        return ranked(ALONG if along else ACROSS, spec) if in_pieces(spec) else [timed.config for timed in ALONG[:2]]
    return ranked(CROSSED, spec) if crossed(spec) else list(SINGLE)


def in_pieces(spec: ProblemSpec) -> bool:
    """Whether operands can be read 16 bytes at a time: rows that start anywhere cannot."""
    jagged = spec.form == "jagged_n" or (spec.form == "jagged_k" and (spec.a.order, spec.b.order) != ("col", "row"))
    return not jagged and min(spec.a.align, spec.b.align) == 16
