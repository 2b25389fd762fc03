"""The choices of the cpu backend: which kernel forms the products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from multigemm.spec import ProblemSpec

Kernel = Literal["loop"]


@dataclass(frozen=True, slots=True)
class Config:
    """`loop` forms one product after another."""

    kernel: Kernel = "loop"


def candidates(spec: ProblemSpec) -> tuple[Config, ...]:
    """Valid configs for this spec, the best guess first."""
    return (Config("loop"),)


def invalid_reasons(config: Config, spec: ProblemSpec) -> list[str]:
    """Why a config cannot run this spec; empty if it can."""
    return []
