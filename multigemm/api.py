"""From a problem to a backend: `grouped_gemm`, `solve`, `plan`, `explain`, `list_backends`.

`multigemm.select.choose` has the rule of choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import torch

from multigemm import tracing
from multigemm.planning import plan as bound
from multigemm.planning.plan import Plan
from multigemm.problem.no_dynamo import no_dynamo
from multigemm.problem.problem import GroupedGemmProblem, Keywords, checked
from multigemm.select import explain as select_explain
from multigemm.select import registry
from multigemm.select.choose import Which as Which
from multigemm.select.choose import choose as choose
from multigemm.select.choose import forget as forget
from multigemm.select.explain import Explanation as Explanation


def grouped_gemm(a: Any, b: Any, *, backend: Which = "auto", config: Any = None, **keywords: Unpack[Keywords]) -> Any:
    """Many matrix products in one call: `solve(GroupedGemmProblem(a, b, **keywords), backend, config)`.

    `GroupedGemmProblem` documents the operands and keywords, `solve` the rest.
    """
    if torch.compiler.is_compiling():  # a graph holds the torch operator, not this code
        return tracing.grouped_gemm(a, b, backend=backend, config=config, **keywords)
    return solve(GroupedGemmProblem(a, b, **keywords), backend, config)


@no_dynamo
def solve(problem: GroupedGemmProblem, backend: Which = "auto", config: Any = None) -> Any:
    """The result of `problem`, as the caller's kind of array (a list of them for lists).

    `backend` is a name (that one and no other), several names (the first that can) or "auto" (the fastest that can:
    the first call of a class of problems measures, for at most some 60 ms besides compiling, and what it chooses is
    kept on disk; MULTIGEMM_MEASURE=0 forbids it). `config` fixes the backend's own parameters: its Config, or a mapping
    of some of its fields.
    Differentiable where an input requires grad.
    """
    if checked(problem).requires_grad and torch.is_grad_enabled():
        return registry.integration("differentiable").solve(problem, backend, config)
    return bound.run(choose(problem, backend, config), problem)


@no_dynamo
def plan(problem: GroupedGemmProblem, backend: Which = "auto", config: Any = None) -> Plan:
    """A plan: compiled, bound, with its output allocated; calling it only launches."""
    bound.refuse_gradients(checked(problem))
    return Plan(choose(problem, backend, config), problem)


@no_dynamo
def explain(problem: GroupedGemmProblem, backend: Which = "auto", config: Any = None) -> Explanation:
    """Why `solve(problem, backend, config)` would run what it runs; measures as that would."""
    return select_explain.explain(checked(problem), backend, config)


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """One line of `list_backends()`."""

    name: str
    available: bool
    version: str
    reason: str
    install: str
    emulated: bool


@no_dynamo
def list_backends() -> list[BackendInfo]:
    """What is here, what is missing, how to get it."""
    states = ((name, registry.state(name)) for name in registry.names())
    return [BackendInfo(name, s.ok, s.version, s.reason, s.install, s.emulated) for name, s in states]
