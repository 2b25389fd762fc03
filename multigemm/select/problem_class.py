"""The class of a problem: all problems that use the backend and config that were measured for one of them.

A class holds what decides which kernel is fastest and what a model never changes: form, dtypes, memory orders,
alignment, exact N and K, where the sizes lie. Token counts and groups enter as buckets, so that serving traffic meets
few classes. A bucket of tokens spans half an octave: within it the fastest backend hardly changes. Nothing of a
backend or of its configs is part of a class.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from multigemm.planning.staging import equal_sizes, staged_spec
from multigemm.problem.arrays import dtype_name
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import OperandSpec, ProblemSpec, bucket, half_octave

ON_DEVICE, ON_HOST, EQUAL = "device-sizes", "host-sizes", "equal-sizes"


@dataclass(frozen=True, slots=True)
class ProblemClass:
    """The fields of a class; `str()` of it is what tables and the cache hold.

    `m`, `n` and `k` are None where groups differ in them or where they count tokens; `groups` is a power of two and
    `total` a `half_octave` of the tokens of all groups, each at or above the true number. `a`, `b` and `out` tell
    dtype, order and alignment as in "bfloat16/row8/shared". `precision` has "+gather", "+gate" and "+combine" where
    rows are picked, gated and summed, and ends in "+epilogue" where the product is not all that is asked for. `where`
    tells where the sizes lie; "equal-sizes" are on the host, and all the same.
    """

    form: str
    groups: int
    m: int | None
    n: int | None
    k: int | None
    total: int
    a: str
    b: str
    out: str
    precision: str
    where: str

    def __str__(self) -> str:
        m, n, k = ("*" if extent is None else extent for extent in (self.m, self.n, self.k))
        sizes = f"g{self.groups} m{m} n{n} k{k} t{self.total}"
        return f"{self.form} {sizes} {self.a} {self.b} {self.out} {self.precision} {self.where}"

    @property
    def dtype(self) -> str:
        """The dtype of the products; "tf32" where float32 is rounded to it."""
        dtype = self.a.partition("/")[0]
        return "tf32" if dtype == "float32" and self.precision.startswith("tf32") else dtype

    @property
    def quantised(self) -> bool:
        """Whether operands have scales, or b is narrower than a."""
        a, b = self.a.split("/"), self.b.split("/")
        return a[0] != b[0] or a[0].startswith("float8") or any(part[:1] in ("x", "g") for part in (*a[2:], *b[2:]))

    @property
    def rows(self) -> float:
        """The rows of an average group."""
        return float(self.m) if self.m is not None else self.total / max(self.groups, 1)

    @property
    def unaligned(self) -> bool:
        """Whether some operand has lines that a tensor map cannot describe."""
        return any(x.partition("/")[2].partition("/")[0] not in ("row", "col") for x in (self.a, self.b, self.out))


class Query:
    """The input of a choice: a problem with its staged spec and its class, the config that the caller gave, and whether
    the call is eager, so that the host's time counts."""

    __slots__ = ("config", "eager", "problem", "problem_class", "spec")

    def __init__(self, problem: GroupedGemmProblem, config: Any = None, eager: bool = False) -> None:
        self.problem, self.spec, self.config, self.eager = problem, staged_spec(problem), config, eager
        self.problem_class = _class_of(self.spec, half_octave(_tokens(problem)), equal_sizes(problem))


def _tokens(problem: GroupedGemmProblem) -> int:
    """The number of tokens of all groups: T if offsets cut it, else the sum of M. If a list's N or K differ, the number
    of multiply-adds divided by the extents that all products share."""
    spec = problem.spec
    if problem.extents is not None:
        return problem.extents.along(spec.jagged) if spec.jagged else spec.groups * (spec.m or 0)
    return problem.flops // (2 * (spec.n or 1) * (spec.k or 1))


@lru_cache(maxsize=4096)
def _class_of(spec: ProblemSpec, total: int, equal: bool) -> ProblemClass:
    return ProblemClass(
        spec.form,
        bucket(spec.groups),
        spec.m if spec.form in ("jagged_n", "jagged_k") else None,
        spec.n or None,
        spec.k or None,
        total,
        _operand(spec.a),
        _operand(spec.b),
        _operand(spec.out),
        _precision(spec),
        ON_DEVICE if spec.device_sizes else EQUAL if equal else ON_HOST,
    )


def _precision(spec: ProblemSpec) -> str:
    """The precision, and what accompanies the product: gathers, a gate, sums of rows, another epilogue."""
    words: list[str] = [spec.precision] if spec.accumulate == "promoted" else [spec.precision, spec.accumulate]
    plain = spec.c is None and spec.bias is None and spec.activation is None
    if (fused := spec.fused) is not None:
        gathers = fused.a_rows is not None or fused.b_rows is not None
        named = (("gather", gathers), ("gate", bool(fused.layout)), ("combine", fused.scatters))
        words += [word for word, present in named if present]
        plain = plain and fused.preact is None and fused.row_scale is None
    return "+".join(words if plain else [*words, "epilogue"])


def _operand(x: OperandSpec) -> str:
    short = x.packed or dtype_name(x.dtype)
    return f"{short}/{x.order}{'' if x.align >= 16 else x.align}{'/shared' if x.shared else ''}{_scale(x)}"


def _scale(x: OperandSpec) -> str:
    """What a scale covers, as text: "/x1x128" is one number for each line and 128 of K; "0" means all of an axis."""
    if (s := x.scale) is None:
        return ""
    short = {torch.float32: "", torch.float8_e8m0fnu: "e8m0"}.get(s.dtype, dtype_name(s.dtype))
    zero = "" if s.zero is None else "z"
    return f"/{'g' if s.by_group else ''}x{s.rows}x{s.k}{short}{zero}"
