"""The choices of the cpu backend: which kernel forms the products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from multigemm.backends.cpu.mkl import library
from multigemm.spec import ProblemSpec

Kernel = Literal["loop", "blas"]


@dataclass(frozen=True, slots=True)
class Config:
    """`loop` forms one product after another; `blas` hands all of them to a batched BLAS call."""

    kernel: Kernel = "loop"


def candidates(spec: ProblemSpec) -> tuple[Config, ...]:
    """Valid configs for this spec, the best guess first."""
    kernels: tuple[Kernel, ...] = ("blas", "loop")
    return tuple(c for c in map(Config, kernels) if not invalid_reasons(c, spec))


def invalid_reasons(config: Config, spec: ProblemSpec) -> list[str]:
    """Why a config cannot run this spec; empty if it can."""
    if config.kernel == "blas" and library() is None:
        return ["torch carries no batched BLAS that can be called by address here: use the loop"]
    return []
