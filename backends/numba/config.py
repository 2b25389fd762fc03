"""What can be chosen about a kernel of this backend: frozen, hashable, part of every cache key.

`SimtConfig` runs everything; `MmaConfig` (sm_80 and later) and `HopperConfig` (sm_90a) use tensor
cores. A `Signature` is the rest of what a compiled kernel depends on: dtypes, layout classes and
which epilogue operands exist; never sizes, counts or strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from multigemm.spec import ProblemSpec

NAMES = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int8: "i8",
    torch.int32: "i32",
}


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
    )


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
class HopperConfig:
    """128 columns x up to n_max rows (in steps of `step`), a ring of `stages` stages of 128 bytes of k."""

    kernel: ClassVar[str] = "hopper"
    threads: ClassVar[int] = 384
    n_max: int = 256
    stages: int = 4
    step: int = 32


HOPPER = HopperConfig()
HOPPER_MEDIUM = HopperConfig(128, 6)
HOPPER_NARROW = HopperConfig(64, 8)
SIMT = SimtConfig()
SIMT_LARGE = SimtConfig(128, 128, 8, 8, 8)
SIMT_EMULATED = SimtConfig(8, 8, 8, 4, 4)

Config = SimtConfig | HopperConfig
