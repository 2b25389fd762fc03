"""Why a call would run what it runs: who can, who cannot, what each takes, who is chosen and by which rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from multigemm.errors import BackendUnavailable, BackendUnsupported
from multigemm.planning.binding import reasons
from multigemm.planning.staging import staged_spec
from multigemm.problem.arrays import dtype_name
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import MIXED, ProblemSpec
from multigemm.select import ranking
from multigemm.select.choose import Which, choose
from multigemm.select.problem_class import class_of
from multigemm.select.ranking import Query
from multigemm.select.registry import Candidate, candidates


@dataclass(frozen=True, slots=True)
class Explanation:
    """Who can, who cannot and why, who is chosen and why. Prints as a table."""

    spec: ProblemSpec
    candidates: tuple[Candidate, ...]
    chosen: str | None
    kernel: str
    config: Any
    why: str
    staging: tuple[str, ...]
    problem_class: str = ""

    def __str__(self) -> str:
        spec = self.spec
        extents = [
            f"{name} by group" if getattr(spec, name) is None else f"{name}={getattr(spec, name)}" for name in "mnk"
        ]
        lines = [f"{spec.form}: {spec.groups} groups, {', '.join(extents)}, {spec.compute}"]
        lines += [f"  {text}" for text in (*_quantised_texts(spec), *_fused_texts(spec))]
        lines += [f"  class: {self.problem_class}"]
        lines += [f"  before the launch: {step}" for step in self.staging]
        lines += [f"{'*' if c.name == self.chosen else ' '} {c.name:8} {c}" for c in self.candidates]
        if self.chosen:
            lines.append(f"chosen: {self.chosen}, {self.kernel}, {self.config}: {self.why}")
        else:
            first, *each = self.why.splitlines()
            able = tuple(f"  {c.name}: " for c in self.candidates if c.can)  # what passed them over is not in the table
            lines.append(
                "; ".join([f"chosen: none, {first}", *(line.strip() for line in each if line.startswith(able))])
            )
        return "\n".join(lines)


def _fused_texts(spec: ProblemSpec) -> list[str]:
    """Where rows are picked, what gates them, how they are summed."""
    if (fused := spec.fused) is None:
        return []
    picks = [f"{name} picks rows" for name in ("a_rows", "b_rows") if name in fused.keywords]
    gate = [f"{spec.activation} of columns in {fused.layout}"] if fused.layout else []
    sums = [f"combine of {fused.terms} rows"] if fused.combine else ["out_rows sums rows"] if fused.out_rows else []
    rest = [name for name in ("preact_out", "row_scale") if name in fused.keywords]
    return ["; ".join([*picks, *gate, *rest, *sums])]


def _quantised_texts(spec: ProblemSpec) -> list[str]:
    """What is known of quantised operands."""
    texts = []
    for name, x in (("a", spec.a), ("b", spec.b)):
        held = f"packed {x.packed}" if x.packed else dtype_name(x.dtype)
        if (s := x.scale) is not None:
            rows = {MIXED: "as each matrix says", 0: "all lines", 1: "a line"}.get(s.rows, f"{s.rows} lines")
            k = {MIXED: "as each matrix says", 0: "all of K"}.get(s.k, f"{s.k} of K")
            zero = "" if s.zero is None else f", zero points in {str(s.zero).removeprefix('torch.')}"
            group = " of a group" if s.by_group else ""
            texts.append(
                f"{name}: {held}, one {str(s.dtype).removeprefix('torch.')} scale for {rows}{group}, {k}{zero}"
            )
        elif spec.quantised and x.dtype is not spec.compute:
            texts.append(f"{name}: {held}, not scaled")
    return texts


def explain(problem: GroupedGemmProblem, backend: Which = "auto", config: Any = None) -> Explanation:
    """Why an eager call would choose what it does; measures as that would."""
    spec = staged_spec(problem)
    cast = "" if problem.quantisation is not None else "ab"
    steps = [f"{x} is cast to {spec.compute}" for x in cast if getattr(problem.spec, x).dtype is not spec.compute]
    if problem.refreshes:
        steps.append(f"{len(problem.refreshes)} array(s) with negative strides are copied")
    chosen, kernel, ran, why = None, "", None, ""
    try:
        choice = choose(problem, backend, config, eager=True)
        chosen, kernel, ran, why = choice.backend, choice.recipe.kernel, choice.recipe.config, reasons(choice, problem)
    except (BackendUnsupported, BackendUnavailable) as error:
        why = str(error)
    found, told = _with_times(problem, candidates(spec, problem.device)), str(class_of(problem, spec))
    return Explanation(spec, found, chosen, kernel, ran, why, tuple(steps), told)


def _with_times(problem: GroupedGemmProblem, found: list[Candidate]) -> tuple[Candidate, ...]:
    """The candidates with the times that are known of their class, the fastest first; measures nothing."""
    able = [c.name for c in found if c.for_auto]
    known = ranking.known(Query(problem, class_of(problem, staged_spec(problem)), able, eager=True))
    timed = [
        replace(c, us=m.us, host_us=m.host_us, source=known.source) if (m := known.times.get(c.name)) else c
        for c in found
    ]
    return tuple(sorted(timed, key=lambda c: (c.us is None, c.us or 0.0)))
