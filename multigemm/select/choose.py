"""From a problem to a backend and its recipe.

A name means that backend and no other: if it cannot, it says why. Several names mean the first that can. "auto" means
the fastest that can, by the rules of `ranking`. It passes over emulated backends, the null backend, and plans that read
sizes back from the device while another one need not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from multigemm.errors import BackendUnavailable, BackendUnsupported, InvalidSetting
from multigemm.planning.binding import Choice, captured
from multigemm.planning.launch_key import config_key
from multigemm.planning.staging import staged_spec
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.select import measure_once, ranking, registry, table
from multigemm.select.problem_class import Query, class_of
from multigemm.select.ranking import by_dtype, plain_spec
from multigemm.select.registry import candidates, plan, unavailable_text
from multigemm.settings import settings

Which = str | Sequence[str]
CHOICES_KEPT = 4096
_choices: dict[Any, Choice] = {}


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
    spec, which = staged_spec(problem), backend if isinstance(backend, str) else registry.several(backend)
    c, ranks = class_of(problem, spec), measure_once.ranks_of_group()
    try:
        eager = eager and which == "auto" and not captured(problem)
        given = None if config is None else config_key(config)
        key = (spec, c, problem.device, which, given, eager, ranks > 1, table.generation)
        found = _choices.get(key)
    except TypeError:
        raise InvalidSetting(f"config={config!r} cannot be remembered: pass a frozen config or plain values") from None
    if found is None:
        query = Query(problem, spec, c, config, eager)
        if which == "auto":
            made = _choose_auto(query)
        else:
            made = _choose_named(query, [which] if isinstance(which, str) else which)
        if len(_choices) >= CHOICES_KEPT:
            _choices.clear()
        found = _choices.setdefault(key, made)  # that of another thread, if it came first
        if settings().print_config:
            recipe = found.recipe
            print(f"multigemm: {found.backend} {recipe.kernel} {recipe.config} ({found.why})", file=sys.stderr)
    return found


def forget() -> None:
    """Forgets all choices of this process."""
    _choices.clear()
    registry.forget_recipes()
    table.table().choices.forget()
    table.change_generation()


def _choose_named(query: Query, names: Sequence[str]) -> Choice:
    reasons: dict[str, list[str]] = {}
    for name in names:  # a slip behind a name that can would never show
        registry.check(name)
    for name in names:
        state = registry.state(name)
        if not state.ok:
            if len(names) == 1:
                raise BackendUnavailable(name, unavailable_text(state))
            reasons[name] = [unavailable_text(state)]
            continue
        reasons[name] = registry.refusals(registry.get(name), query.spec, query.problem.device)
        if not reasons[name]:
            why = "asked for by name" if len(names) == 1 else f"first of {', '.join(names)} that can"
            return plan(query, name, why)
    raise BackendUnsupported(reasons)


def _choose_auto(query: Query) -> Choice:
    allowed = settings().backend
    registry.check_allowed(allowed)
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

    Sizes, form, layout and measurements must not decide, because another backend gives other bits. So the first backend
    of a fixed order that runs a plain problem of these dtypes is taken. If it refuses this problem, the call is
    refused.
    """
    device = query.problem.device
    found = {c.name: c for c in candidates(plain_spec(query.spec), device)}
    order = allowed or [name for name in (*by_dtype(query.problem_class), *found) if name in found and name != "null"]
    name = next((name for name in order if found[name].for_auto), None)
    if name is None:
        raise BackendUnsupported({name: found[name].why_not(allowed) for name in order})
    if reasons := registry.reasons(name, query.spec, device):
        remedy = "auto takes no other backend, which would give other bits: name one for all calls"
        raise BackendUnsupported({name: [*reasons, remedy]})
    return name
