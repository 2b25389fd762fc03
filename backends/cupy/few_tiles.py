"""Problems of few tiles: how many there are, and what they take on the kernels that give each a thread block."""

from __future__ import annotations

from multigemm.cuda.device import FITTED_PROCESSORS as PROCESSORS
from multigemm.problem.spec import ProblemSpec

AT_ONCE = 3 * PROCESSORS
"""Tiles of 64, or of 32 with eight blocks of k in flight, that run at once, for which there is shared memory."""
BLOCK_K = 64
"""k of a stage."""
ODD_US, PORTABLE_US = (7.0, 1.0), (11.0, 4.0)
"""Microseconds (H100) of a launch and of a block of k where lines begin anywhere: a block of one of a processor's tiles
of 32 in the small kernel; of all its tiles of 64 in the portable one, which waits for memory each time."""
CLEARLY = 0.8
"""How far below the other one a forecast must be to be believed."""


def blocks(spec: ProblemSpec) -> int:
    """Of k, one after the other."""
    return max(-(-spec.usual("k") // BLOCK_K), 1)


def most_tiles(spec: ProblemSpec, side: int) -> int:
    """As many as any sizes could need; 0 where there are none, or some extent of a list differs."""
    rows = spec.total if spec.form not in ("jagged_n", "jagged_k") else (spec.m or 0) * spec.groups
    columns = spec.total if spec.form == "jagged_n" else spec.n or 0
    known = spec.form == "jagged_k" or spec.k is not None
    return (rows // side + spec.groups) * -(-columns // side) if rows and known else 0


def result_tiles(spec: ProblemSpec, side: int) -> int:
    """Of jagged k, whose results are all of one size."""
    return spec.groups * -(-(spec.m or 0) // side) * -(-(spec.n or 0) // side)


def odd_tiles_win(spec: ProblemSpec, side: int) -> bool:
    """Whether the small kernel's tiles of lines that begin anywhere end clearly before the portable kernel's."""
    tiles, deep = most_tiles(spec, side), blocks(spec)
    small = ODD_US[0] + ODD_US[1] * deep * max(tiles / PROCESSORS, 1)
    return tiles > 0 and small <= CLEARLY * (PORTABLE_US[0] + PORTABLE_US[1] * deep)
