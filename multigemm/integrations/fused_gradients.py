"""Gradients of fused problems: the steps again, as differentiable torch operations round a grouped GEMM.

The forward pass is the problem itself, by the chosen backend. It keeps only the inputs. The backward pass recomputes
the steps: rows picked, the product with bias, gate, row_scale, sums of rows. At exactly a limit the gradient passes, as
with torch's clamp. Rows that no group owns, and indices that mean "no row", give gradients of exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.integrations.gradients import NAMES, Call, Gemm, call_of, live_cut, owned, owned_only, split, wide_dtype
from multigemm.planning import launch_cache
from multigemm.problem.fused import PICKED, Fused, Gate
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.select.choose import choose


def solve(problem: GroupedGemmProblem, backend: Any, config: Any, gemm: Gemm) -> Any:
    """The result of a fused problem, connected to the inputs that require a gradient."""
    fused = problem.fused
    assert fused is not None
    if fused.preact is not None:
        raise InvalidProblem(
            "an input requires grad, and preact_out is memory of the caller's, which has no gradient: leave it out, or "
            "use torch.no_grad()"
        )
    extras = [[] if x is None else [x] for x in (fused.row_scale, fused.weights)]
    parts = [*(problem.each(name) for name in NAMES), *extras]
    flat = [x for part in parts for x in part]
    result = _SolveFused.apply(problem, backend, config, gemm, [len(part) for part in parts], *flat)  # type: ignore[no-untyped-call]
    return list(result) if problem.form == "per_group" else result


class _SolveFused(torch.autograd.Function):
    """The autograd function of one fused problem. Tensors are separate arguments so that autograd sees them."""

    @staticmethod
    def forward(
        ctx: Any,
        problem: GroupedGemmProblem,
        backend: Any,
        config: Any,
        gemm: Gemm,
        counts: list[int],
        *tensors: Tensor,
    ) -> Any:
        result = launch_cache.solve(choose(problem, backend, config, eager=True), problem)
        assert problem.fused is not None
        ctx.problem, ctx.gemm, ctx.counts = problem, gemm, counts
        indices = [x.values for x in problem.fused.indices.values() if x.live]
        ctx.save_for_backward(*tensors, live_cut(problem), *indices)  # torch notices a change in place before backward
        return tuple(result) if problem.form == "per_group" else result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        given, needs = ctx.saved_tensors[: sum(ctx.counts)], ctx.needs_input_grad[5:]
        found = differentiated(given, needs, lambda flat: _steps(ctx.problem, ctx.gemm, split(flat, ctx.counts)), grads)
        return (None, None, None, None, None, *found)


def differentiated(
    given: Sequence[Any], needs: Sequence[bool], results_of: Callable[[list[Any]], list[Tensor]], grads: Sequence[Any]
) -> list[Tensor | None]:
    """Gradients of the values in `given` that need one, by autograd through the differentiable operations of
    `results_of`. They have gradients themselves where autograd records."""
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        # each input is a separate node of the graph: two may be the same tensor, or one derived from the other
        nodes = [(x.view_as(x) if twice else x.detach().requires_grad_()) if need else x
                 for x, need in zip(given, needs, strict=True)]  # fmt: skip
        results = results_of(nodes)
    wanted = [x for x, need in zip(nodes, needs, strict=True) if need]
    live = [(result, grad) for result, grad in zip(results, grads, strict=True) if result.requires_grad]
    found = [torch.zeros_like(x) for x in wanted]
    if live:
        roots, flows = zip(*live, strict=True)
        found = list(torch.autograd.grad(roots, wanted, flows, create_graph=twice, materialize_grads=True))
    slots = iter(found)
    return [next(slots) if need else None for need in needs]


def _steps(problem: GroupedGemmProblem, gemm: Gemm, parts: list[list[Tensor]]) -> list[Tensor]:
    """The result by differentiable operations: one tensor, or those of a list."""
    fused = problem.fused
    assert fused is not None
    a, b, c, bias, scales, factors = parts
    if problem.form == "per_group":
        call = call_of(problem, gemm, [a, b, c, bias])
        return (
            [gate_by_torch(x, problem.activation, fused.gate).to(problem.out_dtype) for x in _products(call, a, b)]
            if a
            else []
        )
    extra, vector, scale, weights = (x[0] if x else None for x in (c, bias, scales, factors))
    call = call_of(problem, gemm, [a[0], b[0], extra, vector])
    rows = fused_rows(call, fused, scale, weights).to(problem.out_dtype)
    return [rows[0] if problem.squeezed else rows]


def fused_rows(call: Call, fused: Fused, scale: Tensor | None, weights: Tensor | None) -> Tensor:
    """The result of a call of packed operands by differentiable operations, before rounding."""
    a, b = _picked(call, fused)
    products = replace(call, c=None, beta=0.0) if fused.scatters else call
    rows = gate_by_torch(_products(products, a, b), call.activation, fused.gate)
    if scale is not None:
        rows = rows * scale.to(rows.dtype).unsqueeze(-1)
    if not fused.scatters:
        return owned_only(call, rows)
    rows = _summed(call, fused, rows, weights)
    return rows if call.c is None or call.beta == 0 else rows + call.beta * call.c.to(rows.dtype)


def _products(call: Call, a: Any, b: Any) -> Any:
    first, second = (x[0] if isinstance(x, list) else x for x in (a, b))
    epilogue: dict[str, Any] = {"alpha": call.alpha, "out_dtype": wide_dtype(first.dtype, second.dtype)}
    if call.bias is not None:
        epilogue["bias"] = call.bias
    if call.beta != 0 and call.c is not None:
        epilogue |= {"c": call.c, "beta": call.beta}
    return call.gemm(a, b, **epilogue, **call.cut, **call.options)


def _picked(call: Call, fused: Fused) -> tuple[Tensor, Tensor]:
    found = []
    for name, x, index in (("a_rows", call.a, fused.a_rows), ("b_rows", call.b, fused.b_rows)):
        if index is not None:
            rows = index.values.to(x.device)
            x = _rows(x, rows) if PICKED[name][call.form[-1]] == 0 else _rows(x.t(), rows).t()
        found.append(x)
    return found[0], found[1]


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows by number; zeros where there is no row. The gradient of an embedding is summed without atomics."""
    there = (rows >= 0) & (rows < x.shape[0])
    if not x.shape[0]:
        return x.new_zeros((rows.shape[0], x.shape[1]))
    found = torch.nn.functional.embedding(torch.where(there, rows, 0), x)
    return torch.where(there.unsqueeze(-1), found, 0)


def gate_by_torch(x: Tensor, activation: str | None, gate: Gate | None) -> Tensor:
    """Applies an activation, or a gate to the columns of x, by differentiable torch operations."""
    functional = torch.nn.functional
    if gate is not None:
        return _gate(gate, *gate.split(x))
    acts: dict[Any, Any] = {
        None: lambda x: x, "relu": torch.relu, "silu": functional.silu, "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    }  # fmt: skip
    found: Tensor = acts[activation](x)
    return found


def _gate(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    if gate.limit is not None:
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    if gate.kind == "swiglu":
        act = g * torch.sigmoid(gate.alpha * g)
    elif gate.kind == "geglu":
        act = torch.nn.functional.gelu(g)
    elif gate.kind == "geglu_tanh":
        act = torch.nn.functional.gelu(g, approximate="tanh")
    else:
        act = torch.relu(g) if gate.kind == "reglu" else torch.sigmoid(g)
    return act * (u + gate.beta)


def _summed(call: Call, fused: Fused, rows: Tensor, weights: Tensor | None) -> Tensor:
    """The sums of rows that groups own."""
    count = rows.shape[0]
    there = owned(call, count).view(-1)
    if fused.combine is not None:
        index = fused.combine.values.to(rows.device)
        valid = (index >= 0) & (index < count)
        if count:
            valid = valid & there[torch.where(valid, index, 0)]
        terms = _rows(rows, torch.where(valid, index, -1).view(-1)).view(*index.shape, rows.shape[1])
        if weights is not None:
            terms = terms * torch.where(valid, weights, 0).to(rows.dtype).unsqueeze(-1)
        return terms.sum(1)
    assert fused.out_rows is not None and fused.rows is not None
    places = fused.out_rows.values.to(rows.device)
    places = torch.where((places >= 0) & (places < fused.rows) & there, places, fused.rows).long()
    return rows.new_zeros((fused.rows + 1, rows.shape[1])).index_add(0, places, rows)[: fused.rows]
