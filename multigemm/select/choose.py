"""From a problem to a backend and its recipe, and why.

A name means that backend and no other: if it cannot, it says why. Several names mean the first that can. "auto" means
the fastest that can, by the rules of `ranking`. It passes over emulated backends, the null backend, and plans that read
sizes back from the device while another one need not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from multigemm.backend import refusals
from multigemm.backends import registry
from multigemm.backends.registry import Candidate, candidates
from multigemm.errors import BackendUnavailable, BackendUnsupported, InvalidSetting
from multigemm.planning.binding import Choice, captured, reasons
from multigemm.planning.launch_key import config_key
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import ProblemSpec, describe_spec
from multigemm.select import measure_once, ranking, table
from multigemm.select.problem_class import Query
from multigemm.select.table import plan
from multigemm.settings import report, settings

Which = str | Sequence[str]
CHOICES_KEPT = 4096


def choose(problem: GroupedGemmProblem, backend: Which = "auto", config: Any = None, *, eager: bool = False) -> Choice:
    """Chooses the backend and recipe for a problem. The choice is remembered by spec and class.

    `eager`: the caller solves the problem at once instead of planning it. Then the host's time counts too, unless a
    graph is being captured.

    Raises:
        UnknownBackend: a name is no backend's.
        BackendUnavailable: the one that is named cannot run on this machine.
        BackendUnsupported: none of those asked for can solve the problem.
        InvalidSetting: `config` is none of this backend.
    """
    which = backend if isinstance(backend, str) else registry.several(backend)
    query = Query(problem, config, eager and which == "auto" and not captured(problem))
    remembered = table.table().remembered
    try:
        given = None if config is None else config_key(config)
        key = (query.spec, query.problem_class, problem.device, which, given, query.eager, measure_once.forbidden())
        found = remembered.get(key)
    except TypeError:
        raise InvalidSetting(f"config={config!r} cannot be remembered: pass a frozen config or plain values") from None
    if found is None:
        names = (which,) if isinstance(which, str) else which
        chosen = _choose_auto(query) if which == "auto" else _choose_named(query, names)
        if len(remembered) >= CHOICES_KEPT:
            remembered.clear()
        found = remembered.setdefault(key, chosen)  # that of another thread, if it came first
        report(f"{found.backend} {found.recipe.kernel} {found.recipe.config} ({found.why})")
    return found


def forget() -> None:
    """Forgets all choices and recipes of this process."""
    registry.forget_recipes()
    table.table().choices.forget()
    table.table().choose_anew()


def _choose_named(query: Query, names: Sequence[str]) -> Choice:
    refused: dict[str, list[str]] = {}
    why = "asked for by name" if len(names) == 1 else f"first of {', '.join(names)} that can"
    for name in names:  # a slip behind a name that can would never show
        registry.check(name)
    for name in names:
        state = registry.state(name)
        if not state.ok and len(names) == 1:
            raise BackendUnavailable(name, state.why_not)
        device = query.problem.device
        refused[name] = refusals(registry.get(name), query.spec, device) if state.ok else [state.why_not]
        if not refused[name]:
            return plan(query, name, why)
    raise BackendUnsupported(refused)


def _choose_auto(query: Query) -> Choice:
    allowed = settings().backend
    for name in allowed:
        registry.check(name, "MULTIGEMM_BACKEND holds the unknown backend")
    if query.spec.batch_invariant:
        name = _invariant_backend(query, allowed)
        return plan(query, name, "batch invariant: the same backend for all problems of these dtypes")
    found = candidates(query.spec, query.problem.device)
    able = [c.name for c in found if c.for_auto and (not allowed or c.name in allowed)]
    if not able:
        raise BackendUnsupported({c.name: c.why_not(allowed) for c in found})
    if allowed:
        names: Sequence[str] = sorted(able, key=allowed.index)
        why = f"first that MULTIGEMM_BACKEND={','.join(allowed)} allows"
    else:
        names, why, _ = ranking.rank(query, able, why_not="" if query.config is None else "a config is given")
    first = plan(query, names[0], why)
    if not first.recipe.syncs:
        return first
    others = (plan(query, name, f"{names[0]} would wait for the sizes") for name in names[1:])
    return next((choice for choice in others if not choice.recipe.syncs), first)


def _invariant_backend(query: Query, allowed: Sequence[str]) -> str:
    """The one backend that "auto" takes for all batch-invariant problems of these dtypes on a device.

    It is the first of a fixed order that runs a plain problem of these dtypes. Sizes, form, layout and measurements do
    not decide, because another backend gives other bits: if it refuses this problem, the call is refused.
    """
    device = query.problem.device
    found = {c.name: c for c in candidates(ranking.plain_spec(query.spec), device)}
    fixed = ranking.by_dtype(query.problem_class)
    order = allowed or [name for name in (*fixed, *found) if name in found and name != "null"]
    name = next((name for name in order if found[name].for_auto), None)
    if name is None:
        raise BackendUnsupported({name: found[name].why_not(allowed) for name in order})
    if why := registry.reasons(name, query.spec, device):
        remedy = "auto takes no other backend, which would give other bits: name one for all calls"
        raise BackendUnsupported({name: [*why, remedy]})
    return name


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
            passed_over = [line.strip() for line in each if line.startswith(able)]
            lines.append("; ".join([f"chosen: none, {first}", *passed_over]))
        return "\n".join(lines)


def explain_choice(problem: GroupedGemmProblem, backend: Which = "auto", config: Any = None) -> Explanation:
    """Explains the choice of an eager call. Measures wherever that call would."""
    query = Query(problem, eager=True)
    spec = query.spec
    cast = [x for x in "ab" if getattr(spec, x).dtype is not getattr(problem.spec, x).dtype]
    steps = [f"{x} is cast to {spec.compute}" for x in cast]
    if problem.refreshes:
        steps.append(f"{len(problem.refreshes)} array(s) with negative strides are copied")
    chosen, kernel, ran, why = None, "", None, ""
    try:
        choice = choose(problem, backend, config, eager=True)
        chosen, kernel, ran, why = choice.backend, choice.recipe.kernel, choice.recipe.config, reasons(choice, problem)
    except (BackendUnsupported, BackendUnavailable) as error:
        why = str(error)
    found = candidates(spec, problem.device)
    times = ranking.rank(query, [each.name for each in found if each.for_auto], why_not="explained").times
    timed = [replace(c, us=m.us, host_us=m.host_us, source=m.source) for c in found if (m := times.get(c.name))]
    found = sorted(timed, key=lambda c: c.us or 0.0) + [c for c in found if c.name not in times]
    return Explanation(spec, tuple(found), chosen, kernel, ran, why, tuple(steps), str(query.problem_class))
