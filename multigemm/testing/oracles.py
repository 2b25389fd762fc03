"""The oracles of a single run: right values, no other write, no element left unwritten, the same bits twice.

`check` runs one subject on one device_case:

1. the output's memory holds poison; run; every byte outside the result is unchanged, every element is
   in the interval that the reference allows (bit for bit where the sums are exact);
2. the memory holds other bytes; run again; the same result to the last bit (nothing left unwritten, C
   not read with beta = 0, no race, no dependence on what memory held);
3. the inputs and everything round them are unchanged.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from multigemm.backend import Backend, Launch, Recipe
from multigemm.planning.binding import launch_of
from multigemm.planning.staging import stage, staged_spec
from multigemm.reference import judge
from multigemm.testing.case import Case
from multigemm.testing.placed_case import Bytes, DeviceCase, PlacedCase, foreign_writes
from multigemm.testing.subject import Subject


@dataclass(frozen=True, slots=True)
class Finding:
    """A disagreement: the oracle, and what it saw."""

    oracle: str
    text: str

    def __str__(self) -> str:
        return f"[{self.oracle}] {self.text}"


@dataclass(slots=True)
class Outcome:
    """The outcome of one subject on one case. `refusals` are the backend's own reasons; `result` is the output's memory
    on the host after the first run."""

    backend: str
    refusals: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    kernel: str = ""
    config: Any = None
    rho: float = 0.0
    rho_rms: float = 0.0
    result: torch.Tensor | None = None

    @property
    def ran(self) -> bool:
        return not self.refusals

    @property
    def ok(self) -> bool:
        return not self.findings


def bind(device_case: DeviceCase, subject: Subject) -> tuple[Launch, Recipe]:
    """Binds a case with a subject. Calling the launch writes into the case's output."""
    spec = staged_spec(device_case.problem)
    recipe = subject.recipe(spec, device_case.device)
    staged = stage(device_case.problem, spec, device_case.out)
    launch = launch_of(recipe, staged.ops)
    steps = [*staged.before, launch]

    def run(_operands: object = staged.ops) -> None:  # a launch keeps no operand alive
        for step in steps:
            step()

    return run, recipe


def fetch(device_case: DeviceCase) -> torch.Tensor:
    """The output's memory on the host; waits for the device."""
    return device_case.outputs.clone() if device_case.device.type == "cpu" else device_case.outputs.cpu()


def inspect(
    placed: PlacedCase, got: torch.Tensor, before: torch.Tensor, outcome: Outcome, note: str = "", *, rho: bool = True
) -> None:
    """Judges guard bands and values of one run, and adds findings to the outcome."""
    _guards(placed, got, before, outcome, note)
    views = placed.results(got)
    verdict = judge(placed.answer, views if placed.case.form == "per_group" else views[0], suspicion=rho)
    if not verdict:
        outcome.findings.append(Finding("value", note + verdict.text))
    if placed.answer.preact is not None:
        preacts = placed.preacts(got)
        right = judge(placed.answer.preact, preacts if placed.case.form == "per_group" else preacts[0], suspicion=False)
        if not right:
            outcome.findings.append(Finding("value", f"{note}preact_out: {right.text}"))
    outcome.rho, outcome.rho_rms = max(outcome.rho, verdict.rho), max(outcome.rho_rms, verdict.rho_rms)


def _guards(placed: PlacedCase, got: torch.Tensor, before: torch.Tensor, outcome: Outcome, note: str) -> None:
    stray = foreign_writes(got.numpy(), before.numpy(), placed.writable)
    if stray:
        outcome.findings.append(Finding("guard", f"{note}{stray} bytes were written outside the result"))


def differing(one: torch.Tensor, two: torch.Tensor, mask: Bytes) -> int:
    """The number of bytes in which two runs' results differ."""
    changed = (one.numpy().view(np.uint64) ^ two.numpy().view(np.uint64)) & mask.view(np.uint64)
    return int(np.count_nonzero(changed.view(np.uint8))) if changed.any() else 0


@dataclass(slots=True)
class Runs:
    """Two runs of one subject, still on the device: the output's memory after each, and whether inputs changed."""

    outcome: Outcome
    outputs: list[torch.Tensor] = field(default_factory=list)
    touched: torch.Tensor | None = None


def _launch_twice(device_case: DeviceCase, subject: Subject) -> Runs:
    """Enqueues both runs without waiting for the device. On a GPU another launch runs between them."""
    runs = Runs(Outcome(subject.name))
    outcome = runs.outcome
    try:
        outcome.refusals = subject.refusals(staged_spec(device_case.problem), device_case.device)
        if not outcome.ran:
            return runs
        launch, recipe = bind(device_case, subject)
        outcome.kernel, outcome.config = recipe.kernel, recipe.config
        for number in (0, 1):
            device_case.prefill(number)
            launch()
            runs.outputs.append(device_case.outputs.clone())
            if number == 0 and device_case.device.type == "cuda":
                launch()  # counters that are cleared once too seldom show in the third launch
        runs.touched = (device_case.inputs.view(torch.int64) != device_case.pristine.view(torch.int64)).any()
        device_case.inputs.copy_(device_case.pristine)
    except Exception as error:  # whatever a backend raises is a finding, never the end of a campaign
        outcome.findings.append(Finding("exception", short_text(error)))
        runs.outputs.clear()
        runs.touched = None
    return runs


def short_text(error: BaseException) -> str:
    """An exception as one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename.rsplit('/', 3)[-1]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}: {str(error).strip()[:600]}"


def _bring_home(started: list[Runs]) -> list[list[torch.Tensor]]:
    """Copies all outputs to the host at once, so that a problem waits for the device once."""
    tensors = [t for runs in started for t in runs.outputs]
    if not tensors:
        return [[] for _ in started]
    flags = torch.stack([runs.touched for runs in started if runs.touched is not None]).to(torch.uint8)
    home = torch.cat([*tensors, flags]).cpu()
    ends = np.cumsum([t.numel() for t in tensors]).tolist()
    parts = iter([home[end - t.numel() : end] for end, t in zip(ends, tensors, strict=True)])
    flag = iter(home[ends[-1] :].tolist())
    found = []
    for runs in started:
        found.append([next(parts) for _ in runs.outputs])
        if runs.outputs and next(flag):
            runs.outcome.findings.append(Finding("inputs", "the operands or their surroundings were written"))
    return found


def check_pairs(
    pairs: Sequence[tuple[DeviceCase, Subject]],
    *,
    rho: bool = True,
    spent: Counter[str] | None = None,
    wait: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Run each subject on its case, twice, and judge all runs after waiting for the device once.

    Args:
        pairs: What is run.
        rho: Whether to compare each result with the expected spread of rounding errors. Otherwise a result that
            equals one of the same case that was found right, bit for bit, is not judged again.
        spent: Receives the seconds of each step.
        wait: Called once all runs are enqueued; it may raise to give up.

    Returns:
        The outcomes, in the order of the pairs.
    """
    seconds = Counter[str]() if spent is None else spent
    started, right = [], dict[int, list[torch.Tensor]]()
    for device_case, subject in pairs:
        begin = time.perf_counter()
        started.append(_launch_twice(device_case, subject))
        seconds[f"launch {subject.name}"] += time.perf_counter() - begin  # type: ignore[assignment]
    begin = time.perf_counter()
    wait()
    results = _bring_home(started)
    seconds["wait"] += time.perf_counter() - begin  # type: ignore[assignment]
    begin = time.perf_counter()
    for (device_case, _), runs, both in zip(pairs, started, results, strict=True):
        if both:
            known = right.setdefault(id(device_case), [])
            _judge_pair(device_case.placed, both, runs.outcome, known, rho)
    seconds["judge"] += time.perf_counter() - begin  # type: ignore[assignment]
    return [runs.outcome for runs in started]


def _judge_pair(
    placed: PlacedCase, pair: list[torch.Tensor], outcome: Outcome, right: list[torch.Tensor], rho: bool
) -> None:
    """Judges two runs; results that equal one already found right, bit for bit, need no second judgement."""
    first, second = pair
    if not rho and any(not differing(first, known, placed.writable) for known in right):
        _guards(placed, first, placed.prefills[0], outcome, "")
    else:
        inspect(placed, first, placed.prefills[0], outcome, rho=rho)
        if outcome.ok:
            right.append(first)
    different = differing(first, second, placed.writable)
    if different:
        note = "second run: "
        inspect(placed, second, placed.prefills[1], outcome, note, rho=False)
        text = f"{different} bytes differ between two runs over different old contents"
        outcome.findings += [] if outcome.findings else [Finding("repeat", text)]
    else:
        _guards(placed, second, placed.prefills[1], outcome, "second run: ")
    outcome.result = first


def check(device_case: DeviceCase, subject: Subject) -> Outcome:
    """Run one subject on one case, twice, and judge both runs.

    Args:
        device_case: The case, in the memory of its device.
        subject: The backend under test.

    Returns:
        The backend's reasons where it refuses, else the findings, of which a right backend has none.

    Example:
        >>> import torch
        >>> from multigemm.testing import Case, DeviceCase, Subject, check
        >>> case = Case(form="jagged_m", n=5, k=3, lengths=(2, 0, 4))
        >>> check(DeviceCase.from_case(case, torch.device("cpu")), Subject("cpu")).ok
        True
    """
    return check_pairs([(device_case, subject)])[0]


def check_case(
    case: Case, backend: str | Backend, device: str | torch.device = "cpu", config: int | str = 0
) -> Outcome:
    """Run one case on one backend: what a stored failure calls to repeat itself.

    Args:
        case: The problem.
        backend: A backend, or its name.
        device: Where its operands lie.
        config: Which of the backend's configs runs: its position, or its text.

    Returns:
        The same as `check`.

    Raises:
        UnknownBackend: No backend has this name.

    Example:
        >>> from multigemm.testing import Case, check_case
        >>> check_case(Case(form="batched", m=4, n=5, k=3, lengths=(0, 0)), "cpu").findings
        []
    """
    return check(DeviceCase.from_case(case, torch.device(device)), Subject(backend, config))
