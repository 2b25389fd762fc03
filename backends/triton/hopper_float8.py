"""The warp-specialised kernel for float8: the maps of the plain one, and the scales of both sides as further
arguments. Operands of a jagged K are copied first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from multigemm.backend import Recipe
from multigemm.backends.triton.build import KernelSource, TritonKernel
from multigemm.backends.triton.config import PROMOTION, STRIP, Config, brings_scales, finest_block
from multigemm.backends.triton.generic import CHUNK, TYPES, after_copies, packed_spec, sizes_address
from multigemm.backends.triton.hopper import (
    BESIDE,
    HopperPlan,
    argument_types,
    canonical,
    kernel_constants,
    listed,
    names_of,
    records_source,
    sums_sizes,
)
from multigemm.cuda.arguments import Fields
from multigemm.cuda.launch import BoundKernel
from multigemm.cuda.tensor_map import NO_SWIZZLE, encode_together
from multigemm.planning.operands import Operands, Packed, Strided
from multigemm.planning.scale_grids import ScaleGrid, packed_grids
from multigemm.planning.tiles import tiles_of
from multigemm.problem.spec import ProblemSpec, ScaleSpec

SCALES = ("scale_a", "scale_b")
STRIDES = tuple(f"{side}_{along}" for side in ("sa", "sb") for along in ("group", "line", "deep"))
PLAIN_ALONE = ("PIECE", "ALIGN", "A_ORDER", "B_ORDER", "LATE", "CONSUMERS", "WIDE")
"""Constants of the plain kernel that have one value here."""
COPIED_LINES = 128
"""What one program of a copy takes of a block of a jagged K."""
FARTHEST_LINE = 2**31 // STRIP // 4
"""Elements from one row's scale to the next: from here on the last row of a strip is 2^31 bytes away."""


def float8_source(given: ProblemSpec, config: Config) -> KernelSource:
    """The kernel for a spec, which depends on classes only, not on extents."""
    spec = canonical(packed_spec(given, config))
    scales = {"scale_a": spec.a.scale, "scale_b": spec.b.scale}
    types = argument_types(spec, config) | dict.fromkeys(STRIDES, "i64")
    types |= {name: "*" + TYPES[torch.float32 if x is None else x.dtype] for name, x in scales.items()}
    if brings_scales(spec):
        types |= {name: scales_descriptor(lines) for name, lines in zip(SCALES, _tile(config), strict=True)}
    arguments = tuple((name, types[name]) for name in (*names_of(config), *SCALES, *STRIDES))
    sums = "blocks" if finest_block(spec) else spec.accumulate
    covers = {"SUMS": sums, **_covers("SA", spec.a.scale), **_covers("SB", spec.b.scale)}
    constants = {**kernel_constants(spec, config, given.form), **covers}
    for name in PLAIN_ALONE:
        del constants[name]
    return KernelSource("multigemm.backends.triton.kernels.hopper_float8", "float8_kernel", arguments,
                        tuple(constants.items()), gluon=True)  # fmt: skip


def _tile(config: Config) -> tuple[int, int]:
    return config.block_m, config.block_n


def scales_descriptor(lines: int) -> str:
    """The type of a map of copied scales: those of a block of a tile's rows, or columns."""
    return f"tensordesc<fp32[1, {lines}],NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)>"


def _covers(name: str, scale: ScaleSpec | None) -> dict[str, bool | int]:
    """Whether there is a scale, how many lines and how much of K an entry covers (0: all), and whether it is e8m0."""
    held = scale or ScaleSpec(torch.float32)
    return {f"HAS_{name}": scale is not None, f"{name}_ROWS": held.rows, f"{name}_K": held.k,
            f"{name}_E8M0": held.dtype is torch.float8_e8m0fnu}  # fmt: skip


def float8_sources(spec: ProblemSpec, config: Config) -> dict[str, KernelSource]:
    """The kernels of a plan: the main one, copies, and the list of tile rows."""
    found = {"main": float8_source(spec, config)}
    found |= {f"pack {name}": pack_groups_source(spec, config, name) for name in config.pack}
    return {**found, "records": records_source(spec, config)} if listed(canonical(spec), config) else found


def pack_groups_source(spec: ProblemSpec, config: Config, name: str) -> KernelSource:
    """The copy of one operand of a jagged K, and of its scales if those of either operand change along K."""
    operand, lines, across = (spec.a, spec.m, "col") if name == "a" else (spec.b, spec.n, "row")
    along = "none" if operand.order == "strided" else "lines" if operand.order == across else "k"
    sums, scale = sums_sizes(spec, config), operand.scale or ScaleSpec(torch.float32)
    types = {
        "source": "*u8",
        "scale": "*" + TYPES[scale.dtype],
        "target": "*u8",
        "target_scales": "*fp32",
        "ends": "*" + TYPES[(spec.sizes if sums else spec.index) or torch.int32],
        **dict.fromkeys(("lines", "k", "groups", "head"), "i32"),
        **dict.fromkeys(("line_step", "k_step", "scale_group", "scale_line", "scale_deep", "target_line"), "i64"),
    }
    align = {"source": operand.align, "k_step": operand.align, "lines": 16 if lines and lines % 16 == 0 else 1,
             "target": 16, "target_scales": 16, "target_line": 16}  # fmt: skip
    words = along == "lines" and min(align.values()) == 16
    constants = {"BLOCK": PROMOTION, "LINES": COPIED_LINES, "ALONG": along, "WORDS": words,
                 "SCALES": {"a": "rows", "b": "slots"}[name] if brings_scales(spec) else "",
                 "HAS_SCALE": operand.scale is not None, "SCALE_K": scale.k,
                 "E8M0": scale.dtype is torch.float8_e8m0fnu, "SIZES": sums, "CHUNK": CHUNK}  # fmt: skip
    return KernelSource("multigemm.backends.triton.kernels.quantised", "pack_groups_kernel", tuple(types.items()),
                        tuple(constants.items()), tuple(hint for hint in align.items() if hint[1] > 1))  # fmt: skip


class GroupCopy:
    """Copies an operand of a jagged K: K is contiguous in the copy, where each group begins with a block of its own.
    Behind it lie the copied scales, if there are any."""

    __slots__ = ("_kernel", "_scales", "_sums", "name")

    def __init__(self, name: str, spec: ProblemSpec, kernel: TritonKernel) -> None:
        self.name, self._kernel, self._scales = name, kernel, brings_scales(spec)
        self._sums = spec.sizes is not None and spec.groups <= CHUNK

    def bind(self, shape: Packed, ops: Operands) -> tuple[Packed, BoundKernel | None]:
        """The operands' addresses after the copy, and its launch; None where there is nothing to copy."""
        of_a, x = self.name == "a", getattr(shape, self.name)
        lines, line_step, k_step = (shape.m, x.row, x.col) if of_a else (shape.n, x.col, x.row)
        blocks = shape.k // PROMOTION + max(1, shape.groups)
        line, strips = blocks * PROMOTION, tiles_of(lines, COPIED_LINES)
        held = lines * line + self._scales * 4 * blocks * strips * COPIED_LINES
        target = torch.empty(held, dtype=torch.uint8, device=ops.device)
        moved = Strided(target.data_ptr(), 0, *((line, 1) if of_a else (1, line)))
        at, *steps = packed_grids(ops)[0 if of_a else 1][:4]
        values = [x.ptr, at, moved.ptr, moved.ptr + lines * line, sizes_address(ops, self._sums), lines, shape.k,
                  shape.groups, int(ops.head), line_step, k_step, *steps, line]  # fmt: skip
        launch = self._kernel.bound(values, blocks * strips, (target,)) if x.ptr and shape.groups else None
        return (replace(shape, a=moved) if of_a else replace(shape, b=moved)), launch


def scales_map(copy: int, lines: int, line: int, box: int) -> Fields:
    """The map of the scales behind a copy of `lines` lines of as many bytes."""
    width = tiles_of(lines, COPIED_LINES) * COPIED_LINES
    return encode_together(torch.float32, copy + lines * line, (width, line // PROMOTION), (4 * width,), ((box, 1),),
                           swizzle=NO_SWIZZLE)  # fmt: skip


def _sides(ops: Operands) -> tuple[ScaleGrid, ScaleGrid]:
    """The scales of the kernel's rows and columns."""
    of_a, of_b, _ = packed_grids(ops)
    return (of_b, of_a) if ops.spec.form == "jagged_n" else (of_a, of_b)


class Float8Plan(HopperPlan):
    """The kernels of one spec and config, loaded on one device."""

    _sources = staticmethod(float8_sources)
    _copy: Any = GroupCopy

    def _fits(self, ops: Operands, shape: Packed) -> bool:
        """Whether the maps fit, and the kernel can count the distances of a strip's row scales in 32 bits."""
        (_, _, line, *_), _ = _sides(ops)
        return abs(line) < FARTHEST_LINE and super()._fits(ops, shape)

    def _maps(self, shape: Packed) -> list[int | bytes]:
        """Those of a copied K end where lines of the copies do."""
        return super()._maps(replace(shape, k=shape.a.row) if self._copies else shape)

    def _arguments(self, ops: Operands, shape: Packed, records: int, sizes: int) -> list[int | bytes]:
        """The plain kernel's arguments, then the scales of rows and of columns."""
        plain = super()._arguments(ops, shape, records, sizes)
        if brings_scales(self._spec):
            m, n = _tile(self._config)
            of_rows = scales_map(shape.a.ptr, shape.m, shape.a.row, m)
            of_columns = scales_map(shape.b.ptr, shape.n, shape.b.col, n)
            return [*plain, of_rows, *BESIDE[2], of_columns, *BESIDE[2], *[0] * len(STRIDES)]
        sides = _sides(ops)
        return [*plain, *(at for at, *_ in sides), *(x for side in sides for x in side[1:4])]


def plan_float8(spec: ProblemSpec, config: Config, index: int, why: str, instead: Callable[[], Recipe]) -> Recipe:
    """Compiles (or loads) the kernels. `instead` plans the kernel of quantised operands for strides that no map
    expresses."""
    sums = sums_sizes(canonical(spec), config)
    name = "hopper, float8" + after_copies(config)
    return Recipe(name, config, Float8Plan(spec, config, index, instead).bind, why, sums_sizes=sums)
