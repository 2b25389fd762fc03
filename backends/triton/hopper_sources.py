"""The warp-specialised kernel and its helper as sources to compile: classes of a spec, never extents."""

from __future__ import annotations

from typing import Any

import torch

from multigemm.backends.triton.compile import KernelSource
from multigemm.backends.triton.config import STRIP, Config, consumers, part_of
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
from multigemm.spec import Form, ProblemSpec

EXTENTS = ("m", "n", "k", "groups", "head", "a_rows", "b_step", "out_rows")
STRIDES = ("c_group", "c_row", "c_col", "out_group", "out_row", "out_col", "bias_group", "bias_col",
           "alpha_bits", "beta_bits")  # fmt: skip
SOURCE = ("b_skip", "b_group", "b_line", "target_line")
"""Where weights that are copied ahead come from, in elements, and how far apart their lines go."""
SEGMENT = 1024
"""Elements of each of 128 lines that are copied at once: more, and the first tiles wait longer."""
RECORD_ROWS = 32
RECORD_STEP = 512


def _layout(rank: int, size: int) -> str:
    return f"NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth={8 * size}, rank={rank})"


def _descriptor(dtype: torch.dtype, box: tuple[int, ...]) -> str:
    return f"tensordesc<{TYPES[dtype]}[{', '.join(map(str, box))}],{_layout(len(box), dtype.itemsize)}>"


def names_of(config: Config) -> tuple[str, ...]:
    """The arguments, in the kernel's order."""
    weights, more = (("b", "target"), (*SOURCE,)) if config.ahead else ((), ())
    return ("a_desc", "b_desc", "out_desc", *weights, "c", "out", "bias", "records", "ends", *EXTENTS, *more, *STRIDES)


def hopper_source(given: ProblemSpec, config: Config) -> KernelSource:
    """The kernel for a spec; classes only, no extents."""
    spec = canonical(packed_spec(given, config))
    module, name = ("hopper_ahead", "ahead_kernel") if config.ahead else ("hopper", "hopper_kernel")
    types = _types(spec, config)
    arguments = tuple((argument, types[argument]) for argument in names_of(config))
    constants = {**_shape_constants(spec, config), **_end_constants(spec, config, given.form), **_roles(config)}
    if not config.ahead:
        constants |= {"FORM": "search" if searched(spec, config) else cut_of(spec), "PIECE": piece_of(config),
                      "ORDER": "drawn" if drawn(spec, config) else "dealt"}  # fmt: skip
    hints = (("b", 16), ("target", 16), ("target_line", 64)) if config.ahead else ()
    return KernelSource(f"multigemm.backends.triton.{module}", name, arguments, tuple(constants.items()), hints,
                        gluon=True)  # fmt: skip


def _types(spec: ProblemSpec, config: Config) -> dict[str, str]:
    out_dtype, box = spec.out.dtype, boxes(spec, config)
    dtypes = {"a_desc": spec.a.dtype, "out_desc": out_dtype}
    return {
        **{name: _descriptor(dtypes.get(name, spec.b.dtype), box[name]) for name in box},
        "c": "*" + TYPES[spec.c.dtype if spec.c else out_dtype],
        "out": "*" + TYPES[out_dtype],
        "bias": "*" + TYPES[spec.bias or out_dtype],
        "records": "*i32",
        "ends": "*" + TYPES[spec.index or torch.int32],
        **dict.fromkeys(("b", "target"), "*i32"),
        **dict.fromkeys(EXTENTS, "i32"),
        **dict.fromkeys((*SOURCE, *STRIDES), "i64"),
    }


def _shape_constants(spec: ProblemSpec, config: Config) -> dict[str, Any]:
    """How work is cut into tiles, and what lies where."""
    return {
        "BN": config.block_n,
        "PART": part_of(config, spec),
        "MOST": config.block_m // STRIP,
        "STAGES": config.stages,
        "WIDTH": config.width,
        "ALIGN": start_multiple(spec),
        "MASKED": spec.form == "masked",
        "A_ORDER": spec.a.order,
        "B_ORDER": spec.b.order,
    }


def _end_constants(spec: ProblemSpec, config: Config, form: Form) -> dict[str, Any]:
    """What becomes of a sum, and how it is stored."""
    return {
        "STORE": store_of(spec),
        "C": spec.c.order if spec.c else None,
        "BIAS": None if spec.bias is None else "down" if form == "jagged_n" else "across",
        "ALPHA": spec.alpha,
        "ACTIVATION": spec.activation,
        "LATE": stores_late(spec, config),
    }


def _roles(config: Config) -> dict[str, int]:
    """Registers of each role: four warpgroups share 512 per thread, or three of them 504."""
    if config.ahead:
        return {"SEGMENT": SEGMENT, "CONSUMER_REGISTERS": 144, "COPIER_REGISTERS": 176, "PRODUCER_REGISTERS": 48}
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
