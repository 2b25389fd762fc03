"""The gradients of a grouped GEMM, for every form, as grouped GEMMs.

With `out = act(pre)`, `pre = alpha*A@B + beta*C + bias` and D the gradient of `pre`:

    ==========  ==========================  ==========================
    form        dA = alpha * D @ B^T        dB = alpha * A^T @ D
    ==========  ==========================  ==========================
    jagged m    jagged m                    jagged k (one group if B is shared)
    jagged n    jagged k (one if shared)    jagged n
    jagged k    jagged n                    jagged m
    batched     batched                     batched
    masked      masked                      batched, dead rows of A and D set to zero
    per_group   per_group                   per_group
    ==========  ==========================  ==========================

Rows that no group owns are constants of the result, so nothing flows through them, whatever the
incoming gradient holds there (NaN included). Only differentiable operations are used, so second
derivatives follow from autograd.

Gradients of fused problems are those of their steps as differentiable operations: rows picked, the product with bias,
gate, row_scale, sums of rows. The forward pass keeps only the inputs, and the backward pass recomputes the steps. At
exactly a limit the gradient passes, as with torch's clamp. Indices that mean "no row" give gradients of zero.

Quantised operands and scales are constants as well. Of quantised weights dA multiplies by B^T as it lies in memory,
with its scales transposed, where one of them covers everything, a group or 128 x 128; else by B^T in the dtype of A.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from multigemm import quantize
from multigemm.errors import InvalidProblem
from multigemm.planning import launch_cache
from multigemm.problem import scales
from multigemm.problem.fused import PICKED, Fused, Gate
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.rebuild import cut_keywords
from multigemm.problem.spec import FLOAT8, Form
from multigemm.quantize import turned
from multigemm.select.choose import choose

Gemm = Callable[..., Any]
Gradients = tuple[Any, Any, Any, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One forward call, as far as its gradients need it. Operands are lists where form is per_group.

    `cut` holds the keyword arguments that cut the groups (offsets, sizes, ends or valid_rows);
    `options` those that every GEMM of the backward pass inherits (precision, deterministic, backend); `quantised`
    those of products with a and b as they are (scale_a, scale_b, zero_b, b_format, accumulate).
    """

    form: Form
    gemm: Gemm
    a: Any
    b: Any
    c: Any
    bias: Any
    cut: Mapping[str, Any]
    options: Mapping[str, Any]
    alpha: float = 1.0
    beta: float = 0.0
    activation: str | None = None
    quantised: Mapping[str, Any] = field(default_factory=dict)


def gradients(call: Call, grad: Any, out: Any, needs: tuple[bool, ...]) -> Gradients:
    """(dA, dB, dC, dbias), lists for a list problem; None where it is not needed. `out` is read for relu only."""
    d = _through_activation(call, grad, out)
    exact = _each(partial(_as_operand, call), d, call.a, call.b) if needs[0] or needs[1] else d
    da = _da(call, exact) if needs[0] else None
    db = _db(call, exact) if needs[1] else None
    dc = _each(partial(_dc, call), d, call.c) if needs[2] else None
    dbias = _each(lambda x, bias: x.to(bias.dtype), _dbias(call, d), call.bias) if needs[3] else None
    return da, db, dc, dbias


def _each(function: Callable[..., Any], *operands: Any) -> Any:
    """A function of tensors, or of the members of lists one after the other."""
    if isinstance(operands[0], list):
        return [function(*members) for members in zip(*operands, strict=True)]
    return function(*operands)


def _dtype(operand: Any) -> torch.dtype:
    """The dtype of an operand, of a list that of its first matrix."""
    found: torch.dtype = (operand[0] if isinstance(operand, list) else operand).dtype
    return found


# --- the activation ---------------------------------------------------------------------------------


def wide_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The accumulator's dtype, in which a pre-activation is recomputed."""
    return torch.float64 if torch.float64 in (a, b) else torch.float32


def _through_activation(call: Call, grad: Any, out: Any) -> Any:
    if call.activation is None or (call.form == "per_group" and not grad):
        return grad
    if call.activation == "relu":  # its sign is that of its result
        return _each(lambda g, o: torch.ops.aten.threshold_backward(g, o, 0), grad, out)
    return _each(partial(_slope, call.activation), grad, _pre_activation(call, _dtype(call.a), _dtype(call.b)))


def _pre_activation(call: Call, a: torch.dtype, b: torch.dtype) -> Any:
    """Recomputes the pre-activation, which is not kept because it is as large as the result, and wider."""
    epilogue: dict[str, Any] = {"alpha": call.alpha, "out_dtype": wide_dtype(a, b)}
    if call.bias is not None:
        epilogue["bias"] = _beside(call.bias, a, b)
    if call.beta != 0:
        epilogue |= {"c": _beside(call.c, a, b), "beta": call.beta}
    return call.gemm(call.a, call.b, **epilogue, **call.quantised, **call.cut, **call.options)


def _beside(x: Any, *inputs: torch.dtype) -> Any:
    """c or bias in a dtype that a result in the accumulator's dtype takes."""
    if isinstance(x, Tensor):
        return x if x.dtype in inputs else x.to(wide_dtype(*inputs))
    return [_beside(t, *inputs) for t in x]


def _slope(activation: str, grad: Tensor, pre: Tensor) -> Tensor:
    grad = grad.to(pre.dtype)
    if activation == "silu":
        if torch.is_grad_enabled():  # aten's kernel has no derivative of its own
            gate = torch.sigmoid(pre)
            return grad * gate * (1 + pre * (1 - gate))
        return torch.ops.aten.silu_backward(grad, pre)  # type: ignore[no-any-return]
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(grad, pre, approximate=approximate)  # type: ignore[no-any-return]


# --- the operands -----------------------------------------------------------------------------------


def _da(call: Call, d: Any) -> Any:
    """dA = alpha * D @ B^T."""
    dtype, (bt, scaled) = _dtype(call.a), _transposed_b(call)
    if call.form == "jagged_k":
        return _gemm(call, d, bt, dtype, {**call.cut, "jagged": "n"})
    if call.form == "jagged_n":
        return _contracted(call, d, bt, call.a)
    return _gemm(call, d, bt, dtype, {**call.cut, **scaled})


def _db(call: Call, d: Any) -> Any:
    """dB = alpha * A^T @ D."""
    at, dtype = _each(lambda x: x.mT, call.a), _dtype(call.b)
    if call.form == "jagged_m":
        return _contracted(call, at, d, call.b)
    if call.form == "jagged_k":
        return _gemm(call, at, d, dtype, {**call.cut, "jagged": "m"})
    if call.form == "jagged_n":
        return _gemm(call, at, d, dtype, call.cut)
    if call.form == "masked":
        live = owned(call, call.a.shape[1])
        return _gemm(call, torch.where(live, call.a, 0).mT, torch.where(live, d, 0), dtype, {})
    return _gemm(call, at, d, dtype, {})


def _contracted(call: Call, x: Tensor, y: Tensor, like: Tensor) -> Any:
    """x [P, T] @ y [T, Q] over the tokens of each group, or over all tokens if the groups share `like`."""
    cut = {key: value for key, value in call.cut.items() if key != "jagged"}
    if like.dim() == 3:
        return _gemm(call, x, y, like.dtype, {**cut, "jagged": "k"})
    return _gemm(call, x, y, like.dtype, {"offsets": span(cut), "jagged": "k"})[0]


def _gemm(call: Call, x: Any, y: Any, dtype: torch.dtype, cut: Mapping[str, Any]) -> Any:
    return call.gemm(x, y, alpha=call.alpha, out_dtype=dtype, **cut, **call.options)


# --- quantised weights ------------------------------------------------------------------------------


def _as_operand(call: Call, d: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """D in the dtype to which it is rounded as an operand."""
    if a.dtype in FLOAT8:
        return d
    return d.to(a.dtype if call.quantised else torch.promote_types(a.dtype, b.dtype))


def _transposed_b(call: Call) -> tuple[Any, dict[str, Any]]:
    """B^T and the keywords of its scales."""
    if not call.quantised:
        return _each(lambda y: y.mT, call.b), {}
    if call.form == "per_group":
        return _dequantised_list(call), {}
    scale, zero, b_format = (call.quantised.get(name) for name in ("scale_b", "zero_b", "b_format"))
    b, packed = call.b, scales.format_of(call.b.dtype, b_format)
    cuts_b = call.form in ("jagged_n", "jagged_k")
    if b.dim() == 2 and not cuts_b and scale is not None and scale.dim() == 1:  # shared, with a number for each group
        b = b.expand(scale.shape[0], -1, -1)
    if b.dim() == 3 and not packed and _turns(scale, b):
        return b.mT, {name: None if x is None else turned(x) for name, x in (("scale_b", scale), ("zero_b", zero))}
    cut = call.cut if cuts_b else {}
    weights = quantize.dequantized(quantize.Quantized(b, scale, zero), "b", packed, **cut)
    return weights.to(call.a.dtype).mT, {}


def _turns(scale: Tensor | None, b: Tensor) -> bool:
    """Whether the scale of a stack of weights covers K and columns alike, so that it also fits the transposed stack."""
    if scale is None or scale.dim() < 2:
        return True
    k, n = (-(-extent // scales.ROW_BLOCK) for extent in b.shape[-2:])
    return tuple(scale.shape[-2:]) in ((1, 1), (k, n))


def _dequantised_list(call: Call) -> list[Tensor]:
    """B^T of every group of a list of quantised weights, in the dtype of A."""
    names, found = ("scale_b", "zero_b"), []
    b_format = call.quantised.get("b_format")
    for g, y in enumerate(call.b):
        own = (_of_matrix(call.quantised.get(name), g) for name in names)
        weights = quantize.dequantized(quantize.Quantized(y, *own), "b", scales.format_of(y.dtype, b_format))
        found.append(weights.to(call.a[g].dtype).mT)
    return found


def _of_matrix(scale: Any, g: int) -> Tensor | None:
    """The scale of one matrix of a list, from a list of grids, a vector, or one number for all."""
    if scale is None or (isinstance(scale, Tensor) and scale.dim() == 0):
        return scale
    found: Tensor = scale[g]
    return found


# --- what no group owns -----------------------------------------------------------------------------


def span(cut: Mapping[str, Any]) -> Any:
    """Offsets [2] of the range that all groups together own."""
    for kind in ("offsets", "ends", "sizes"):
        if (x := cut.get(kind)) is None:
            continue
        if not isinstance(x, Tensor):
            return [int(x[0]), int(x[-1])]
        if kind == "offsets":
            return torch.cat([x[:1], x[-1:]])
        zero = x.new_zeros(1)
        last = x.sum(0, keepdim=True, dtype=x.dtype) if kind == "sizes" else x[-1:] if x.shape[0] else zero
        return torch.cat([zero, last])
    raise AssertionError("a jagged form without offsets")


def owned(call: Call, extent: int) -> Tensor:
    """Which rows (jagged m: [T, 1]; masked: [G, M, 1]) or columns (jagged n: [T]) belong to a group."""
    if call.form == "masked":
        valid = torch.as_tensor(call.cut["valid_rows"], device=call.a.device)
        live: Tensor = _numbers(extent, valid, call.a.device) < valid.unsqueeze(1)
        return live.unsqueeze(2)
    first, last = span(call.cut)[:2]
    index = _numbers(extent, first, call.a.device)
    inside: Tensor = (index >= first) & (index < last)
    return inside.unsqueeze(1) if call.form == "jagged_m" else inside


def _numbers(extent: int, like: Any, device: torch.device) -> Tensor:
    """0, 1, 2, ... as the same kind of tensor as `like`, because a plain tensor does not mix with a DTensor."""
    if not isinstance(like, Tensor) or type(like) is Tensor:
        return torch.arange(extent, device=device)
    return like.new_ones(extent).cumsum(0) - 1


def owned_only(call: Call, d: Tensor) -> Tensor:
    """The values with zeros where no group owns them."""
    if call.form == "jagged_m":
        return torch.where(owned(call, d.shape[0]), d, 0)
    if call.form in ("jagged_n", "masked"):
        return torch.where(owned(call, d.shape[1]), d, 0)
    return d


def _dc(call: Call, d: Tensor, c: Tensor) -> Tensor:
    return owned_only(call, _scaled(d, call.beta)).to(c.dtype)


def _scaled(d: Tensor, beta: float) -> Tensor:
    """beta * D, but exact zeros for beta = 0, which never reads C, even if D is not finite."""
    return d * beta if beta != 0 else torch.zeros_like(d)


def _dbias(call: Call, d: Any) -> Any:
    """D summed over the rows that share one bias."""
    if call.form == "per_group":
        return [_sum(x, 0) for x in d]
    if call.form == "jagged_n":
        return torch.where(owned(call, d.shape[1]), _sum(d, 0), 0)
    if call.form == "jagged_m":
        return _jagged_sum(call, d)
    total = _sum(owned_only(call, d), 1)
    return total if call.bias.dim() == 2 else _sum(total, 0)


def _jagged_sum(call: Call, d: Tensor) -> Tensor:
    """Sums over each group's rows by a product with a row of ones. No atomics, so the same bits each time."""
    cut = {key: value for key, value in call.cut.items() if key != "jagged"}
    ones = d.new_ones((1, d.shape[0]))
    sums = call.gemm(ones, d, jagged="k", out_dtype=wide_dtype(d.dtype, d.dtype), **cut, **call.options).squeeze(1)
    total: Tensor = sums if call.bias.dim() == 2 else sums.sum(0)
    return total


def _sum(x: Tensor, axis: Literal[0, 1]) -> Tensor:
    return x.sum(axis, dtype=wide_dtype(x.dtype, x.dtype))


# --- problems ---------------------------------------------------------------------------------------

NAMES = ("a", "b", "c", "bias")


def solve(problem: GroupedGemmProblem, backend: Any, config: Any, gemm: Gemm) -> Any:
    """The result of `problem`, connected to the inputs that require a gradient; `gemm` computes the gradients."""
    if problem.out is not None:
        raise InvalidProblem(
            "out was given and an input requires grad: a result in the caller's memory has no gradient; leave out "
            "away, or use torch.no_grad()"
        )
    if problem.kind != "torch":
        raise InvalidProblem(
            f"an input requires grad and a is a {problem.kind} array: pass torch tensors, or .detach() the input"
        )
    if problem.fused is not None:
        if problem.quantisation is not None:
            raise InvalidProblem(
                "an input requires grad, and gradients of fused products with quantised operands come later: take the "
                "fused steps in torch round the product, or use torch.no_grad()"
            )
        if problem.fused.preact is not None:
            raise InvalidProblem(
                "an input requires grad, and preact_out is memory of the caller's, which has no gradient: leave it "
                "out, or use torch.no_grad()"
            )
    parts = _inputs(problem)
    tensors = [x for part in parts for x in part]
    result = _Solve.apply(problem, backend, config, gemm, list(map(len, parts)), *tensors)  # type: ignore[no-untyped-call]
    return list(result) if problem.form == "per_group" else result


def _inputs(problem: GroupedGemmProblem) -> list[list[Tensor]]:
    """The inputs that may have gradients, by operand: those of `NAMES`, and the weights of rows of a fused problem."""
    fused = problem.fused
    extras = [] if fused is None else [[] if x is None else [x] for x in (fused.row_scale, fused.weights)]
    return [*map(problem.each, NAMES), *extras]


class _Solve(torch.autograd.Function):
    """The autograd function of one problem. Tensors are separate arguments so that autograd sees them."""

    @staticmethod
    def forward(
        ctx: Any, problem: GroupedGemmProblem, backend: Any, config: Any, gemm: Gemm, counts: list[int],
        *tensors: Tensor,
    ) -> Any:  # fmt: skip
        result = launch_cache.solve(choose(problem, backend, config, eager=True), problem)
        outs = tuple(result) if problem.form == "per_group" else (result,)
        ctx.problem, ctx.gemm, ctx.counts = problem, gemm, counts
        kept: Sequence[Any] = outs if problem.activation == "relu" else ()
        if problem.fused is not None:
            kept = [x.values for x in problem.fused.indices.values() if x.live]
        # cuts and indices are saved like operands, so that torch notices a change in place before backward
        ctx.save_for_backward(live_cut(problem), *tensors, *kept)
        return outs if problem.form == "per_group" else result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        problem: GroupedGemmProblem = ctx.problem
        saved, nothing = ctx.saved_tensors[1:], (None,) * 5
        if problem.fused is not None:
            given, needed = saved[: sum(ctx.counts)], ctx.needs_input_grad[5:]
            steps = lambda flat: _steps(problem, ctx.gemm, split(flat, ctx.counts))  # noqa: E731
            return *nothing, *differentiated(given, needed, steps, grads)
        inputs: list[Any] = split(saved, ctx.counts)
        outs = list(saved[sum(ctx.counts) :])
        needs = tuple(any(part) for part in split(ctx.needs_input_grad[5:], ctx.counts))
        grad: Any = list(grads)
        out: Any = outs
        if problem.form != "per_group":
            inputs, grad, out = [part[0] if part else None for part in inputs], grad[0], outs[0] if outs else None
        if problem.squeezed:
            grad, out = grad.unsqueeze(0), None if out is None else out.unsqueeze(0)
        found = gradients(call_of(problem, ctx.gemm, inputs), grad, out, needs)
        flat = [_members(x, count) for x, count in zip(found, ctx.counts, strict=True)]
        return *nothing, *(x for part in flat for x in part)


def live_cut(problem: GroupedGemmProblem) -> Tensor | None:
    """The tensor on the device that cuts the groups; None if the cut is on the host."""
    return None if problem.cut is None else problem.cut.live


def split(values: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """`values` in consecutive runs of these lengths."""
    left = iter(values)
    return [list(islice(left, count)) for count in counts]


def _members(x: Any, count: int) -> list[Any]:
    if x is None:
        return [None] * count
    return x if isinstance(x, list) else [x]


def call_of(problem: GroupedGemmProblem, gemm: Gemm, inputs: list[Any]) -> Call:
    """A problem as a `Call` whose a, b, c and bias are `inputs`."""
    a, b, c, bias = inputs
    quantised = {} if problem.quantisation is None else problem.quantisation.keywords()
    return Call(
        form=problem.form,
        gemm=gemm,
        a=a,
        b=b,
        c=c or None if isinstance(c, list) else c,
        bias=bias or None if isinstance(bias, list) else bias,
        cut=cut_keywords(problem),
        options={name: getattr(problem, name) for name in ("precision", "deterministic", "batch_invariant")},
        alpha=problem.alpha,
        beta=problem.beta,
        activation=problem.activation,
        quantised={name: stacked(x) if problem.squeezed else x for name, x in quantised.items()},
    )


def stacked(scale: Any) -> Any:
    """The grid of a matrix as that of a stack of one. Numbers and vectors are returned as they are."""
    return scale.unsqueeze(0) if isinstance(scale, Tensor) and scale.dim() == 2 else scale


# --- the steps of fused problems ------------------------------------------------------------------------


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
        rows = _products(call, a, b) if a else []
        return [gate_by_torch(x, problem.activation, fused.gate).to(problem.out_dtype) for x in rows]
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
    epilogue: dict[str, Any] = {"alpha": call.alpha, "out_dtype": wide_dtype(_dtype(a), _dtype(b))}
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


_gelu_tanh = partial(torch.nn.functional.gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "gelu_tanh": _gelu_tanh,
    "reglu": torch.relu, "glu": torch.sigmoid, "geglu": torch.nn.functional.gelu, "geglu_tanh": _gelu_tanh,
}  # fmt: skip
"""Activations, and what gates apply to g."""


def gate_by_torch(x: Tensor, activation: str | None, gate: Gate | None) -> Tensor:
    """Applies an activation, or a gate to the columns of x, by differentiable torch operations."""
    if gate is None:
        return x if activation is None else _ACTIVATIONS[activation](x)
    g, u = gate.split(x)
    if gate.limit is not None:
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    act = g * torch.sigmoid(gate.alpha * g) if gate.kind == "swiglu" else _ACTIVATIONS[gate.kind](g)
    found: Tensor = act * (u + gate.beta)
    return found


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
