"""The choices of the cpu backend: which kernel forms the products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from multigemm.backends.cpu.epilogue import is_plain
from multigemm.backends.cpu.mkl import has_fast_bf16, library
from multigemm.spec import ProblemSpec

Kernel = Literal["bmm", "blas", "loop"]
KERNELS: tuple[Kernel, ...] = ("bmm", "blas", "loop")

SMALL_LIST = 1 << 20
"""Multiply-adds of a list's average product below which torch's cost per call is what counts."""


@dataclass(frozen=True, slots=True)
class Config:
    """How products are formed.

    `bmm`   torch's batched product over padded neighbours: bfloat16 in and out, no epilogue
    `blas`  batched BLAS calls, with a float32 or float64 accumulator
    `loop`  one product after another through NumPy
    """

    kernel: Kernel = "loop"


def suits(spec: ProblemSpec) -> bool:
    """Whether torch's own bfloat16 product is this spec's answer."""
    return is_plain(spec) and spec.compute == spec.out.dtype == torch.bfloat16


def _small(spec: ProblemSpec) -> bool:
    """Many small products of a form that `bmm` cannot stack."""
    if spec.form not in ("per_group", "jagged_k"):
        return False
    work = spec.total * (spec.n or 0) * ((spec.m if spec.form == "jagged_k" else spec.k) or 0)
    return work < SMALL_LIST * max(1, spec.groups)


def candidates(spec: ProblemSpec) -> tuple[Config, ...]:
    """Valid configs for this spec, the best guess first."""
    order: tuple[Kernel, ...] = ("blas", "bmm", "loop") if _small(spec) else KERNELS
    return tuple(c for c in map(Config, order) if not invalid_reasons(c, spec))


def invalid_reasons(config: Config, spec: ProblemSpec) -> list[str]:
    """Why a config cannot run this spec; empty if it can."""
    if config.kernel not in KERNELS:
        return [f"kernel {config.kernel!r} is unknown: use one of {', '.join(KERNELS)}"]
    if config.kernel == "blas" and library() is None:
        return ["torch carries no batched BLAS that can be called by address here: use loop"]
    if config.kernel == "bmm" and not suits(spec):
        return [f"bmm takes plain bfloat16 products, not {spec.compute} to {spec.out.dtype} with an epilogue: use blas"]
    if config.kernel == "bmm" and not has_fast_bf16():
        return ["this processor has no bfloat16 products: use blas or loop"]
    return []
