"""The warp-specialised kernel and its helper as sources to compile: classes of a spec, never extents."""

from __future__ import annotations

from typing import Any

import torch

from multigemm.backends.triton.compile import KernelSource
from multigemm.backends.triton.config import STRIP, Config, consumers, part_of, raw_bytes
from multigemm.backends.triton.hopper_forms import (
    boxes,
    canonical,
    cut_of,
    drawn,
    packed_spec,
    piece_of,
    searched,
    start_multiple,
    store_of,
    stores_late,
)
from multigemm.backends.triton.pointer_sources import TYPES
from multigemm.problem.spec import Form, ProblemSpec

EXTENTS = ("m", "n", "k", "groups", "head", "a_rows", "b_step", "out_rows")
STRIDES = ("c_group", "c_row", "c_col", "out_group", "out_row", "out_col", "bias_group", "bias_col",
           "alpha_bits", "beta_bits")  # fmt: skip
RECORD_ROWS = 32
RECORD_STEP = 512


def _layout(rank: int, size: int) -> str:
    return f"NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth={8 * size}, rank={rank})"


def descriptor(dtype: torch.dtype, box: tuple[int, ...]) -> str:
    return f"tensordesc<{TYPES[dtype]}[{', '.join(map(str, box))}],{_layout(len(box), dtype.itemsize)}>"


def names_of(config: Config) -> tuple[str, ...]:
    """The arguments, in the kernel's order."""
    data = ("c", "out", "bias", "records", "ends")
    if config.carry:
        extents = tuple(name for name in EXTENTS if name != "b_step")
        return ("a_desc", "out_desc", "b", *data, *extents, "raw_at", "b_group", "b_line", *STRIDES)
    return ("a_desc", "b_desc", "out_desc", *data, *EXTENTS, *STRIDES)


def hopper_source(given: ProblemSpec, config: Config) -> KernelSource:
    """The kernel for a spec; classes only, no extents."""
    spec = canonical(packed_spec(given, config))
    module, name = ("hopper_carry", "carry_kernel") if config.carry else ("hopper", "hopper_kernel")
    types = _types(spec, config)
    arguments = tuple((argument, types[argument]) for argument in names_of(config))
    constants = {**_cut(spec, config), **_end(spec, config, given.form), **_roles(spec, config)}
    if config.carry:
        del constants["PIECE"], constants["MASKED"], constants["LATE"]
        # two rings leave no room for rows of 32 bits to turn in
        constants["STORE"] = "row" if spec.out.dtype.itemsize == 4 else constants["STORE"]
    room = raw_bytes(config, spec) if config.carry else 0
    return KernelSource(f"multigemm.backends.triton.{module}", name, arguments, tuple(constants.items()),
                        gluon=True, room=room)  # fmt: skip


def _types(spec: ProblemSpec, config: Config) -> dict[str, str]:
    """The types of all arguments that either kernel takes."""
    box, out_dtype = boxes(spec, config), spec.out.dtype
    return {
        "a_desc": descriptor(spec.a.dtype, box["a_desc"]),
        "b_desc": descriptor(spec.b.dtype, box["b_desc"]),
        "out_desc": descriptor(out_dtype, box["out_desc"]),
        "c": "*" + TYPES[spec.c.dtype if spec.c else out_dtype],
        "out": "*" + TYPES[out_dtype],
        "bias": "*" + TYPES[spec.bias or out_dtype],
        "records": "*i32",
        "ends": "*" + TYPES[spec.index or torch.int32],
        **dict.fromkeys((*EXTENTS, "raw_at"), "i32"),
        **dict.fromkeys(("b", "b_group", "b_line", *STRIDES), "i64"),
    }


def _cut(spec: ProblemSpec, config: Config) -> dict[str, Any]:
    """How work is cut into tiles, and how operands lie."""
    return {
        "FORM": "search" if searched(spec, config) else cut_of(spec),
        "BN": config.block_n,
        "PIECE": piece_of(config),
        "PART": part_of(config, spec),
        "MOST": config.block_m // STRIP,
        "STAGES": config.stages,
        "WIDTH": config.width,
        "ORDER": "drawn" if drawn(spec, config) else "dealt",
        "ALIGN": start_multiple(spec),
        "MASKED": spec.form == "masked",
        "A_ORDER": spec.a.order,
        "B_ORDER": spec.b.order,
    }


def _end(spec: ProblemSpec, config: Config, form: Form) -> dict[str, Any]:
    """What becomes of a sum, and how it is stored."""
    return {
        "STORE": store_of(spec),
        "C": spec.c.order if spec.c else None,
        "BIAS": None if spec.bias is None else "down" if form == "jagged_n" else "across",
        "ALPHA": spec.alpha,
        "ACTIVATION": spec.activation,
        "LATE": stores_late(spec, config),
    }


def _roles(spec: ProblemSpec, config: Config) -> dict[str, int]:
    """The registers of each role."""
    if config.carry:
        # of low tiles: lines along k take the warps that load them more registers, those along n the others
        low = (184, 48, 96) if spec.b.order == "row" else (176, 48, 112)
        numbers = (200, 40, 72) if config.block_m == 256 else low
        return dict(zip(("CONSUMER_REGISTERS", "PRODUCER_REGISTERS", "CARRIER_REGISTERS"), numbers, strict=True))
    few = consumers(config) == 3
    return {"CONSUMERS": consumers(config), "CONSUMER_REGISTERS": 160 if few else 232,
            "PRODUCER_REGISTERS": 32 if few else 40}  # fmt: skip


def records_source(given: ProblemSpec, config: Config) -> KernelSource:
    """The small kernel that lists the tile rows of jagged groups."""
    spec = canonical(packed_spec(given, config))
    signature = {"records": "*i32", "ends": "*" + TYPES[spec.index or torch.int32],
                 **dict.fromkeys(("m", "groups", "head"), "i32")}  # fmt: skip
    constants = {
        "KIND": "masked" if spec.form == "masked" else cut_of(spec),
        "STRIP": STRIP,
        "MOST": config.block_m // STRIP,
        "ALIGN": start_multiple(spec),
        "ROWS": RECORD_ROWS,
        "STEP": RECORD_STEP,
    }
    return KernelSource("multigemm.backends.triton.schedule_device", "write_records", tuple(signature.items()),
                        tuple(constants.items()))  # fmt: skip
