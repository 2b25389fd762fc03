"""The warp-specialised kernel for float8: the maps of the plain one, and the scales of both sides as further
arguments."""

from __future__ import annotations

from collections.abc import Callable

import torch

from multigemm.backend import Recipe
from multigemm.backends.triton.build import KernelSource
from multigemm.backends.triton.config import STRIP, Config, finest_block
from multigemm.backends.triton.generic import TYPES
from multigemm.backends.triton.hopper import (
    HopperPlan,
    argument_types,
    canonical,
    kernel_constants,
    listed,
    names_of,
    records_source,
    sums_sizes,
)
from multigemm.backends.triton.quantised import scale_strides
from multigemm.planning.operands import Operands, Packed, Strided
from multigemm.problem.spec import ProblemSpec, ScaleSpec

SCALES = ("scale_a", "scale_b")
STRIDES = tuple(f"{side}_{along}" for side in ("sa", "sb") for along in ("group", "line", "deep"))
PLAIN_ALONE = ("PIECE", "ALIGN", "A_ORDER", "B_ORDER", "LATE", "CONSUMERS", "WIDE")
"""Constants of the plain kernel that have one value here."""
FARTHEST_LINE = 2**31 // STRIP // 4
"""Elements from one row's scale to the next: from here on the last row of a strip is 2^31 bytes away."""


def float8_source(given: ProblemSpec, config: Config) -> KernelSource:
    """The kernel for a spec, which depends on classes only, not on extents."""
    spec = canonical(given)
    scales = {"scale_a": spec.a.scale, "scale_b": spec.b.scale}
    types = argument_types(spec, config) | dict.fromkeys(STRIDES, "i64")
    types |= {name: "*" + TYPES[torch.float32 if x is None else x.dtype] for name, x in scales.items()}
    arguments = tuple((name, types[name]) for name in (*names_of(config), *SCALES, *STRIDES))
    sums = "blocks" if finest_block(spec) else spec.accumulate
    covers = {"SUMS": sums, **_covers("SA", spec.a.scale), **_covers("SB", spec.b.scale)}
    constants = {**kernel_constants(spec, config, given.form), **covers}
    for name in PLAIN_ALONE:
        del constants[name]
    return KernelSource("multigemm.backends.triton.kernels.hopper_float8", "float8_kernel", arguments,
                        tuple(constants.items()), gluon=True)  # fmt: skip


def _covers(name: str, scale: ScaleSpec | None) -> dict[str, bool | int]:
    """Whether there is a scale, how many lines and how much of K an entry covers (0: all), and whether it is e8m0."""
    held = scale or ScaleSpec(torch.float32)
    return {f"HAS_{name}": scale is not None, f"{name}_ROWS": held.rows, f"{name}_K": held.k,
            f"{name}_E8M0": held.dtype is torch.float8_e8m0fnu}  # fmt: skip


def float8_sources(spec: ProblemSpec, config: Config) -> dict[str, KernelSource]:
    """The kernels of a plan: the main one, and the list of tile rows."""
    found = {"main": float8_source(spec, config)}
    return {**found, "records": records_source(spec, config)} if listed(canonical(spec), config) else found


def _sides(ops: Operands) -> tuple[Strided, Strided]:
    """The addresses of the scales of the kernel's rows and columns."""
    of_a, of_b, _ = scale_strides(ops)
    return (of_b, of_a) if ops.spec.form == "jagged_n" else (of_a, of_b)


class Float8Plan(HopperPlan):
    """The kernels of one spec and config, loaded on one device."""

    _sources = staticmethod(float8_sources)

    def _fits(self, ops: Operands, shape: Packed) -> bool:
        """Whether the maps fit, and the kernel can count the distances of a strip's row scales in 32 bits."""
        rows, _ = _sides(ops)
        return abs(rows.row) < FARTHEST_LINE and super()._fits(ops, shape)

    def _arguments(self, ops: Operands, shape: Packed, records: int, sizes: int) -> list[int | bytes]:
        """The plain kernel's arguments, then the scales of rows and of columns."""
        sides = _sides(ops)
        plain = super()._arguments(ops, shape, records, sizes)
        return [*plain, *(x.ptr for x in sides), *(x for side in sides for x in side[1:])]


def plan_float8(spec: ProblemSpec, config: Config, index: int, why: str, instead: Callable[[], Recipe]) -> Recipe:
    """Compiles (or loads) the kernels. `instead` plans the kernel of quantised operands for strides that no map
    expresses."""
    sums = sums_sizes(canonical(spec), config)
    return Recipe("hopper, float8", config, Float8Plan(spec, config, index, instead).bind, why, sums_sizes=sums)
