"""Small backends for tests of choice: they compute nothing, and say what they are told to say."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

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

        def bind(ops: Operands) -> Callable[[], object]:
            assert isinstance(ops.out, torch.Tensor)
            return partial(ops.out.fill_, self.number)

        def tell(ops: Operands) -> str:
            assert isinstance(ops.out, torch.Tensor)
            assert ops.out.is_meta or ops.out.eq(7.0).all()
            assert ops.host_offsets is not None
            return f"fills {ops.host_offsets[-1]} rows"

        return Recipe("fill", config, bind, syncs=self.syncs, tell=tell)


@dataclass
class Dawdler(Fake):
    """A fake that takes some milliseconds."""

    nap_s: float = 0.0
    launches: int = 0

    def plan(self, spec: ProblemSpec, config: Tile, device: torch.device) -> Recipe:
        recipe = super().plan(spec, config, device)

        def bind(ops: Operands) -> Callable[[], object]:
            launch = recipe.bind(ops)

            def slowly() -> None:
                self.launches += 1
                time.sleep(self.nap_s)
                launch()

            return slowly

        return replace(recipe, bind=bind)


def problem(rows: int = 4, dtype: torch.dtype = torch.float32) -> mg.GroupedGemmProblem:
    """One product; classes of different dtypes tell nothing of each other."""
    return mg.GroupedGemmProblem(torch.ones(rows, 3, dtype=dtype), torch.ones(3, 2, dtype=dtype), offsets=[0, rows])
