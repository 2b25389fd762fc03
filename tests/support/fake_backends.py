"""Small backends for tests of choice: they compute nothing, and say what they are told to say."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import multigemm as mg
from multigemm.backend import Availability, Recipe
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec


@dataclass(frozen=True)
class Tile:
    size: int = 16


@dataclass
class Fake:
    """A backend that fills the result with its own number."""

    name: str
    number: float = 0.0
    here: Availability = field(default_factory=lambda: Availability(True))
    reasons: list[str] = field(default_factory=list)
    syncs: bool = False
    planned: list[ProblemSpec] = field(default_factory=list)

    def availability(self) -> Availability:
        return self.here

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        return self.reasons

    def configs(self, spec: ProblemSpec, device: torch.device) -> list[Tile]:
        return [Tile(16), Tile(32)]

    def plan(self, spec: ProblemSpec, config: Tile, device: torch.device) -> Recipe:
        self.planned.append(spec)
        return Recipe("fill", config, self.bind, syncs=self.syncs, tell=self.tell)

    def bind(self, ops: Operands) -> Any:
        """A launch over operands."""
        assert isinstance(ops.out, torch.Tensor)
        return partial(ops.out.fill_, self.number)

    def tell(self, ops: Operands) -> str:
        """What a launch would do."""
        assert isinstance(ops.out, torch.Tensor)
        assert ops.out.is_meta or ops.out.eq(7.0).all()
        assert ops.host_offsets is not None
        return f"fills {ops.host_offsets[-1]} rows"


@dataclass
class Dawdler(Fake):
    """A fake that takes some milliseconds."""

    nap_s: float = 0.0
    launches: int = 0

    def bind(self, ops: Operands) -> Any:
        launch = super().bind(ops)

        def slowly() -> None:
            self.launches += 1
            time.sleep(self.nap_s)
            launch()

        return slowly


def problem(rows: int = 4, dtype: torch.dtype = torch.float32) -> mg.GroupedGemmProblem:
    """One product; classes of different dtypes tell nothing of each other."""
    return mg.GroupedGemmProblem(torch.ones(rows, 3, dtype=dtype), torch.ones(3, 2, dtype=dtype), offsets=[0, rows])
