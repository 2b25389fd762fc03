"""A backend's recipe for a spec: with which config it is planned, compiled once, shared by all who would run it."""

from __future__ import annotations

import os
import threading
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any

import torch

from multigemm.backend import Recipe, as_dict, completed
from multigemm.planning.binding import Choice
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import ProblemSpec
from multigemm.select import registry, table
from multigemm.select.problem_class import class_of

_locks: dict[object, threading.RLock] = {}
os.register_at_fork(after_in_child=_locks.clear)  # threads that held one do not exist in a child


def lock_of(what: object) -> threading.RLock:
    """The lock of a backend's compiler, or of a device, where one thread at a time measures."""
    return _locks.setdefault(what, threading.RLock())


def plan(name: str, problem: GroupedGemmProblem, spec: ProblemSpec, config: Any = None, why: str = "") -> Choice:
    """One backend, planned with the config that is given, else measured, else its first guess."""
    chosen, source = _config_for(name, problem, spec, config)
    with lock_of((name, "compiles")):  # threads that meet a spec together compile it once
        recipe = _compiled(name, spec, problem.device, chosen)
    return Choice(name, recipe, spec, f"{why}; config {source}")


@lru_cache(maxsize=4096)
def _compiled(name: str, spec: ProblemSpec, device: torch.device, config: Any) -> Recipe:
    return registry.get(name).plan(spec, config, device)


forget = _compiled.cache_clear


def _config_for(name: str, problem: GroupedGemmProblem, spec: ProblemSpec, given: Any) -> tuple[Any, str]:
    """A backend's config, and where it comes from. A measured one that is no longer valid is passed over."""
    valid = registry.get(name).configs(spec, problem.device)
    if given is not None:
        return completed(given, valid), "given"
    found = table.table().find(name, class_of(problem, spec), problem.device)
    if found is not None:
        measured, source = found
        for config in valid:
            if is_dataclass(config) and as_dict(config) == dict(measured.config):
                return config, f"measured ({measured.us:.1f} us, {source})"
    return (valid[0] if valid else None), "heuristic"
