"""The variants of calling the library, as configs: what each writes and reads, and what its grouped calls cannot
run.

`auto` decides when sizes are known: two problems of one spec, one with even groups and one with
skewed ones, want different calls. Every other variant is forced. `scaled_grouped_mm` is the one for float8 operands,
and for them alone (`multigemm.backends.cublas.scaled_grouped_mm`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from multigemm.problem.spec import OperandSpec, ProblemSpec

Variant = Literal["auto", "loop", "streams", "batched", "grouped", "grouped_mm", "scaled_grouped_mm"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
LARGEST_GROUPED_MM = 1023
ALIGNMENT = 16
"""Bytes that addresses and leading dimensions are multiples of where a call reads addresses on the device."""
SIXTEEN_BIT = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Config:
    """A variant. `streams` is the number of streams of the variant `streams`, including the current one; 0 for other
    variants."""

    variant: Variant = "auto"
    streams: int = 0


def library_out(spec: ProblemSpec) -> torch.dtype:
    """The result dtype nearest to `out`'s that the library can write from this compute type."""
    if spec.compute in SIXTEEN_BIT:
        return spec.out.dtype if spec.out.dtype in (spec.compute, torch.float32) else torch.float32
    return spec.acc


def plain(spec: ProblemSpec) -> bool:
    """Whether the library alone can finish the result: no activation, one rounding, and at most one summand.

    The library adds to what is in the result: c, or a bias that is written there first without rounding. For 16-bit
    results it cannot, because some of its kernels round the product before they add.
    """
    if spec.activation is not None or spec.out.dtype != library_out(spec):
        return False
    if spec.out.dtype != spec.acc:
        return spec.bias is None and spec.c is None
    if spec.bias is not None:
        return spec.c is None and torch.promote_types(spec.bias, spec.out.dtype) == spec.out.dtype
    return spec.c is None or spec.c.dtype == spec.out.dtype


def result_type(spec: ProblemSpec) -> torch.dtype:
    """What the library writes: out itself, or a wide intermediate that the epilogue rounds once."""
    return spec.out.dtype if plain(spec) else spec.acc


def whole(spec: ProblemSpec) -> bool:
    """Whether all groups use one weight, so that the packed operands are a single product."""
    return (spec.form == "jagged_m" and spec.b.shared) or (spec.form == "jagged_n" and spec.a.shared)


def reads_sizes(spec: ProblemSpec, variant: Variant) -> bool:
    """Whether the library's own calls have to read sizes back from the device."""
    if not spec.device_sizes or spec.alpha == "zero":
        return False
    everything = spec.form == "masked" or whole(spec)
    return not (everything and variant in ("auto", "loop", "batched"))


def grouped_reasons(spec: ProblemSpec) -> list[str]:
    """Why cublasGemmGroupedBatchedEx cannot run this spec; empty if it can."""
    if spec.compute is torch.int8:
        return ["cublasGemmGroupedBatchedEx has no int8; use variant 'batched'"]
    if spec.compute in SIXTEEN_BIT and result_type(spec) != spec.compute:
        return [f"cublasGemmGroupedBatchedEx writes {spec.compute} from {spec.compute}, not the float32 that "
                "this output type or epilogue needs; use variant 'batched'"]  # fmt: skip
    if not steady(spec):
        return ["cublasGemmGroupedBatchedEx faults on addresses and leading dimensions that are no multiples of "
                f"{ALIGNMENT} bytes; use variant 'batched'"]  # fmt: skip
    return []


def aligned(operand: OperandSpec) -> bool:
    """Whether base and strides are aligned and a leading dimension can express them."""
    return operand.align >= ALIGNMENT and operand.dense and operand.order != "strided"


def steady(spec: ProblemSpec) -> bool:
    """Whether every group's matrices start at aligned addresses wherever groups are cut. For packed copies they may
    not."""
    along = {"jagged_m": (("row",), "", ("row",)), "jagged_n": ("", ("col",), ("col",)),
             "jagged_k": (("col",), ("row",), "")}.get(spec.form, ("", "", ""))  # fmt: skip
    if spec.form == "jagged_n" and result_type(spec) != spec.out.dtype:
        return False  # columns of an intermediate result, which lies by rows
    operands = (spec.a, spec.b, spec.out) if result_type(spec) == spec.out.dtype else (spec.a, spec.b)
    return all(aligned(o) and o.order in (orders or ("row", "col")) for o, orders in zip(operands, along, strict=False))


def grouped_mm_reasons(spec: ProblemSpec, device: torch.device) -> list[str]:
    """Why torch's grouped_mm cannot run this spec without a loop inside; empty if it can."""
    reasons = []
    if spec.compute is not torch.bfloat16 or spec.out.dtype is not torch.bfloat16:
        reasons.append(f"grouped_mm is bfloat16 to bfloat16 only, this is {spec.compute} to {spec.out.dtype}")
    if spec.form not in ("jagged_m", "jagged_k"):
        reasons.append(f"grouped_mm runs jagged m and jagged k, not {spec.form}")
    if spec.bias is not None or spec.activation or spec.c is not None or spec.alpha == "any":
        reasons.append("grouped_mm has no epilogue; use variant 'batched'")
    if not 1 <= spec.groups <= LARGEST_GROUPED_MM:
        reasons.append(f"grouped_mm takes 1 to {LARGEST_GROUPED_MM} groups, got {spec.groups}")
    wanted_a = "col" if spec.form == "jagged_k" else "row"
    if spec.a.order != wanted_a or spec.b.order == "strided" or (wanted_a == "col" and spec.b.order != "row"):
        reasons.append(f"grouped_mm needs a by {wanted_a}s; got {spec.a.order}, {spec.b.order}")
    operands = (spec.a, spec.b, spec.out)
    if spec.out.order != "row" or any(o.align < 16 or not o.dense for o in operands):
        reasons.append("grouped_mm needs an output by rows, and bases and strides that are multiples of 16 bytes")
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (9, 10):
        reasons.append("grouped_mm has its one-launch kernel on compute capability 9.x and 10.x only")
    return reasons
