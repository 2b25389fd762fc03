"""The tensors of a workload, and the check of a result of them.

Data are random and never zero: zeros draw less power and let a GPU run up to a fifth faster than on real data.

The reference is a float32 loop in torch on the same device, fast enough to check every case of every run. The bound is
per element: K * 2^-24 * |A||B| for the order of a float32 sum, plus the rounding of the output dtype. The exhaustive
float64 bound is in `multigemm.reference`; this one is for problems of 10^12 operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm import quantize
from multigemm.bench.workloads import E8M0, RECIPES, Recipe, Workload
from multigemm.problem.problem import GroupedGemmProblem, GroupView
from multigemm.problem.scales import as_bytes
from multigemm.problem.spec import BYTE_FORMATS
from multigemm.reference.verify import Answer, answer, judge

Matrices = Tensor | list[Tensor]

POISON_INT = -(2**30)
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


@dataclass
class Tensors:
    """The data of one workload: the arguments of a problem that writes into memory of its own.

    `offsets` [G+1] int32 lie on the device; `host_offsets` may be passed in their place.
    """

    workload: Workload
    arguments: tuple[Any, Any, dict[str, Any]]
    offsets: Tensor | None = None
    host_offsets: npt.NDArray[np.int64] | None = None

    def pose(self, host_sizes: bool = False, **others: Any) -> GroupedGemmProblem:
        """The problem, made anew as a user makes it; with sizes on the host, or with other keywords."""
        a, b, keywords = self.arguments
        cut = {"offsets": self.host_offsets} if host_sizes else {}
        return GroupedGemmProblem(a, b, **{**keywords, **cut, **others})

    @cached_property
    def problem(self) -> GroupedGemmProblem:
        return self.pose()

    @property
    def a(self) -> Matrices:
        return self.problem.a

    @property
    def b(self) -> Matrices:
        return self.problem.b

    @property
    def out(self) -> Matrices:
        out = self.problem.out
        assert out is not None
        return out

    def groups(self) -> Iterator[GroupView]:
        """The operands of each product, as views on the device."""
        return self.problem.groups(on_host=False)

    def products(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """A, B and the part of `out` of each group, for peers that loop over groups."""
        out: Any = self.out
        return [(group.a, group.b, out[group.where]) for group in self.groups()]

    def poison(self) -> None:
        """Overwrites the output with values unlike any answer, so that a kernel that writes nothing is detected."""
        for out in self.out if isinstance(self.out, list) else [self.out]:
            out.fill_(poison_of(out.dtype))

    def reference(self) -> Truth:
        """The expected answer with its per-element bounds."""
        return _reference(self)


def poison_of(dtype: torch.dtype) -> float:
    """NaN, or an integer that no sum comes near."""
    return float("nan") if dtype.is_floating_point else POISON_INT


@dataclass
class _Maker:
    """Draws matrices of one dtype, or quantised ones, from one seeded source. Quantised elements are drawn, not
    quantised: normal numbers in float8, any code of 4 bits, and scales between 0.5 and 1.5. Scales that are powers of
    two lie between 2^-8 and 2^-4, as those of weights of a variance of 1 / K do."""

    workload: Workload
    device: torch.device
    source: torch.Generator
    drawn: bool

    def matrix(self, *shape: int, transposed: bool = False) -> Tensor:
        """Normal values (small integers for int8); `transposed` keeps the shape and swaps the memory order."""
        memory = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        dtype = self.workload.torch_dtype
        if not self.drawn:
            values = torch.empty(memory, dtype=dtype, device=self.device)
        elif dtype == torch.int8:
            values = torch.randint(-8, 9, memory, dtype=dtype, generator=self.source, device=self.device)
        else:
            values = torch.randn(memory, dtype=dtype, generator=self.source, device=self.device)
        return values.transpose(-1, -2) if transposed else values

    def bias(self, columns: int) -> Tensor | None:
        """Of the operands' dtype; int32 beside int8."""
        w = self.workload
        return self.matrix(columns).to(torch.int32 if w.dtype == "int8" else w.torch_dtype) if w.bias else None

    def empty(self, *shape: int) -> Tensor:
        dtype = self.workload.out_dtype
        empty = torch.empty(shape, dtype=dtype, device=self.device)
        return empty.fill_(poison_of(dtype)) if self.drawn else empty

    def codes(self, format: str, *shape: int) -> Tensor:
        """Codes of a format [.., lines, K], with half as many bytes along K if one holds two; bfloat16 for ""."""
        if format in BYTE_FORMATS or format == "int8":
            shape = (*shape[:-1], shape[-1] // 2) if format in BYTE_FORMATS else shape
            codes = torch.empty(shape, dtype=torch.uint8, device=self.device)
            if self.drawn:
                codes = codes.random_(0, 256, generator=self.source)
            return codes.view(torch.int8) if format == "int8" else codes
        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        if self.drawn:
            values = values.normal_(generator=self.source)
        return values.to(quantize.FLOATS[format]) if format else values

    def scale(self, recipe: Recipe, *shape: int, tokens: bool = False) -> Tensor:
        """Scales [.., lines, entries along K]; scales of `tokens` are contiguous along the lines."""
        memory = (*shape[:-2], shape[-1], shape[-2]) if tokens else shape
        numbers = torch.ones(memory, device=self.device)
        if self.drawn:
            numbers = numbers.uniform_(0.5, 1.5, generator=self.source)
        if recipe.scale is E8M0:
            numbers = torch.exp2((numbers * 4 - 10).round()).to(E8M0)
        return numbers.mT if tokens else numbers


def make(workload: Workload, device: torch.device | str, drawn: bool = True) -> Tensors:
    """Makes seeded random tensors of a workload on a device; `out` is poisoned. With `drawn` False the operands are
    left uninitialised."""
    w, where = workload, torch.device(device)
    maker = _Maker(w, where, torch.Generator(where).manual_seed(w.seed + 1), drawn)
    a, b, keywords = _list(w, maker) if w.products else _packed(w, maker) if w.recipe is None else _quantised(w, maker)
    offsets = host = None
    if w.form.startswith("jagged"):
        host = np.concatenate([[0], np.cumsum(w.sizes)]).astype(np.int64)
        offsets = torch.tensor(host, dtype=torch.int32, device=where)
        keywords |= {"jagged": w.form[-1], "offsets": offsets}
    if w.form == "masked":
        keywords["valid_rows"] = torch.tensor(w.sizes, dtype=torch.int32, device=where)
    if w.dtype == "tf32":
        keywords["precision"] = "tf32"
    return Tensors(w, (a, b, keywords), offsets, host if w.recipe is None else None)


def _packed(w: Workload, maker: _Maker) -> tuple[Any, Any, dict[str, Any]]:
    of_a, of_b, of_out = w.shapes
    a, b = maker.matrix(*of_a, transposed=w.trans_a), maker.matrix(*of_b, transposed=w.trans_b)
    return a, b, {"out": maker.empty(*of_out), "bias": maker.bias(of_out[-1])}


def _list(w: Workload, maker: _Maker) -> tuple[Any, Any, dict[str, Any]]:
    """A list of tensors. Equal products are members of one tensor, as programs that batch them have them. As separate
    tensors they would cost some libraries a table of addresses, and layouts would be compared instead of kernels."""
    count = len(w.products)
    if len(set(w.products)) == 1 and not w.shared_b:
        m, n, k = w.products[0]
        a = list(maker.matrix(count, m, k, transposed=w.trans_a))
        b = list(maker.matrix(count, k, n, transposed=w.trans_b))
        out = list(maker.empty(count, m, n))
    else:
        a = [maker.matrix(m, k, transposed=w.trans_a) for m, _, k in w.products]
        b = [maker.matrix(k, n, transposed=w.trans_b) for _, n, k in w.products[: 1 if w.shared_b else None]]
        b *= count if w.shared_b else 1
        out = [maker.empty(m, n) for m, n, _ in w.products]
    return a, b, {"out": out, "bias": [maker.bias(n) for _, n, _ in w.products] if w.bias else None}


def _quantised(w: Workload, maker: _Maker) -> tuple[Any, Any, dict[str, Any]]:
    """Quantised operands with scales."""
    r, total, jagged_k = w.recipe, int(w.sizes.sum()), w.form == "jagged_k"
    assert r is not None
    k = total if jagged_k else w.k
    deep = 1 if not r.block else k // r.block + w.groups if jagged_k else -(-k // r.block)
    rows = (total,) if w.form == "jagged_m" else (w.m,) if jagged_k else (w.groups, w.m)
    columns = (w.n,) if jagged_k else (w.groups, w.n)
    if jagged_k:  # operands as a training step has them: tokens are rows
        a, b = maker.codes(r.a, total, w.m).mT, maker.codes(r.b, total, w.n)
    else:
        a, b = maker.codes(r.a, *rows, k), maker.codes(r.b, *columns, k).mT
    scale_a = maker.scale(r, *rows, deep, tokens=True) if r.a else None
    per = columns if r.columns == 1 else (*columns[:-1], -(-w.n // r.columns))
    scale_b = maker.scale(r, *per, deep, tokens=jagged_k).mT
    packed = r.b if r.b in BYTE_FORMATS else None
    return a, b, {"scale_a": scale_a, "scale_b": scale_b, "b_format": packed, "out": maker.empty(*w.shapes[2])}


# --- is a result right? ---------------------------------------------------------------------------


class Truth(Protocol):
    """A condition that a right result must satisfy, computed once for all entries."""

    def verdict(self, out: Matrices) -> str: ...


class Expected(NamedTuple):
    """The product of one group: its place in the result, the right values, and a bound for each."""

    where: Any
    want: Tensor
    bound: Tensor

    def wrong(self, out: Any) -> Tensor:
        """Whether each element is beyond its bound, as NaN always is."""
        got: Tensor = out[self.where]
        return ~((got.to(self.want.dtype) - self.want).abs() <= self.bound)


@dataclass
class Reference:
    """The expected products of all groups."""

    groups: list[Expected]

    def verdict(self, out: Matrices) -> str:
        """Describes the first wrong group; "" if every element is within its bound."""
        counts = [group.wrong(out).sum() for group in self.groups]
        wrong = torch.stack(counts).tolist() if counts else []  # one read for all groups
        return next((self._described(g, out, int(count)) for g, count in enumerate(wrong) if count), "")

    def _described(self, g: int, out: Any, count: int) -> str:
        where, want, bound = self.groups[g]
        got, off = out[where], self.groups[g].wrong(out)
        i, j = divmod(int(off.flatten().int().argmax()), want.shape[1])
        return (
            f"wrong answer: group {g} of shape {tuple(want.shape)}, {count} elements off; at [{i},{j}] "
            f"{float(got[i, j]):.6g} instead of {float(want[i, j]):.6g} "
            f"(bound {float(bound.expand_as(want)[i, j]):.3g})"
        )


def is_plain(problem: GroupedGemmProblem) -> bool:
    """Whether a problem is only products in one dtype, perhaps of floats with a bias, whose groups start at the first
    row."""
    spec, dtype = problem.spec, problem.spec.a.dtype
    whole = dtype == torch.int8
    follows = problem.c is not None or problem.activation is not None or (whole and problem.bias is not None)
    late = problem.grouping is not None and int(problem.grouping.read()[0]) > 0
    result = torch.int32 if whole else dtype
    return not (follows or late) and problem.alpha == 1 and (spec.b.dtype, problem.out_dtype) == (dtype, result)


@dataclass
class Exact:
    """The exhaustive reference of the package, for a user's problem that is no plain product. Slow."""

    answer: Answer

    def verdict(self, out: Matrices) -> str:
        found = judge(self.answer, out)
        return "" if found.ok else f"wrong answer: {found.text}"


def _reference(tensors: Tensors) -> Truth:
    workload, found = tensors.workload, list[Expected]()
    if workload.recipe is None and not is_plain(tensors.problem):
        return Exact(answer(tensors.problem))
    with float32_precision("highest"):
        for group in tensors.groups():
            if workload.recipe is not None:
                want, bound = _quantised_product(group, workload, tensors.problem.spec.b.packed)
            else:
                want, bound = _product(group.a, group.b, group.bias, workload.dtype, workload.out_dtype)
            found.append(Expected(group.where, want, bound))
    return Reference(found)


def _product(a: Tensor, b: Tensor, bias: Tensor | None, dtype: str, out: torch.dtype) -> tuple[Tensor, Tensor]:
    if dtype == "int8":
        want = (a.double() @ b.double()).to(torch.int64)
        return want, torch.zeros((), device=a.device).expand(want.shape)
    wide = torch.float64 if dtype in ("fp32", "tf32", "fp64") else torch.float32
    left, right = a.to(wide), b.to(wide)
    want = left @ right if bias is None else left @ right + bias
    unit = {"fp64": 2.0**-53, "tf32": 2.0**-10}.get(dtype, 2.0**-24)
    terms = 2 if dtype == "tf32" else a.shape[1] + 4
    scale = left.abs_() @ right.abs_() if left.data_ptr() != a.data_ptr() else left.abs() @ right.abs()
    return want, scale * (unit * terms) + want.abs() * (UNIT[out] * 1.01) + 1e-30


@contextmanager
def float32_precision(level: str) -> Iterator[None]:
    """A context that sets torch's float32 switch: "highest" for true float32, "high" for tf32. Restores the former
    value."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(level)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# --- quantised operands ---------------------------------------------------------------------------------


def _quantised_product(group: GroupView, workload: Workload, packed: str) -> tuple[Tensor, Tensor]:
    """The result of a group in float32, and its bounds."""
    left, right = quantize.decode(group.a), quantize.decode(as_bytes(group.b), packed)
    if group.scale_a is not None:
        left = left * quantize.decode_scale(group.scale_a)
    if group.scale_b is not None:
        right = right * quantize.decode_scale(group.scale_b)
    want, scale = left @ right, left.abs() @ right.abs()
    return want, scale * _error_unit(workload, group.k) + want.abs() * (UNIT[workload.out_dtype] * 1.01) + 1e-30


def _error_unit(workload: Workload, k: int) -> float:
    """The error bound of a sum of k products, as a fraction of the sum of their magnitudes.

    Promoted sums of float8 keep 14 bits of at most 128 of K (docs/how-to/quantised-operands.md); weights may be rounded
    once to bfloat16 with their scale.
    """
    steps = -(-k // 32)
    rounded = 34 * 2.0**-13 * min(steps, 4) if RECIPES[workload.dtype].a else 2.0**-8
    return rounded + (4 * k + steps + 8) * 2.0**-24
