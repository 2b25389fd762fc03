"""The configs of the cpu backend: which kernel computes the products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from multigemm.backends.cpu.epilogue import is_plain
from multigemm.backends.cpu.stacks import STEP
from multigemm.problem.spec import ProblemSpec
from multigemm.torch_internals import has_matrix_unit

Kernel = Literal["bmm", "blas", "loop", "ordered"]
KERNELS: tuple[Kernel, ...] = ("bmm", "blas", "loop", "ordered")

FEW_ROWS = 8
"""Rows of an average group up to which widening the weights costs more than oneDNN's slower products."""


@dataclass(frozen=True, slots=True)
class Config:
    """How products are formed.

    `bmm`    torch's products of bfloat16 operands: bfloat16 out, no epilogue
    `blas`   torch's products of operands widened to the accumulator's dtype, then the epilogue
    `loop`   one product after another through NumPy
    `ordered` one product after another, each element summed over k in order: what batch-invariant problems take
    """

    kernel: Kernel = "loop"


def has_fast_bf16() -> bool:
    """Whether bfloat16 products run on the processor's own instructions."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _is_bf16_only(spec: ProblemSpec) -> bool:
    """Whether torch's bfloat16 product is the whole result of this spec."""
    return is_plain(spec) and spec.compute == spec.out.dtype == torch.bfloat16


def _keeps_rows_apart(spec: ProblemSpec) -> bool:
    """Whether oneDNN's product cannot mix rows of A, or a launch checks them: see launch.py."""
    if spec.form == "jagged_k":  # K differs from group to group
        return spec.a.order == "col" and spec.out.order == "row"
    return spec.form != "per_group" or (spec.k is not None and spec.k % STEP == 0)


def _is_too_large_to_copy(spec: ProblemSpec) -> bool:
    """Whether `blas` would widen whole operands of more than 2^31 elements, of which groups may own a few."""
    dtype = torch.float32 if spec.acc is torch.int32 else spec.acc
    return any(x.wide and x.dtype is not dtype for x in (spec.a, spec.b))


def _prefers_bf16(spec: ProblemSpec) -> bool:
    """Whether bfloat16 products are likely faster: with matrix units several times, without because they read less."""
    rows = spec.m if spec.form == "jagged_k" and spec.m is not None else spec.total / max(1, spec.groups)
    return has_matrix_unit() or rows <= FEW_ROWS


def candidates(spec: ProblemSpec, device: torch.device) -> tuple[Config, ...]:
    """Valid configs for this spec, the best guess first."""
    if spec.quantised:
        return (Config("ordered" if spec.batch_invariant else "loop"),)
    order: tuple[Kernel, ...] = ("bmm", "blas", "loop") if _prefers_bf16(spec) else ("blas", "bmm", "loop")
    if _is_too_large_to_copy(spec):
        order = ("loop", "bmm", "blas")
    if spec.batch_invariant:
        order = ("ordered",)
    return tuple(config for config in map(Config, order) if not invalid_reasons(config, spec))


def invalid_reasons(config: Config, spec: ProblemSpec) -> list[str]:
    """Why a config cannot run this spec; empty if it can."""
    if config.kernel not in KERNELS:
        return [f"kernel {config.kernel!r} is unknown: use one of {', '.join(KERNELS)}"]
    if spec.quantised and config.kernel not in ("loop", "ordered"):
        return [f"{config.kernel} takes operands that mean what they say, not quantised ones: use loop"]
    if spec.batch_invariant and config.kernel != "ordered":
        return [f"batch_invariant=True: the bits of a row depend on its neighbours in {config.kernel}: use ordered"]
    if config.kernel != "bmm":
        return []
    if not _is_bf16_only(spec):
        return [f"bmm takes plain bfloat16 products, not {spec.compute} to {spec.out.dtype} with an epilogue: use blas"]
    if not _keeps_rows_apart(spec):
        return [f"bmm takes {spec.form} only if rows of A cannot meet, not K = {spec.k} and A {spec.a.order}: use blas"]
    if not has_fast_bf16():
        return ["this processor has no bfloat16 products: use blas or loop"]
    return []
