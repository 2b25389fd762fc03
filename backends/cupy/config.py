"""The choices that a kernel leaves open, as frozen values, and the one predicate that judges them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from multigemm.spec import ProblemSpec


@dataclass(frozen=True, slots=True)
class Config:
    """One way to run a problem.

    `portable` takes any problem; `blocks_per_sm` is its number of resident thread blocks.
    """

    kernel: Literal["portable"] = "portable"
    blocks_per_sm: int = 2


def is_valid(config: Config, spec: ProblemSpec) -> bool:
    """Whether `config` runs `spec`."""
    return 1 <= config.blocks_per_sm <= 2


def heuristic(spec: ProblemSpec, device: torch.device) -> Config:
    """The best guess without measuring."""
    return Config()


def candidates(spec: ProblemSpec, device: torch.device) -> list[Config]:
    """Every shipped config that is valid for `spec`, the best guess first."""
    first = heuristic(spec, device)
    return [first]
