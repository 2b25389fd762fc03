"""The call that makes a problem anew, for copies of it.

A copy by attributes would keep a spec that speaks of the alignment of other memory, and return an `out` that no
launch writes to. So what is copied are the arrays that the caller gave, and a problem is made of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from multigemm.accepted import AcceptedProblem
from multigemm.arrays import give_back
from multigemm.overlap import same_view

AS_THEY_ARE = ("alpha", "beta", "activation", "out_dtype", "precision", "deterministic", "bias")


def arguments(problem: AcceptedProblem) -> tuple[Any, Any, dict[str, Any]]:
    """a, b and the keywords."""
    for refresh in problem.refreshes:
        refresh()
    keywords = {name: getattr(problem, name) for name in AS_THEY_ARE}
    keywords |= {"c": _c(problem), "out": problem.given_out, **_cut(problem)}
    return _given(problem, problem.a), _given(problem, problem.b), keywords


def _given(problem: AcceptedProblem, x: Any) -> Any:
    """An operand as the caller would pass it."""
    if not isinstance(x, Tensor):
        return [give_back(t, problem.kind) for t in x]
    return give_back(x[0] if problem.squeezed else x, problem.kind)


def _c(problem: AcceptedProblem) -> Any:
    if problem.c is None:
        return None
    if problem.out is not None and all(map(same_view, problem.each("c"), problem.each("out"))):
        return problem.given_out
    return _given(problem, problem.c)


def _cut(problem: AcceptedProblem) -> dict[str, Any]:
    if (cut := problem.cut) is None:
        return {}
    if cut is problem.valid_rows:
        return {"valid_rows": np.diff(cut.read()) if cut.live is None else cut.live}
    return {"jagged": problem.form[-1], **({"offsets": cut.read()} if cut.live is None else {cut.kind: cut.live})}
