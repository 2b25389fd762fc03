"""What a run must satisfy, beyond its values: nothing else written, nothing left unwritten, twice the same.

A `Subject` is a backend under test, asked through the protocol alone, so that third parties' backends
and planted faults are judged by the same code as our own. `check` runs one subject on one stand:

1. the output's memory holds poison; run; every byte outside the result is unchanged, every element is
   in the interval that the reference allows (bit for bit where the sums are exact);
2. the memory holds other bytes; run again; the same result to the last bit (nothing left unwritten, C
   not read with beta = 0, no race, no dependence on what memory held);
3. the inputs and everything round them are unchanged.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from multigemm import registry
from multigemm.backend import Backend, Launch, Recipe
from multigemm.reference import judge
from multigemm.spec import ProblemSpec
from multigemm.staging import stage, staged_spec
from multigemm.testing.memory import Bytes, foreign_writes
from multigemm.testing.world import Stand, World


@dataclass(frozen=True, slots=True)
class Finding:
    """A disagreement: which oracle saw it, and what it saw."""

    oracle: str
    text: str

    def __str__(self) -> str:
        return f"[{self.oracle}] {self.text}"


@dataclass(slots=True)
class Outcome:
    """What came of one subject and one case. `refusals` are the backend's own reasons."""

    backend: str
    refusals: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    kernel: str = ""
    config: Any = None
    rho: float = 0.0
    rho_rms: float = 0.0

    @property
    def ran(self) -> bool:
        return not self.refusals

    @property
    def ok(self) -> bool:
        return not self.findings


LIBRARIES = ("cpu", "cublas")
"""Backends whose kernels a vendor's library picks by shape, so that a row's bits may depend on its neighbours."""


class Subject:
    """A backend under test. `config` picks one of its configs by position, modulo their number."""

    def __init__(self, backend: str | Backend, config: int = 0) -> None:
        self.backend: Backend = registry.get(backend) if isinstance(backend, str) else backend
        self.config = config
        self._recipes: dict[Any, Recipe] = {}

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def own_kernels(self) -> bool:
        """Whether equal kernel and config promise equal arithmetic for an element."""
        return self.name not in LIBRARIES

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Any]:
        return self.backend.configs(spec, device)

    def refusals(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        state = self.backend.availability()
        if not state.ok:
            return [f"unavailable: {state.reason}"]
        return list(self.backend.not_supported_reasons(spec, device))

    def recipe(self, spec: ProblemSpec, device: torch.device) -> Recipe:
        """The recipe for a spec under the chosen config; made once."""
        key = (spec, device, self.config)
        if key not in self._recipes:
            configs = self.configs(spec, device)
            config = configs[self.config % len(configs)] if configs else None
            if len(self._recipes) > 2000:
                self._recipes.clear()
            self._recipes[key] = self.backend.plan(spec, config, device)
        return self._recipes[key]


def bind(stand: Stand, subject: Subject) -> tuple[Launch, Recipe]:
    """One stand bound by one subject: calling the launch writes into the stand's output."""
    spec = staged_spec(stand.problem)
    recipe = subject.recipe(spec, stand.device)
    staged = stage(stand.problem, spec, stand.out)
    launch = recipe.bind(staged.ops)
    steps = [*staged.before, launch]

    def run() -> None:
        for step in steps:
            step()

    return run, recipe


def fetch(stand: Stand) -> torch.Tensor:
    """The output's memory on the host; waits for the device."""
    return stand.outputs.clone() if stand.device.type == "cpu" else stand.outputs.cpu()


def inspect(world: World, got: torch.Tensor, before: torch.Tensor, outcome: Outcome, stage_name: str = "") -> None:
    """Guard bands and values of one run; adds what it finds to the outcome."""
    raw: Bytes = got.numpy()
    stray = foreign_writes(raw, before.numpy(), world.writable)
    if stray:
        outcome.findings.append(Finding("guard", f"{stage_name}{stray} bytes were written outside the result"))
    views = world.results(got)
    verdict = judge(world.answer, views if world.case.form == "per_group" else views[0])
    if not verdict:
        outcome.findings.append(Finding("value", stage_name + verdict.text))
    outcome.rho, outcome.rho_rms = max(outcome.rho, verdict.rho), max(outcome.rho_rms, verdict.rho_rms)


def differing(one: torch.Tensor, two: torch.Tensor, mask: Bytes) -> int:
    """How many bytes of the result differ between two runs."""
    changed = (one.numpy().view(np.uint64) ^ two.numpy().view(np.uint64)) & mask.view(np.uint64)
    return int(np.count_nonzero(changed.view(np.uint8))) if changed.any() else 0


def check(stand: Stand, subject: Subject) -> Outcome:
    """Runs one subject on one stand, twice, and judges both runs."""
    outcome = Outcome(subject.name)
    try:
        outcome.refusals = subject.refusals(staged_spec(stand.problem), stand.device)
        if outcome.ran:
            _run_twice(stand, subject, outcome)
    except Exception as error:  # whatever a backend raises is a finding, never the end of a campaign
        outcome.findings.append(Finding("exception", _short(error)))
    return outcome


def _short(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename.rsplit('/', 3)[-1]}:{frames[-1].lineno}" if frames else ""
    text = str(error).strip()
    return f"{type(error).__name__}{place}: {text[:600]}"


def _run_twice(stand: Stand, subject: Subject, outcome: Outcome) -> None:
    world = stand.world
    launch, recipe = bind(stand, subject)
    outcome.kernel, outcome.config = recipe.kernel, recipe.config
    runs = []
    for number in (0, 1):
        stand.prefill(number)
        launch()
        runs.append(fetch(stand))
        inspect(world, runs[-1], world.prefills[number], outcome, "second run: " if number else "")
    different = differing(runs[0], runs[1], world.writable)
    if different and not outcome.findings:
        outcome.findings.append(Finding("repeat", f"{different} bytes differ between two runs over different old contents"))
    if not torch.equal(stand.inputs, stand.pristine):
        outcome.findings.append(Finding("inputs", "the operands or their surroundings were written"))
        stand.inputs.copy_(stand.pristine)
    stand.result = runs[0]


def check_case(case: Any, backend: str | Backend, device: str | torch.device = "cpu", config: int = 0) -> Outcome:
    """One case on one backend: what a saved failure calls to repeat itself."""
    return check(Stand.build(World.build(case), torch.device(device)), Subject(backend, config))
