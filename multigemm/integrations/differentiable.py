"""`mg.solve` and `mg.grouped_gemm` for inputs that require grad, in every form, lists included.

The torch operator serves graphs, so it takes tensors only. A problem may hold more: lists of
matrices, sizes on the host, a config of one backend. This `autograd.Function` runs a problem exactly
as it would run without gradients, and shares the backward pass with the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.integrations.gradients import Call, Gemm, gradients, list_gradients
from multigemm.planning import launch_cache
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.select.choose import choose

NAMES = ("a", "b", "c", "bias")


def solve(problem: GroupedGemmProblem, backend: Any, config: Any, gemm: Gemm) -> Any:
    """The result of `problem`, connected to the inputs that require grad; `gemm` computes their gradients."""
    if problem.out is not None:
        raise InvalidProblem(
            "out was given and an input requires grad: a result in the caller's memory has no gradient; leave out "
            "away, or use torch.no_grad()"
        )
    if problem.kind != "torch":
        raise InvalidProblem(
            f"an input requires grad and a is a {problem.kind} array: pass torch tensors, or .detach() the input"
        )
    tensors = [x for name in NAMES for x in problem.each(name)]
    result = _Solve.apply(problem, backend, config, gemm, *tensors)  # type: ignore[no-untyped-call]
    return list(result) if problem.form == "per_group" else result


class _Solve(torch.autograd.Function):
    """One problem; its tensors are passed one by one so that autograd sees them."""

    @staticmethod
    def forward(ctx: Any, problem: GroupedGemmProblem, backend: Any, config: Any, gemm: Gemm, *tensors: Tensor) -> Any:
        result = launch_cache.solve(choose(problem, backend, config, eager=True), problem)
        outs = tuple(result) if problem.form == "per_group" else (result,)
        ctx.problem, ctx.gemm, ctx.counts = problem, gemm, [len(problem.each(name)) for name in NAMES]
        live = _live(problem)  # saved like an operand, so that torch notices a change in place before backward
        ctx.save_for_backward(live, *tensors, *(outs if problem.activation == "relu" else ()))
        return outs if problem.form == "per_group" else result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        problem: GroupedGemmProblem = ctx.problem
        saved = ctx.saved_tensors[1:]
        inputs, outs = _split(saved, ctx.counts), list(saved[sum(ctx.counts) :])
        needs = tuple(any(part) for part in _split(ctx.needs_input_grad[4:], ctx.counts))
        if problem.form == "per_group":
            found = list_gradients(_call(problem, ctx.gemm, inputs), list(grads), outs, needs)
        else:
            found = _packed(problem, ctx.gemm, inputs, grads[0], outs[0] if outs else None, needs)
        flat = [_each(x, count) for x, count in zip(found, ctx.counts, strict=True)]
        return (None, None, None, None, *(x for part in flat for x in part))


def _live(problem: GroupedGemmProblem) -> Tensor | None:
    source = problem.grouping or problem.valid_rows
    return None if source is None else source.live


def _split(values: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """`values` in runs of the given lengths."""
    parts, start = [], 0
    for count in counts:
        parts.append(list(values[start : start + count]))
        start += count
    return parts


def _each(x: Any, count: int) -> list[Any]:
    if x is None:
        return [None] * count
    return list(x) if isinstance(x, list) else [x]


def _packed(
    problem: GroupedGemmProblem, gemm: Gemm, inputs: list[Any], grad: Tensor, out: Any, needs: tuple[bool, ...]
) -> Any:
    call = _call(problem, gemm, [part[0] if part else None for part in inputs])
    if problem.squeezed:
        grad, out = grad.unsqueeze(0), None if out is None else out.unsqueeze(0)
    return gradients(call, grad, out, needs)


def _call(problem: GroupedGemmProblem, gemm: Gemm, inputs: list[Any]) -> Call:
    a, b, c, bias = inputs
    return Call(
        form=problem.form,
        gemm=gemm,
        a=a,
        b=b,
        c=c or None if isinstance(c, list) else c,
        bias=bias or None if isinstance(bias, list) else bias,
        cut=_cut(problem),
        options={name: getattr(problem, name) for name in ("precision", "deterministic", "batch_invariant")},
        alpha=problem.alpha,
        beta=problem.beta,
        activation=problem.activation,
    )


def _cut(problem: GroupedGemmProblem) -> dict[str, Any]:
    """The groups as keyword arguments of another problem; sizes on the host stay there."""
    if (valid := problem.valid_rows) is not None:
        return {"valid_rows": valid.live if valid.live is not None else torch.from_numpy(valid.read()).diff()}
    grouping = problem.grouping
    if grouping is None:
        return {}
    jagged = problem.form[-1]
    if grouping.live is not None:
        return {grouping.kind: grouping.live, "jagged": jagged}
    return {"offsets": grouping.read(), "jagged": jagged}
