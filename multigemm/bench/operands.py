"""The tensors of a workload, and the check of a result of them.

Data are random and never zero: zeros draw less power and let a GPU run up to a fifth faster than on real data.

The reference is a float32 loop in torch on the same device, fast enough to check every case of every run. The bound is
per element: K * 2^-24 * |A||B| for the order of a float32 sum, plus the rounding of the output dtype. The exhaustive
float64 bound is in `multigemm.reference`; this one is for problems of 10^12 operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm import quantize
from multigemm.bench.workloads import E8M0, RECIPES, Recipe, Workload
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.scales import Scale, as_bytes
from multigemm.problem.spec import BYTE_FORMATS
from multigemm.reference.verify import Answer, answer, judge

Matrices = Tensor | list[Tensor]

POISON_INT = -(2**30)
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


@dataclass
class Tensors:
    """The data of one workload. Lists if the form is a list; `offsets` [G+1] int32 on the device.

    `own` is a user's problem, whose result also goes to `out`.
    """

    workload: Workload
    a: Matrices
    b: Matrices
    out: Matrices
    bias: Matrices | None
    offsets: Tensor | None
    valid_rows: Tensor | None
    host_offsets: npt.NDArray[np.int64] | None
    own: GroupedGemmProblem | None = None

    def poison(self) -> None:
        """Overwrites the output with values unlike any answer, so that a kernel that writes nothing is detected."""
        for out in self.out if isinstance(self.out, list) else [self.out]:
            out.fill_(float("nan") if out.dtype.is_floating_point else POISON_INT)

    def reference(self) -> Truth:
        """The expected answer with its per-element bounds."""
        return _reference(self)


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

    def weights(self) -> Tensor:
        w = self.workload
        shape = (w.k, w.n) if w.shared_b else (w.groups, w.k, w.n)
        return self.matrix(*shape, transposed=w.trans_b)

    def empty(self, *shape: int) -> Tensor:
        dtype = self.workload.out_dtype
        if not self.drawn:
            return torch.empty(shape, dtype=dtype, device=self.device)
        poison = float("nan") if dtype.is_floating_point else POISON_INT
        return torch.full(shape, poison, dtype=dtype, device=self.device)

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
    where = torch.device(device)
    maker = _Maker(workload, where, torch.Generator(where).manual_seed(workload.seed + 1), drawn)
    if workload.recipe is not None:
        return _make_quantised(workload, maker, workload.recipe)
    return _make_list(workload, maker) if workload.products else _make_packed(workload, maker)


def _make_quantised(workload: Workload, maker: _Maker, recipe: Recipe) -> Tensors:
    """Quantised operands with scales, as a problem."""
    w, total = workload, int(workload.sizes.sum())
    out = maker.empty(*((total, w.n) if w.form == "jagged_m" else (w.groups, w.m, w.n)))
    offsets, valid, host = _cuts(w, maker.device)
    cut: dict[str, Any] = {"valid_rows": valid} if valid is not None else {}
    if offsets is not None:
        cut = {"offsets": offsets, "jagged": w.form[-1]}
    given = _scaled_problem(w, maker, recipe, out, cut)
    return Tensors(w, given.a, given.b, out, None, offsets, valid, host, given)


def _cuts(w: Workload, device: torch.device) -> tuple[Tensor | None, Tensor | None, npt.NDArray[np.int64] | None]:
    """Offsets and valid rows on the device, and offsets on the host; None for those that the form lacks."""
    if w.form.startswith("jagged"):
        host = np.concatenate([[0], np.cumsum(w.sizes)]).astype(np.int64)
        return torch.tensor(host, dtype=torch.int32, device=device), None, host
    valid = torch.tensor(w.sizes, dtype=torch.int32, device=device) if w.form == "masked" else None
    return None, valid, None


def _make_packed(workload: Workload, maker: _Maker) -> Tensors:
    w, total, g = workload, int(workload.sizes.sum()), workload.groups
    a_shape, out_shape = {
        "jagged_m": ((total, w.k), (total, w.n)),
        "jagged_n": ((g, w.m, w.k), (w.m, total)),
        "jagged_k": ((w.m, total), (g, w.m, w.n)),
    }.get(w.form, ((g, w.m, w.k), (g, w.m, w.n)))
    a = maker.matrix(*a_shape, transposed=w.trans_a)
    if w.form in ("jagged_n", "jagged_k"):
        b = maker.matrix(*((w.k, total) if w.form == "jagged_n" else (total, w.n)), transposed=w.trans_b)
    else:
        b = maker.weights()
    bias = maker.matrix(total if w.form == "jagged_n" else w.n) if w.bias else None
    offsets, valid, host = _cuts(w, maker.device)
    return Tensors(w, a, b, maker.empty(*out_shape), bias, offsets, valid, host)


def _make_list(workload: Workload, maker: _Maker) -> Tensors:
    """A list of tensors. Equal products are members of one tensor, as programs that batch them have them. As separate
    tensors they would cost some libraries a table of addresses, and layouts would be compared instead of kernels."""
    w, count = workload, len(workload.products)
    together = len(set(w.products)) == 1 and not w.shared_b
    if together:
        m, n, k = w.products[0]
        a: Matrices = list(maker.matrix(count, m, k, transposed=w.trans_a))
        b: Matrices = list(maker.matrix(count, k, n, transposed=w.trans_b))
        out: Matrices = list(maker.empty(count, m, n))
    else:
        a = [maker.matrix(m, k, transposed=w.trans_a) for m, _, k in w.products]
        b = [maker.matrix(k, n, transposed=w.trans_b) for _, n, k in w.products[: 1 if w.shared_b else None]]
        b = list(b) * (count if w.shared_b else 1)
        out = [maker.empty(m, n) for m, n, _ in w.products]
    bias: Matrices | None = [maker.matrix(n) for _, n, _ in w.products] if w.bias else None
    return Tensors(w, a, b, out, bias, None, None, None)


# --- is a result right? ---------------------------------------------------------------------------


class Truth(Protocol):
    """A condition that a right result must satisfy, computed once for all entries."""

    def verdict(self, out: Matrices) -> str: ...


@dataclass
class Reference:
    """The expected groups and their bounds."""

    tensors: Tensors
    expected: list[Tensor]
    bounds: list[Tensor]

    def verdict(self, out: Matrices) -> str:
        """Describes the worst group; "" if every element is within its bound."""
        groups = list(zip(group_outputs(self.tensors, out), self.expected, self.bounds, strict=True))
        counts = [(~((got.to(want.dtype) - want).abs() <= bound)).sum() for got, want, bound in groups]
        wrong = torch.stack(counts).tolist() if counts else []  # NaN is wrong too; one read for all groups
        for g, count in enumerate(wrong):
            if count:
                return self._worst(g, *groups[g], int(count))
        return ""

    @staticmethod
    def _worst(g: int, got: Tensor, want: Tensor, bound: Tensor, count: int) -> str:
        off = ~((got.to(want.dtype) - want).abs() <= bound)
        i, j = divmod(int(off.flatten().int().argmax()), want.shape[1])
        return (
            f"wrong answer: group {g} of shape {tuple(want.shape)}, {count} elements off; at [{i},{j}] "
            f"{float(got[i, j]):.6g} instead of {float(want[i, j]):.6g} "
            f"(bound {float(bound.expand_as(want)[i, j]):.3g})"
        )


def is_plain(problem: GroupedGemmProblem) -> bool:
    """Whether a problem is only products in one dtype whose groups start at the first row: peers run such problems."""
    spec, dtype = problem.spec, problem.spec.a.dtype
    result = torch.int32 if dtype == torch.int8 else dtype
    follows = problem.c is not None or problem.bias is not None or problem.activation is not None
    late = problem.grouping is not None and int(problem.grouping.read()[0]) > 0
    return not (follows or late) and problem.alpha == 1 and (spec.b.dtype, problem.out_dtype) == (dtype, result)


def group_outputs(tensors: Tensors, out: Matrices) -> list[Tensor]:
    """The part of an output that each group owns."""
    workload = tensors.workload
    if isinstance(out, list):
        return out
    if workload.form in ("batched", "jagged_k"):
        return list(out)
    if workload.form == "masked":
        return [out[g, : int(rows)] for g, rows in enumerate(workload.sizes)]
    ends = [int(e) for e in workload.sizes.cumsum()]
    pairs = list(zip([0, *ends[:-1]], ends, strict=True))
    return [out[s:e] for s, e in pairs] if workload.form == "jagged_m" else [out[:, s:e] for s, e in pairs]


def group_inputs(tensors: Tensors) -> list[tuple[Tensor, Tensor]]:
    """(A_g, B_g) as views, for peers that loop over groups."""
    workload, a, b = tensors.workload, tensors.a, tensors.b
    if isinstance(a, list):
        return list(zip(a, b, strict=True))
    assert isinstance(b, Tensor)
    ends = [int(e) for e in workload.sizes.cumsum()]
    pairs = list(zip([0, *ends[:-1]], ends, strict=True))
    weights = [b] * workload.groups if b.dim() == 2 else list(b)
    if workload.form == "jagged_m":
        return [(a[s:e], w) for (s, e), w in zip(pairs, weights, strict=True)]
    if workload.form == "jagged_n":
        return [(a[g], b[:, s:e]) for g, (s, e) in enumerate(pairs)]
    if workload.form == "jagged_k":
        return [(a[:, s:e], b[s:e]) for s, e in pairs]
    rows = [int(r) for r in workload.sizes] if workload.form == "masked" else [workload.m] * workload.groups
    return [(a[g, : rows[g]], weights[g]) for g in range(workload.groups)]


@dataclass
class Exact:
    """The exhaustive reference of the package, for a user's problem that is no plain product. Slow."""

    answer: Answer

    def verdict(self, out: Matrices) -> str:
        found = judge(self.answer, out)
        return "" if found.ok else f"wrong answer: {found.text}"


def _reference(tensors: Tensors) -> Truth:
    workload, expected, bounds = tensors.workload, [], []
    if workload.recipe is not None:
        with float32_precision("highest"):
            for left, right in _dequantised_groups(tensors, group_inputs(tensors)):
                want, scale = left @ right, left.abs() @ right.abs()
                unit = _error_unit(workload, left.shape[1])
                expected.append(want)
                bounds.append(scale * unit + want.abs() * (UNIT[workload.out_dtype] * 1.01) + 1e-30)
        return Reference(tensors, expected, bounds)
    if tensors.own is not None and not is_plain(tensors.own):
        return Exact(answer(tensors.own))
    pairs = group_inputs(tensors)
    with float32_precision("highest"):
        for (a, b), bias in zip(pairs, _group_biases(tensors, len(pairs)), strict=True):
            want, bound = _product(a, b, bias, tensors.workload.dtype, tensors.workload.out_dtype)
            expected.append(want)
            bounds.append(bound)
    return Reference(tensors, expected, bounds)


def _group_biases(tensors: Tensors, groups: int) -> Sequence[Tensor | None]:
    """The bias of each column of a group's result; for jagged n, of the group's columns."""
    bias = tensors.bias
    if isinstance(bias, list):
        return bias
    if bias is not None and tensors.workload.form == "jagged_n":
        return list(torch.split(bias, tensors.workload.sizes.tolist()))
    return [bias] * groups


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


def _scaled_problem(w: Workload, maker: _Maker, r: Recipe, out: Tensor, cut: dict[str, Any]) -> GroupedGemmProblem:
    """The workload as a `GroupedGemmProblem` that writes into `out`. `cut` gives the groups' boundaries, or how many
    rows count."""
    form, total, jagged_k = w.form, int(w.sizes.sum()), w.form == "jagged_k"
    k = total if jagged_k else w.k
    deep = 1 if not r.block else k // r.block + w.groups if jagged_k else -(-k // r.block)
    rows = (total,) if form == "jagged_m" else (w.m,) if jagged_k else (w.groups, w.m)
    columns = (w.n,) if jagged_k else (w.groups, w.n)
    if jagged_k:  # operands as a training step has them: tokens are rows
        a, b = maker.codes(r.a, total, w.m).mT, maker.codes(r.b, total, w.n)
    else:
        a, b = maker.codes(r.a, *rows, k), maker.codes(r.b, *columns, k).mT
    scale_a = maker.scale(r, *rows, deep, tokens=True) if r.a else None
    per = columns if r.columns == 1 else (*columns[:-1], -(-w.n // r.columns))
    scale_b = maker.scale(r, *per, deep, tokens=jagged_k).mT
    packed = r.b if r.b in BYTE_FORMATS else None
    return GroupedGemmProblem(a, b, scale_a=scale_a, scale_b=scale_b, b_format=packed, out=out, **cut)


def _dequantised_groups(tensors: Tensors, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """(A_g, B_g) of every group in float32."""
    given = tensors.own
    assert given is not None
    q = given.quantisation
    assert q is not None
    starts = [0, *tensors.workload.sizes.cumsum().tolist()[:-1]]
    found = []
    for g, (a, b) in enumerate(pairs):
        left, right = quantize.decode(a), quantize.decode(as_bytes(b), q.b_format)
        (m, k), n = left.shape, right.shape[1]
        first_row = starts[g] if given.form == "jagged_m" else 0
        first_k = starts[g] if given.form == "jagged_k" else 0
        rows, ks, columns = slice(first_row, first_row + m), slice(first_k, first_k + k), slice(0, n)
        if q.a is not None:
            left = left * _numbers(q.a, g, rows, ks, "a", given.form == "jagged_k")
        if q.b is not None:
            right = right * _numbers(q.b, g, columns, ks, "b", given.form == "jagged_k")
        found.append((left, right))
    return found


def _numbers(scale: Scale, g: int, rows: slice, ks: slice, side: str, jagged_k: bool) -> Tensor:
    return quantize.decode_scale(scale.of_group(g, rows, ks, side, jagged_k))


def _error_unit(workload: Workload, k: int) -> float:
    """The error bound of a sum of k products, as a fraction of the sum of their magnitudes.

    Promoted sums of float8 keep 14 bits of at most 128 of K (docs/how-to/quantised-operands.md); weights may be rounded
    once to bfloat16 with their scale.
    """
    steps = -(-k // 32)
    rounded = 34 * 2.0**-13 * min(steps, 4) if RECIPES[workload.dtype].a else 2.0**-8
    return rounded + (4 * k + steps + 8) * 2.0**-24
