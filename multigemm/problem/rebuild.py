"""Rebuilds a problem from its constructor's arguments: for copies and pickles, and as text for its `repr`.

A copy of the attributes would keep a spec that describes the alignment of other memory, and return an `out` that no
launch writes to. So the caller's arrays are copied, and a new problem is constructed from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multigemm.problem.arrays import Operand, give_back
from multigemm.problem.overlap import same_view
from multigemm.problem.spec import BIT_VIEWED

if TYPE_CHECKING:
    from multigemm.problem.problem import GroupedGemmProblem

AS_THEY_ARE = ("bias", "alpha", "beta", "activation", "precision", "deterministic", "batch_invariant", "out_dtype")
DEFAULTS = {
    "jagged": "m", "alpha": 1.0, "beta": 0.0, "precision": "ieee", "deterministic": True, "batch_invariant": False,
    "accumulate": "promoted",
}  # fmt: skip
CUTS = ("offsets", "sizes", "ends", "valid_rows")
INDICES = ("a_rows", "b_rows", "combine", "out_rows")
SHOWN = 64
"""Indices of rows, at most, that a text has by value."""


class Bits(NamedTuple):
    """The bytes of a tensor whose dtype torch cannot pickle."""

    data: Tensor
    dtype: torch.dtype


def as_bits(x: Any) -> Any:
    """An argument in a form that can be pickled; `from_bits` reverses it."""
    if isinstance(x, Tensor) and x.dtype in BIT_VIEWED:
        return Bits(x.detach().view(torch.uint8), x.dtype)
    listed = isinstance(x, list) and any(isinstance(t, Tensor) and t.dtype in BIT_VIEWED for t in x)
    return [as_bits(t) for t in x] if listed else x


def from_bits(x: Any) -> Any:
    """The argument that `as_bits` was given."""
    if isinstance(x, Bits):
        return x.data.view(x.dtype)
    return [from_bits(t) for t in x] if isinstance(x, list) and any(isinstance(t, Bits) for t in x) else x


def arguments(problem: GroupedGemmProblem) -> tuple[Any, Any, dict[str, Any]]:
    """a, b and the keywords of the constructor, as the caller would pass them."""
    for refresh in problem.refreshes:
        refresh()
    return _arguments(problem, problem.given_out, lambda x: give_back(x, problem.kind))


def problem_text(problem: GroupedGemmProblem) -> str:
    """The constructor call as text, with shapes and strides in place of values. Defaults are left out."""
    out = _passed(problem, problem.out, lambda x: x)
    a, b, keywords = _arguments(problem, out, lambda x: x)
    if out is not None:
        del keywords["out_dtype"]
    parts = [_text(a), _text(b)]
    for name, x in keywords.items():
        if x is not None and (name not in DEFAULTS or x != DEFAULTS[name]):
            parts.append(f"{name}={_text(x, name)}")
    return f"GroupedGemmProblem({', '.join(parts)})"


def _arguments(problem: GroupedGemmProblem, out: Any, show: Callable[[Tensor], Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The constructor's arguments with this `out`; `show` makes an operand of each tensor."""
    a, b, c = (_passed(problem, x, show) for x in (problem.a, problem.b, problem.c))
    if problem.c is not None and problem.out is not None:
        c = out if all(map(same_view, problem.each("c"), problem.each("out"))) else c
    keywords = {**cut_keywords(problem), "c": c, "out": out, **{name: getattr(problem, name) for name in AS_THEY_ARE}}
    if (q := problem.quantisation) is not None:
        keywords |= q.keywords()
    if problem.fused is not None:
        keywords |= problem.fused.keywords()
    return a, b, keywords


def _passed(problem: GroupedGemmProblem, x: Operand | None, show: Callable[[Tensor], Any]) -> Any:
    """An operand without the dimension that a single product does not have."""
    if x is None or not isinstance(x, Tensor):
        return None if x is None else [show(t) for t in x]
    return show(x[0] if problem.squeezed else x)


def cut_keywords(problem: GroupedGemmProblem) -> dict[str, Any]:
    """The keywords that cut the groups of a problem. Sizes on the host stay there."""
    if (cut := problem.cut) is None:
        return {}
    if cut is problem.valid_rows:
        return {"valid_rows": np.diff(cut.read()) if cut.live is None else cut.live}
    return {"jagged": problem.form[-1], **({"offsets": cut.read()} if cut.live is None else {cut.kind: cut.live})}


def tensor_text(x: Tensor) -> str:
    """A Python expression that makes a tensor with the same shape, strides and alignment."""
    where = "" if x.device.type == "cpu" else f", device={str(x.device)!r}"
    shift = x.data_ptr() % 16 // x.element_size() if x.numel() else 0
    if shift:
        last = sum(s * (n - 1) for s, n in zip(x.stride(), x.shape, strict=True))
        memory = f"torch.empty({shift + last + 1}, dtype={x.dtype}{where})"
        return f"{memory}.as_strided({tuple(x.shape)}, {x.stride()}, {shift})"
    if x.is_contiguous() and (x.numel() or x.stride() == torch.empty(x.shape, device="meta").stride()):
        return f"torch.empty({tuple(x.shape)}, dtype={x.dtype}{where})"
    return f"torch.empty_strided({tuple(x.shape)}, {x.stride()}, dtype={x.dtype}{where})"


def _text(x: Any, name: str = "") -> str:
    """A Python expression for an argument: numbers and host indices by value, other arrays by shape and strides."""
    if isinstance(x, list | tuple):
        ends = "[]" if isinstance(x, list) else "()"
        return f"{ends[0]}{', '.join(_text(each, name) for each in x)}{ends[1]}"
    if isinstance(x, np.ndarray):
        return repr(x.tolist()) if x.dtype.kind == "i" else f"np.empty({x.shape}, {x.dtype.name!r})"
    if not isinstance(x, Tensor):
        return repr(x)
    if name not in (*CUTS, *INDICES) or x.is_floating_point():
        return tensor_text(x)
    by_value = x.device.type == "cpu" and (name in CUTS or x.numel() <= SHOWN)
    return f"torch.tensor({x.tolist()}, dtype={x.dtype})" if by_value else f"{tensor_text(x)}.zero_()"
