"""multigemm: one grouped-GEMM problem, every CUDA programming model, one verified answer.

    import multigemm as mg
    out = mg.grouped_gemm(a, b, offsets=offsets)

The names below are the whole public face. Each is loaded when it is first used, so that importing
multigemm costs nothing and touches neither torch nor a GPU library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "GroupedGemmProblem": "problem.problem",
    "ProblemSpec": "problem.spec",
    "grouped_gemm": "api",
    "solve": "api",
    "plan": "api",
    "explain": "api",
    "list_backends": "api",
    "benchmark": "bench.own",
    "Plan": "planning.plan",
    "expected": "reference",
    "verify": "reference.verify",
    "Verdict": "reference.verify",
    "MultigemmError": "errors",
    "InvalidProblem": "errors",
    "InvalidSetting": "errors",
    "UnknownBackend": "errors",
    "UnknownKeyword": "errors",
    "BackendUnsupported": "errors",
    "BackendUnavailable": "errors",
    "NotCapturable": "errors",
    "LibraryError": "errors",
    "CompileError": "errors",
}
__all__ = [
    "BackendUnavailable",
    "BackendUnsupported",
    "CompileError",
    "GroupedGemmProblem",
    "InvalidProblem",
    "InvalidSetting",
    "LibraryError",
    "MultigemmError",
    "NotCapturable",
    "Plan",
    "ProblemSpec",
    "UnknownBackend",
    "UnknownKeyword",
    "Verdict",
    "__version__",
    "benchmark",
    "expected",
    "explain",
    "grouped_gemm",
    "list_backends",
    "plan",
    "quantize",
    "solve",
    "verify",
]

if TYPE_CHECKING:
    from multigemm import quantize
    from multigemm.api import explain, grouped_gemm, list_backends, plan, solve
    from multigemm.bench.own import benchmark
    from multigemm.errors import (
        BackendUnavailable,
        BackendUnsupported,
        CompileError,
        InvalidProblem,
        InvalidSetting,
        LibraryError,
        MultigemmError,
        NotCapturable,
        UnknownBackend,
        UnknownKeyword,
    )
    from multigemm.planning.plan import Plan
    from multigemm.problem.problem import GroupedGemmProblem
    from multigemm.problem.spec import ProblemSpec
    from multigemm.reference import expected
    from multigemm.reference.verify import Verdict, verify


def __getattr__(name: str) -> Any:
    if name == "quantize":  # a module
        return importlib.import_module("multigemm.quantize")
    if name not in _HOME:
        raise AttributeError(f"module 'multigemm' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"multigemm.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
