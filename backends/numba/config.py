"""What can be chosen about a kernel of this backend: frozen, hashable, part of every cache key.

`SimtConfig` runs everything; `MmaConfig` (sm_80 and later) and `HopperConfig` (sm_90a) use tensor
cores. A `Signature` is the rest of what a compiled kernel depends on: dtypes, layout classes and
which epilogue operands exist; never sizes, counts or strides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from multigemm.cuda.summation import INTEGERS, Summation
from multigemm.problem.spec import OperandSpec, ProblemSpec

NAMES = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int8: "i8",
    torch.int32: "i32",
}

STAGE_BYTES = 128
"""Of k, to a multiple of which the kernels that copy stages fill K up; as layout.ROW_BYTES."""
VECTOR = 16
"""Bytes of the widest copy, to which fast operands are aligned."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Dtypes by short name; None for an operand that is absent."""

    compute: str
    out: str
    c: str | None
    bias: str | None
    activation: str | None
    zero_unowned: bool
    a_order: str
    b_order: str
    plain: bool = True
    ragged_k: bool = False
    a_aligned: bool = True
    b_aligned: bool = True


def signature_of(spec: ProblemSpec) -> Signature:
    """Strided operands count as "row": a kernel that is told so only loses coalescing."""
    return Signature(
        compute=NAMES[spec.compute],
        out=NAMES[spec.out.dtype],
        c=None if spec.c is None else NAMES[spec.c.dtype],
        bias=None if spec.bias is None else NAMES[spec.bias],
        activation=spec.activation,
        zero_unowned=spec.zero_unowned and spec.form in ("jagged_m", "jagged_n", "masked"),
        a_order="col" if spec.a.order == "col" else "row",
        b_order="col" if spec.b.order == "col" else "row",
        plain=spec.alpha == "one" and spec.c is None and spec.bias is None and spec.activation is None,
        ragged_k=spec.form == "jagged_k",
        a_aligned=_aligned(spec.a) and not a_inner_jagged(spec),
        b_aligned=_aligned(spec.b) and not b_inner_jagged(spec),
    )


def a_inner_jagged(spec: ProblemSpec) -> bool:
    """Whether a group may start anywhere inside a contiguous run of A, so at no aligned address."""
    return spec.form == {"row": "jagged_k", "col": "jagged_m"}.get(spec.a.order)


def b_inner_jagged(spec: ProblemSpec) -> bool:
    """The same for B."""
    return spec.form == {"row": "jagged_n", "col": "jagged_k"}.get(spec.b.order)


def _aligned(operand: OperandSpec) -> bool:
    return operand.order != "strided" and operand.align >= VECTOR


@dataclass(frozen=True, slots=True)
class SimtConfig:
    """Tiles of bm x bn x bk on plain cores, tm x tn sums for each thread."""

    kernel: ClassVar[str] = "simt"
    bm: int = 64
    bn: int = 64
    bk: int = 16
    tm: int = 4
    tn: int = 4

    @property
    def threads(self) -> int:
        return (self.bm // self.tm) * (self.bn // self.tn)


@dataclass(frozen=True, slots=True)
class MmaConfig:
    """Tiles of bm x bn by mma.sync, `stages` stages of 128 bytes of k; bn is 64 or 128.

    Without `tensor` the products are float32's own, on plain cores, which keeps IEEE precision.
    """

    kernel: ClassVar[str] = "mma"
    threads: ClassVar[int] = 128
    bm: int = 128
    bn: int = 128
    stages: int = 3
    tensor: bool = True


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """128 columns x up to n_max rows (in steps of `step`), a ring of `stages` stages of 128 bytes of k.

    `cluster` blocks work on neighbouring columns and share the rows: each loads a part for all.
    """

    kernel: ClassVar[str] = "hopper"
    threads: ClassVar[int] = 384
    n_max: int = 256
    stages: int = 4
    step: int = 32
    cluster: int = 2


HOPPER = HopperConfig()
HOPPER_MEDIUM = HopperConfig(128, 6, 16, cluster=1)
HOPPER_NARROW = HopperConfig(64, 8, 8, cluster=1)
MMA = MmaConfig()
MMA_SMALL = MmaConfig(64, 64, 4)
MMA_TALL = MmaConfig(128, 64, 4)
FMA_SMALL = MmaConfig(64, 64, 4, tensor=False)
FMA_TALL = MmaConfig(128, 64, 4, tensor=False)
SIMT = SimtConfig()
SIMT_LARGE = SimtConfig(128, 128, 8, 8, 8)
SIMT_LOW = SimtConfig(32, 32, 32, 4, 4)
SIMT_EMULATED = SimtConfig(8, 8, 8, 4, 4)

Config = SimtConfig | MmaConfig | HopperConfig


def summation_of(config: Config, spec: ProblemSpec) -> Summation:
    """How a config sums: no kernel cuts K into parts."""
    if spec.compute == torch.int8:
        return INTEGERS
    if isinstance(config, SimtConfig):
        return Summation("fused multiply-add", padded=config.bk, epilogue="compiled for the operands")
    if spec.compute == torch.float64 or (isinstance(config, MmaConfig) and not config.tensor):
        return Summation("fused multiply-add", padded=STAGE_BYTES // spec.compute.itemsize)
    unit: Literal["mma.sync", "wgmma"] = "wgmma" if isinstance(config, HopperConfig) else "mma.sync"
    return Summation(unit, 8 if spec.compute == torch.float32 else 16)


def effective(config: Config, signature: Signature) -> Signature:
    """The signature with all that this kernel does not look at set alike, so that it is compiled once."""
    if isinstance(config, SimtConfig):
        return replace(signature, ragged_k=False, plain=True, a_aligned=True, b_aligned=True)
    # The tensor-core kernels decide on the epilogue at run time.
    signature = replace(
        signature, out=signature.compute, c=None, bias=None, activation=None, zero_unowned=True, plain=True
    )
    if isinstance(config, HopperConfig):
        return replace(signature, a_aligned=True, b_aligned=True)
    return replace(signature, ragged_k=False)
