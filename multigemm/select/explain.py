"""`explain`: the chosen backend and the rule that chose it, and for all others their times or reasons to refuse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from multigemm.errors import BackendUnavailable, BackendUnsupported
from multigemm.planning.binding import reasons
from multigemm.planning.staging import staged_spec
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import ProblemSpec, describe_spec
from multigemm.select import ranking
from multigemm.select.choose import Which, choose
from multigemm.select.problem_class import Query, class_of
from multigemm.select.registry import Candidate, candidates


@dataclass(frozen=True, slots=True)
class Explanation:
    """The candidates with their times or reasons to refuse, the chosen one, and why. Prints as a table."""

    spec: ProblemSpec
    candidates: tuple[Candidate, ...]
    chosen: str | None
    kernel: str
    config: Any
    why: str
    staging: tuple[str, ...]
    problem_class: str = ""

    def __str__(self) -> str:
        lines = ["\n  ".join([*describe_spec(self.spec), f"class: {self.problem_class}"])]
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


def explain(problem: GroupedGemmProblem, backend: Which = "auto", config: Any = None) -> Explanation:
    """Explains the choice of an eager call. Measures wherever that call would."""
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
    query = Query(problem, spec, class_of(problem, spec), eager=True)
    found = candidates(spec, problem.device)
    times = ranking.rank(query, [each.name for each in found if each.for_auto], why_not="explained").times
    found = [replace(each, measured=times.get(each.name)) for each in found]
    found.sort(key=lambda each: (each.us is None, each.us or 0.0))
    return Explanation(spec, tuple(found), chosen, kernel, ran, why, tuple(steps), str(query.problem_class))
