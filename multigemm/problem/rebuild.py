"""Rebuilds a problem from its constructor's arguments: for copies and pickles, and as text for its `repr`.

A copy of the attributes would keep a spec that describes the alignment of other memory, and return an `out` that no
launch writes to. So the caller's arrays are copied, and a new problem is constructed from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multigemm.problem.arrays import give_back
from multigemm.problem.overlap import same_view
from multigemm.problem.spec import BIT_VIEWED

if TYPE_CHECKING:
    from multigemm.problem.problem import GroupedGemmProblem

AS_THEY_ARE = ("alpha", "beta", "activation", "out_dtype", "precision", "deterministic", "batch_invariant", "bias")


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
    """a, b and the keywords of the constructor."""
    for refresh in problem.refreshes:
        refresh()
    keywords = {name: getattr(problem, name) for name in AS_THEY_ARE}
    keywords |= {"c": _c(problem), "out": problem.given_out, **_cut(problem)}
    if (q := problem.quantisation) is not None:
        keywords |= {name: scale.given for name, scale in q.each()}
        keywords |= {"b_format": q.b_format or None, "accumulate": q.accumulate}
    if problem.fused is not None:
        keywords |= problem.fused.keywords()
    return _given(problem, problem.a), _given(problem, problem.b), keywords


def _given(problem: GroupedGemmProblem, x: Any) -> Any:
    """An operand as the caller would pass it."""
    if not isinstance(x, Tensor):
        return [give_back(t, problem.kind) for t in x]
    return give_back(x[0] if problem.squeezed else x, problem.kind)


def _c(problem: GroupedGemmProblem) -> Any:
    if problem.c is None:
        return None
    if problem.out is not None and all(map(same_view, problem.each("c"), problem.each("out"))):
        return problem.given_out
    return _given(problem, problem.c)


def _cut(problem: GroupedGemmProblem) -> dict[str, Any]:
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


def operand_text(x: Any, squeeze: bool = False) -> str:
    """A Python expression for a tensor or a list of tensors."""
    if isinstance(x, Tensor):
        return tensor_text(x[0] if squeeze else x)
    return "[" + ", ".join(tensor_text(t) for t in x) + "]"


def _index_text(x: Tensor) -> str:
    """A Python expression for sizes on the device: their values if they can be read at once, else zeros."""
    if x.device.type == "cpu":
        return f"torch.tensor({x.tolist()}, dtype={x.dtype})"
    return f"torch.zeros({x.shape[0]}, dtype={x.dtype}, device={str(x.device)!r})"


def _grouping_text(problem: GroupedGemmProblem) -> list[str]:
    parts = []
    if problem.grouping is not None:
        host, live = problem.grouping.host, problem.grouping.live
        if host is not None:
            parts.append(f"offsets={host.tolist()}")
        elif live is not None:
            parts.append(f"{problem.grouping.kind}={_index_text(live)}")
        if problem.form != "jagged_m":
            parts.append(f"jagged={problem.form[-1]!r}")
    if problem.valid_rows is not None:
        host, live = problem.valid_rows.host, problem.valid_rows.live
        parts.append(f"valid_rows={np.diff(host).tolist() if host is not None else _index_text(live)}")  # type: ignore[arg-type]
    return parts


def _fused_text(x: Any) -> str:
    """A Python expression for a fused keyword: numbers and host indices by value, other tensors by shape and
    strides."""
    if isinstance(x, tuple):
        return f"({', '.join(map(_fused_text, x))})"
    if isinstance(x, np.ndarray):
        return repr(x.tolist()) if x.dtype.kind == "i" else f"np.empty({x.shape}, {x.dtype.name!r})"
    if isinstance(x, Tensor) and not x.is_floating_point():
        by_value = x.device.type == "cpu" and x.numel() <= 64
        return f"torch.tensor({x.tolist()}, dtype={x.dtype})" if by_value else f"{tensor_text(x)}.zero_()"
    return operand_text(x) if isinstance(x, Tensor | list) else repr(x)


def problem_text(problem: GroupedGemmProblem) -> str:
    """The constructor call as text, with shapes and strides in place of values. Defaults are left out."""
    parts = [
        operand_text(problem.a, problem.squeezed),
        operand_text(problem.b, problem.squeezed),
        *_grouping_text(problem),
    ]
    for name in ("c", "bias", "out"):
        x = getattr(problem, name)
        if x is not None:
            parts.append(f"{name}={operand_text(x, problem.squeezed and name != 'bias')}")
    q = problem.quantisation
    parts += [] if q is None else [f"{name}={operand_text(scale.given)}" for name, scale in q.each()]
    plain = {
        "alpha": 1.0, "beta": 0.0, "activation": None, "precision": "ieee", "deterministic": True,
        "batch_invariant": False,
    }  # fmt: skip
    values = {name: getattr(problem, name) for name in plain}
    parts += [f"{name}={x!r}" for name, x in values.items() if x != plain[name]]
    if q is not None and q.b_format:
        parts.append(f"b_format={q.b_format!r}")
    if q is not None and q.accumulate != "promoted":
        parts.append(f"accumulate={q.accumulate!r}")
    if problem.fused is not None:
        parts += [f"{name}={_fused_text(x)}" for name, x in problem.fused.keywords().items()]
    if problem.out is None:
        parts.append(f"out_dtype={problem.out_dtype}")
    return f"GroupedGemmProblem({', '.join(parts)})"
