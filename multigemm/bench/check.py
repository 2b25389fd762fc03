"""Correctness before speed: a time is only worth something next to the right answer.

The reference is a float32 loop in torch on the same device, fast enough to check every case of every
run. Its bound is per element: K * 2^-24 * |A||B| for the order of a float32 sum, plus the rounding
of the output dtype. The exhaustive float64 bound lives in `multigemm.reference`; this one is for
problems of 10^12 operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multigemm.bench.operands import Matrices, Tensors

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


@dataclass
class Reference:
    """Expected groups and their bounds, computed once per workload and compared many times."""

    tensors: Tensors
    expected: list[Tensor]
    bounds: list[Tensor]

    def verdict(self, out: Matrices) -> str:
        """Empty when every element lies within its bound, else the worst group in words."""
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
    """(A_g, B_g) as views: the loop that every peer can fall back to."""
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


def reference(tensors: Tensors) -> Reference:
    """The expected answer of a workload with its per-element bounds."""
    expected, bounds = [], []
    pairs = group_inputs(tensors)
    with _true_float32():
        for (a, b), bias in zip(pairs, _group_biases(tensors, len(pairs)), strict=True):
            want, bound = _product(a, b, bias, tensors.workload.dtype, tensors.workload.out_dtype)
            expected.append(want)
            bounds.append(bound)
    return Reference(tensors, expected, bounds)


def _group_biases(tensors: Tensors, groups: int) -> Sequence[Tensor | None]:
    """One value for each column of a group's result: its own columns of them all for jagged n."""
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


class _true_float32:
    """The reference must not be rounded to tf32, whatever the caller's switches say."""

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self.before)
