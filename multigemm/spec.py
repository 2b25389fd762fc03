"""What a kernel has to know before it sees data: frozen, hashable, and without any data.

Support, configs, plans and tuning keys read a `ProblemSpec` alone. Token counts enter only as
buckets, so that random group sizes never cause a recompilation; strides enter only as classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Form = Literal["per_group", "jagged_m", "jagged_n", "jagged_k", "batched", "masked"]
Order = Literal["row", "col", "strided"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Precision = Literal["ieee", "tf32"]

FORMS: tuple[Form, ...] = ("per_group", "jagged_m", "jagged_n", "jagged_k", "batched", "masked")
ACTIVATIONS: tuple[Activation, ...] = ("relu", "gelu", "gelu_tanh", "silu")
PRECISIONS: tuple[Precision, ...] = ("ieee", "tf32")
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INPUT_DTYPES = (*FLOAT_DTYPES, torch.int8)
GIANT = 2**31 - 2**26
"""From here an extent may be more than a kernel counts in 32 bits with a sign: up to the end of its last tile, and with
the number of its tiles, of 64 rows and more, added where it is cut into even ones."""


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """One operand (for a list: what holds for every matrix in it).

    `order` names the contiguous direction of each matrix: "row" (last stride 1), "col" (the other
    stride 1), else "strided". `align` is the largest power of two, at most 16, that divides the base
    address and every other stride, in bytes. `dense` says that no two elements share an address by
    a zero stride or an overlap, so a tensor map or a leading dimension can express it.
    `shared` says that all groups use the same matrix. `wide` says that some element lies 2^31
    elements or more from the base, or that a row or column has such a number, so that 64-bit
    addressing is needed.
    """

    dtype: torch.dtype
    order: Order = "row"
    align: int = 16
    dense: bool = True
    shared: bool = False
    wide: bool = False


@dataclass(frozen=True, slots=True)
class ProblemSpec:
    """A grouped GEMM without its data. `None` extents differ by group or are known only at run time.

    `m, n, k` are the extents that all groups share. `total` is the bucket (a power of two, rounded
    up) of the jagged extent T, of the sum of M over a list, or of G*M. `largest` is the bucket of
    the largest M of a group where the host knows it (lists, batched), else 0.
    `compute` is the dtype that products are formed in; it equals both operand dtypes once staged.
    `longest` is the longest extent of any group, T or the number of groups, itself, where it reaches GIANT, else 0:
    a bucket says too little to refuse a problem by, and a list's N and K have none.
    """

    form: Form
    groups: int
    m: int | None
    n: int | None
    k: int | None
    total: int
    largest: int
    a: OperandSpec
    b: OperandSpec
    out: OperandSpec
    c: OperandSpec | None = None
    bias: torch.dtype | None = None
    compute: torch.dtype = torch.float32
    alpha: Literal["zero", "one", "any"] = "one"
    activation: Activation | None = None
    precision: Precision = "ieee"
    deterministic: bool = True
    index: torch.dtype | None = None
    device_sizes: bool = False
    zero_unowned: bool = True
    longest: int = 0

    @property
    def jagged(self) -> Literal["m", "n", "k"] | None:
        """The direction that offsets cut, or None."""
        return {"jagged_m": "m", "jagged_n": "n", "jagged_k": "k"}.get(self.form)  # type: ignore[return-value]

    @property
    def too_long(self) -> list[str]:
        """Why kernels that count extents in 32 bits with a sign cannot run this; empty if they can."""
        if not self.longest:
            return []
        return [f"an extent of {self.longest}: kernels count less than {GIANT} in 31 bits: split the problem"]

    def busiest(self, high: int, wide: int, processors: int) -> int:
        """Elements of the result that the processor with most tiles of this size makes, if groups are alike."""
        rows, columns = max(self.usual("m"), 1), max(self.usual("n"), 1)
        tiles = max(self.groups, 1) * -(-rows // high) * -(-columns // wide)
        return -(-tiles // processors) * high * wide

    def usual(self, direction: Literal["m", "n", "k"]) -> int:
        """An extent of an ordinary group: the mean where offsets cut it, the largest of any where a list's differ."""
        extent: int | None = getattr(self, direction)
        if extent is not None:
            return extent
        return self.total // max(self.groups, 1) if direction == self.jagged else self.largest

    @property
    def acc(self) -> torch.dtype:
        """The accumulator: float64 for float64, int32 for int8, float32 for the rest."""
        return {torch.float64: torch.float64, torch.int8: torch.int32}.get(self.compute, torch.float32)
