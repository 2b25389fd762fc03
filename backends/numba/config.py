"""The configs of this backend's kernels: frozen, hashable, part of every cache key.

`GenericConfig` runs everything; `MmaConfig` (sm_80 and later) and `HopperConfig` (sm_90a) use tensor
cores. A `Signature` is the rest of what a compiled kernel depends on: dtypes, layout classes and
which epilogue operands exist; never sizes, counts or strides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from multigemm.cuda.operand_maps import FAR
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
"""Bytes of k in a stage. Kernels that copy stages pad K to a multiple of it; equal to `ROW_BYTES`."""
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
    sent: bool = False
    """Whether the copy engine stores the results (`is_sent`)."""


def result_and_orders(spec: ProblemSpec) -> dict[str, Any]:
    """The fields that all signatures share. Strided operands count as "row", which costs only coalescing."""
    return {
        "out": NAMES[spec.out.dtype],
        "c": None if spec.c is None else NAMES[spec.c.dtype],
        "bias": None if spec.bias is None else NAMES[spec.bias],
        "activation": spec.activation,
        "zero_unowned": zeroes(spec),
        "a_order": "col" if spec.a.order == "col" else "row",
        "b_order": "col" if spec.b.order == "col" else "row",
    }


def signature_of(spec: ProblemSpec) -> Signature:
    """The signature of a kernel for plain numbers."""
    return Signature(
        compute=NAMES[spec.compute],
        **result_and_orders(spec),
        plain=is_plain(spec),
        ragged_k=spec.form == "jagged_k",
        a_aligned=_aligned(spec.a) and not a_inner_jagged(spec),
        b_aligned=_aligned(spec.b) and not b_inner_jagged(spec),
        sent=is_sent(spec),
    )


def float8_signature_of(spec: ProblemSpec) -> Float8Signature:
    """The signature of the Hopper kernel for float8."""
    names = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
    return Float8Signature(
        compute="i8", out="f16" if spec.out.dtype is torch.float16 else "bf16", c=None, bias=None, activation=None,
        zero_unowned=True, a_order="row", b_order="col", a=names[spec.a.dtype], b=names[spec.b.dtype],
        scales=_scales_of(spec),
    )  # fmt: skip


def _scales_of(spec: ProblemSpec) -> Literal["whole", "blocks", "columns"]:
    if all(x.scale is None or x.scale.k == 0 for x in (spec.a, spec.b)):
        return "whole"
    return "columns" if spec.b.scale is not None and spec.b.scale.rows == 1 else "blocks"


def a_inner_jagged(spec: ProblemSpec) -> bool:
    """Whether a group may start anywhere inside a contiguous run of A, so at an unaligned address."""
    return spec.form == {"row": "jagged_k", "col": "jagged_m"}.get(spec.a.order)


def b_inner_jagged(spec: ProblemSpec) -> bool:
    """Whether a group may start anywhere inside a contiguous run of B, so at an unaligned address."""
    return spec.form == {"row": "jagged_n", "col": "jagged_k"}.get(spec.b.order)


def _aligned(operand: OperandSpec) -> bool:
    return operand.order != "strided" and operand.align >= VECTOR


def is_plain(spec: ProblemSpec) -> bool:
    """Whether the epilogue only rounds."""
    return spec.alpha == "one" and spec.c is None and spec.bias is None and spec.activation is None


def is_sent(spec: ProblemSpec) -> bool:
    """Whether the Hopper kernel's results leave by the copy engine (TMA): 16 bits in lines of whole 16-byte pieces."""
    known = spec.form in ("jagged_m", "jagged_k", "batched", "masked") and not (
        spec.form == "jagged_m" and spec.total > FAR
    )
    whole = spec.out.order == "row" and spec.out.align >= VECTOR and (spec.n or 1) % (VECTOR // 2) == 0
    return known and whole and is_plain(spec) and spec.out.dtype == spec.compute and spec.out.dtype.itemsize == 2


def zeroes(spec: ProblemSpec) -> bool:
    """Whether the kernel writes zeros where no group owns the result."""
    return spec.zero_unowned and spec.form in ("jagged_m", "jagged_n", "masked")


@dataclass(frozen=True, slots=True)
class QuantisedSignature:
    """Formats by name: of elements and scales; None for what is absent. The rest is as in `Signature`."""

    a: str
    b: str
    scale_a: str | None
    scale_b: str | None
    zero: str | None
    out: str
    c: str | None
    bias: str | None
    activation: str | None
    zero_unowned: bool
    a_order: str
    b_order: str


@dataclass(frozen=True, slots=True)
class Float8Signature(Signature):
    """The formats of a and b, and their scales; `compute` is "i8", since the way in moves bytes.

    `scales` are "whole" if they hold for all of k, else there are "blocks", or "columns" if columns in a block have
    their own. Of results, only those of the type `out` and without an epilogue take the short way to memory.
    """

    a: str = "e4m3"
    b: str = "e4m3"
    scales: Literal["whole", "blocks", "columns"] = "whole"


@dataclass(frozen=True, slots=True)
class PlainCores:
    """Tiles of bm x bn by steps of bk on plain cores, tm x tn sums for each thread."""

    bm: int = 64
    bn: int = 64
    bk: int = 16
    tm: int = 4
    tn: int = 4

    @property
    def threads(self) -> int:
        return (self.bm // self.tm) * (self.bn // self.tn)


@dataclass(frozen=True, slots=True)
class GenericConfig(PlainCores):
    """The config of the kernel for any problem in plain numbers."""

    kernel: ClassVar[str] = "generic"


@dataclass(frozen=True, slots=True)
class QuantisedConfig(PlainCores):
    """The config of the kernel for quantised operands; bk divides every block of a scale."""

    kernel: ClassVar[str] = "quantised"
    bk: int = 32


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
    """128 columns x up to n_max rows, a ring of `stages` stages of 128 bytes of k, or of more where tiles are lower.

    A tile's rows are multiplied in steps of `step`. `cluster` blocks work on neighbouring columns and share the rows:
    each loads a part for all.
    """

    kernel: ClassVar[str] = "hopper"
    threads: ClassVar[int] = 384
    n_max: int = 256
    stages: int = 4
    step: int = 16
    cluster: int = 2

    @property
    def even(self) -> int:
        """The rows of the pieces that a taller group is cut into are a multiple of this."""
        return 8

    @property
    def variable(self) -> bool:
        """Whether stages are as large as the rows of their tile need."""
        return self.n_max > 128

    @property
    def halves(self) -> bool:
        """Whether the blocks of a cluster take half of a tile's rows each, if its columns are those of one block."""
        return self.cluster == 2


@dataclass(frozen=True, slots=True)
class Float8Config(HopperConfig):
    """The config of the Hopper kernel for float8: of a tile's rows, wgmma takes 64 at a time."""

    kernel: ClassVar[str] = "hopper_float8"

    @property
    def even(self) -> int:
        return self.n_max

    @property
    def variable(self) -> bool:
        return False

    @property
    def halves(self) -> bool:
        return False


HOPPER = HopperConfig()
HOPPER_MEDIUM = HopperConfig(128, 6)
HOPPER_NARROW = HopperConfig(64, 8, 8)
MMA = MmaConfig()
MMA_SMALL = MmaConfig(64, 64, 4)
MMA_TALL = MmaConfig(128, 64, 4)
FMA_SMALL = MmaConfig(64, 64, 4, tensor=False)
FMA_TALL = MmaConfig(128, 64, 4, tensor=False)
GENERIC = GenericConfig()
GENERIC_LARGE = GenericConfig(128, 128, 8, 8, 8)
GENERIC_LOW = GenericConfig(32, 32, 32, 4, 4)
GENERIC_EMULATED = GenericConfig(8, 8, 8, 4, 4)
FLOAT8_TALL = Float8Config()
FLOAT8_MEDIUM = Float8Config(128, 6, 16)
FLOAT8_LOW = Float8Config(64, 8, 8, cluster=1)
QUANTISED = QuantisedConfig()
QUANTISED_FEW = QuantisedConfig(16, 64, 32, 2, 2)
QUANTISED_EMULATED = QuantisedConfig(8, 8, 32, 4, 4)

Config = GenericConfig | QuantisedConfig | MmaConfig | HopperConfig


def summation_of(config: Config, spec: ProblemSpec) -> Summation:
    """How a config sums: no kernel cuts K into parts."""
    if spec.compute == torch.int8:
        return INTEGERS
    if isinstance(config, GenericConfig | QuantisedConfig):
        return Summation("fused multiply-add", padded=config.bk, epilogue="compiled for the operands")
    if spec.compute == torch.float64 or (isinstance(config, MmaConfig) and not config.tensor):
        return Summation("fused multiply-add", padded=STAGE_BYTES // spec.compute.itemsize)
    if isinstance(config, Float8Config):
        return Summation("wgmma", 32)
    unit: Literal["mma.sync", "wgmma"] = "wgmma" if isinstance(config, HopperConfig) else "mma.sync"
    return Summation(unit, 8 if spec.compute == torch.float32 else 16)


def effective(config: Config, signature: Signature) -> Signature:
    """The signature with everything that this kernel ignores set to one value, so that it is compiled once."""
    if isinstance(config, GenericConfig):
        return replace(signature, ragged_k=False, plain=True, a_aligned=True, b_aligned=True, sent=False)
    # The tensor-core kernels decide on the epilogue at run time.
    signature = replace(
        signature, out=signature.compute, c=None, bias=None, activation=None, zero_unowned=True, plain=True
    )
    if isinstance(config, HopperConfig):
        return replace(signature, a_aligned=True, b_aligned=True)
    return replace(signature, ragged_k=False, sent=False)


# Where the tensor-core kernels keep what in shared memory; read by the kernels and by their launches.

ROW_BYTES = 128
"""Bytes of k, or of the rows' own dimension, that lie side by side: the width of a swizzle."""
SIZE = {"f16": 2, "bf16": 2, "tf32": 4, "i8": 1, "f64": 8, "f32": 4}
"""Bytes of an element, by the kind of product; "f32" is the one without tensor cores."""

# The sm_80 kernel.

KEPT_COLUMNS = 64
"""Columns of C that a warp keeps in registers; `kept_rows` says how many rows."""
WARPS = 4
THREADS = WARPS * 32
ALIGNMENT = 128


def kept_rows(config: MmaConfig) -> int:
    """The rows of C that a warp keeps: warps first divide the columns, then the rows."""
    return config.bm * (config.bn // KEPT_COLUMNS) // WARPS


def piece_step(kind: str) -> int:
    """The multiple at which a tile's first row lies: 16 bytes are copied at once if rows are contiguous."""
    return max(8, 16 // SIZE[kind])


def staging_bytes(config: MmaConfig, sum_size: int) -> int:
    """The bytes for all sums of a warp on their way to memory."""
    return kept_rows(config) * KEPT_COLUMNS * sum_size


def shared_bytes(config: MmaConfig) -> int:
    """The bytes of the stages, in which all warps' `staging_bytes` fit later, and of aligning their base at worst."""
    return config.stages * (config.bm + config.bn) * ROW_BYTES + ALIGNMENT - 16


# The Hopper kernel.

COLUMNS = 128
WEIGHT_BYTES = COLUMNS * ROW_BYTES
STAGING_BYTES = 8192
"""For the results of each of two warpgroups; twice as many for float8, of which 128 columns leave together."""
SLOTS = 4
"""Tiles that are announced ahead."""
RECORD_BYTES = 32
HOPPER_ALIGNMENT = 1024
MOST_BOX_ROWS = 128
BOX_STEP = 8
"""Of the heights of the boxes that rows come in, up to MOST_BOX_ROWS."""
B_MAP, OUT_MAP, A_MAP = 0, 1, 2
"""The order of tensor maps: B, results, and A in boxes of every height (or one, where A lies across k)."""
MAPS = A_MAP + MOST_BOX_ROWS // BOX_STEP
"""The maps of a packed form. A group of a list has LISTED_MAPS: all of its tiles take boxes of one height."""
LISTED_MAPS = 3
MOST_GROUPS = 1 << 29
"""Groups that a tile's record can number, since the two bits above are marks (`kernels/hopper_tiles.py`)."""
FAST_MEMORY = 4e12
"""Bytes per second of memory from which low tiles have more stages in flight whatever their k, else up to LONG_K:
cupy's kernel, 27 workloads with K above 5120, took 0.975 of the time on an H200 (4.8e12) and 1.012 on an H100
(3.4e12)."""
LONG_K, ANY_K = 5120, 2**31 - 1


class Layout:
    """Byte offsets from the aligned base; `bk` elements of k fill one stage."""

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        float8 = isinstance(config, Float8Config)
        self.kind = "tf32" if signature.compute == "f32" else signature.compute
        self.bk = ROW_BYTES // SIZE[signature.compute]
        self.stage_bytes = WEIGHT_BYTES + config.n_max * ROW_BYTES
        self.ring_bytes = config.stages * self.stage_bytes
        lowest = WEIGHT_BYTES + config.step * ROW_BYTES
        self.places = self.ring_bytes // lowest + 1 if config.variable else config.stages
        """Stages at most, each with two barriers."""
        self.runs = 128 if float8 else 384
        """Runs of groups whose tiles are counted."""
        self.staging = self.ring_bytes
        self.staging_bytes = STAGING_BYTES * (2 if float8 else 1)
        self.records = self.staging + 2 * self.staging_bytes
        self.counts = self.records + SLOTS * RECORD_BYTES
        self.sums = self.counts + self.runs * 8
        self.full = self.sums + 12 * 8
        self.empty = self.full + self.places * 8
        self.tile_full = self.empty + self.places * 8
        self.tile_empty = self.tile_full + SLOTS * 8
        self.ask = self.tile_empty + SLOTS * 8
        self.begins = self.ask + 8
        self.end = self.begins + (2 * self.places * 4 if config.variable else 0)

    @property
    def bytes(self) -> int:
        """The dynamic shared memory in bytes: the layout, and at worst what aligning its base takes."""
        return self.end + HOPPER_ALIGNMENT - 16
