"""The experts of a layer as fused products, which pick, gate, weight and sum rows themselves. Many tokens are copied to
their pairs first (`layer_ops.copies_rows`); one token or a few go through kernels of their own
(`expert_network.takes_few_tokens`).

Forward: a sort, h = gate(x[rows] @ up), out = the weighted sums of h @ down. For backward only g and u are kept (the
columns that the gate joins), besides the inputs and two numbers for each pair of token and expert:

    rows   of the gradient by expert, copied once for two products; only dh picks them if down and its bias are frozen
    dh     rows @ down^T
    dP     gate'(P) * weight * dh; the gradient of a weight is <dh, h>, and of down's bias <row, bias>; in one pass
    down   (weight * h)^T @ rows
    x      sums of dP @ up^T
    up     rows of x ^T @ dP

Where P is kept on a GPU, the first product is a plain one, and the gate a kernel behind it: P is rounded before the
gate then, so that a result has other bits than without gradients, unless the layer is batch invariant. With `recompute`
not even P is kept: the first product runs once more. Second derivatives go through the same layer in steps. Expert
numbers outside of 0..E-1 contribute nothing, and get gradients of zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multigemm.api import grouped_gemm
from multigemm.integrations import torch_op
from multigemm.integrations.bound_layer import run_bound
from multigemm.integrations.expert_network import (
    Network,
    by_rows,
    check_routing,
    has_fast_fused_products,
    may_take_few_tokens,
    result_of_few_tokens,
    through_experts,
)
from multigemm.integrations.gradients import differentiated, gate_by_torch
from multigemm.integrations.layer_ops import (
    Pairs,
    copies_rows,
    gate_kernels,
    kernels_for,
    rows_of_pairs,
    sort_pairs,
    sum_by_expert,
    tokens_of_pairs,
)
from multigemm.torch_internals import any_requires_grad, without_autocast


def experts_forward(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "swiglu",
    glu_layout: str = "halves",
    glu_alpha: float = 1.0,
    glu_beta: float = 0.0,
    glu_limit: float | None = None,
    stacked: bool = False,
    recompute: bool = False,
    backend: str = "auto",
    batch_invariant: bool | None = None,
) -> Tensor:
    """The weighted sum of each token's experts, by fused products; in a compiled graph one operator.

    Args:
        x: [tokens, H].
        index, weights: [tokens, k], which experts, and their weights.
        up, down: [E, W, H] and [E, H, I], or `stacked` [E, H, W] and [E, I, H]; W is 2 I with a gate, else I.
        up_bias, down_bias: [E, W] and [E, H].
        activation, glu_layout, glu_alpha, glu_beta, glu_limit: as in a problem (docs/how-to/moe-keywords.md).
        recompute: keep nothing between the products for backward; the first one runs once more.
        backend: a name, names joined by commas, or "auto": the fastest that takes the fused keywords.
        batch_invariant: as in a problem.

    Returns:
        [tokens, H], differentiable in x, weights and all parameters.

    Raises:
        InvalidProblem: shapes or names have no meaning.
        BackendUnsupported: no backend that was asked for takes the fused keywords here.

    Example:
        >>> import torch
        >>> index = torch.tensor([[0, 3], [3, 1], [2, 0]])
        >>> up, down = torch.ones(4, 12, 8), torch.ones(4, 8, 6)
        >>> experts_forward(torch.ones(3, 8), index, torch.full((3, 2), 0.5), up, down).shape
        torch.Size([3, 8])
    """
    net = Network(activation, glu_layout, glu_alpha, glu_beta, glu_limit, stacked, recompute, backend, batch_invariant)
    return run_experts(net, x, index, weights, up, down, up_bias, down_bias)


def run_experts(
    net: Network, x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Runs the layer: as one bound list of launches, or operator by operator."""
    bound = run_bound(net, True, x, index, weights, up, down, up_bias, down_bias)
    if bound is not None:
        return bound
    check_routing(x, index, weights)
    x, up, down, up_bias, down_bias = in_autocast(x, up, down, up_bias, down_bias)
    if torch.compiler.is_compiling():
        return _in_graph(net, x, index, weights, up, down, up_bias, down_bias)
    if not (torch.is_grad_enabled() and any_requires_grad(x, weights, up, down, up_bias, down_bias)):
        with torch.no_grad():
            with without_autocast():  # operands are cast already
                few = result_of_few_tokens(net, x, index, weights, up, down, up_bias, down_bias)
            if few is not None:
                return few
            return _forward(net, _pairs_of(net, index, up, False), x, weights, up, down, up_bias, down_bias, False)[0]
    result: Tensor = _Experts.apply(net, index, x, weights, up, down, up_bias, down_bias)  # type: ignore[no-untyped-call]
    return result


def run_few_tokens(
    net: Network, x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """The result of a layer that would run in steps, by the kernels for few tokens; None where those do not serve, were
    not measured, or gradients are wanted. A compiled graph must not depend on the number of tokens."""
    compiling = torch.compiler.is_compiling()
    if compiling or not may_take_few_tokens(net, index, up) or not has_fast_fused_products(x, net.backend):
        return None
    given = (x, index, weights, up, down, up_bias, down_bias)
    bound = run_bound(net, True, *given, few_alone=True)
    return result_of_few_tokens(net, *given) if bound is None else bound


def in_autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Casts the operands as torch.autocast demands, like those of the torch operator."""
    kind = next(x.device.type for x in tensors if x is not None)
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x is None or x.dtype is torch.float64 else x.to(dtype) for x in tensors)


# --- the fused way ------------------------------------------------------------------------------------


def _pairs_of(net: Network, index: Tensor, up: Tensor, ordered: bool) -> Pairs:
    """The pairs of a layer, with their numbers where gradients are wanted."""
    return sort_pairs(index, up.shape[0], ordered, up.detach(), net.stacked)


def product(net: Network, a: Tensor, b: Tensor, ends: Tensor | None, **keywords: Any) -> Tensor:
    """A grouped product without autograd. A call like an earlier one reuses its launch."""
    if torch.is_grad_enabled():
        a, b = a.detach(), b.detach()
        keywords = {name: x.detach() if isinstance(x, Tensor) else x for name, x in keywords.items()}
    found: Tensor = grouped_gemm(
        a, b, ends=ends, batch_invariant=net.batch_invariant, backend=torch_op.names(net.backend), **keywords
    )
    return found


def first_product(
    net: Network, x: Tensor, pairs: Pairs, up: Tensor, up_bias: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """h = gate(x[rows] @ up + bias), and the input of the gate if `keep` it.

    On a GPU a plain product and the gate's kernel behind it take less time than one product with both results: a tenth
    more than a plain product, instead of a fifth (H200). One product gives both where there is no such kernel, and in
    batch-invariant layers, whose bits must not depend on wanted gradients.
    """
    count, b, keywords = len(pairs.tokens), by_rows(up, net.stacked), {"bias": up_bias}
    kernels = None if net.gate is None or net.invariant else kernels_for(x, gate_kernels)
    if copies_rows(x, count, len(up), net.invariant, net.backend):
        x = rows_of_pairs(x.detach(), pairs.place, count)
    else:
        keywords["a_rows"] = pairs.tokens
    if not keep:
        return product(net, x, b, pairs.ends, **keywords, **net.keywords), None
    if kernels is not None:
        preact = product(net, x, b, pairs.ends, **keywords)
        del x  # the copies, before the gate's result is allocated
        return kernels.gated_rows(net.gate, preact), preact
    preact = x.new_empty((count, b.shape[2]))
    return product(net, x, b, pairs.ends, preact_out=preact, **keywords, **net.keywords), preact


def _summable(weights: Tensor, x: Tensor) -> Tensor:
    """Weights in a dtype that a sum takes."""
    return weights if weights.dtype in (torch.float32, x.dtype) else weights.float()


def _forward(
    net: Network, pairs: Pairs, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Any, down_bias: Any,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The result, and the input of the gate if `keep` it."""
    hidden, preact = first_product(net, x, pairs, up, up_bias, keep)
    sums = (pairs.place, _summable(weights, x).detach())
    return product(net, hidden, by_rows(down, net.stacked), pairs.ends, bias=down_bias, combine=sums), preact


class _Experts(torch.autograd.Function):
    """The autograd function of the layer. Tensors are separate arguments so that autograd sees them."""

    @staticmethod
    def forward(
        ctx: Any, net: Network, index: Tensor, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Any,
        down_bias: Any,
    ) -> Tensor:  # fmt: skip
        pairs = _pairs_of(net, index, up, True)
        out, preact = _forward(net, pairs, x, weights, up, down, up_bias, down_bias, not net.recompute)
        ctx.net = net
        ctx.save_for_backward(
            index, x, weights, up, down, up_bias, down_bias, preact, pairs.place, pairs.ends, pairs.order
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        net, saved, wanted = ctx.net, ctx.saved_tensors, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return None, None, *_through_steps(net, saved, wanted, grads[0])
        return None, None, *_gradients(net, saved, grads[0].contiguous(), wanted)


def _through_steps(net: Network, saved: Any, wanted: Any, grad: Tensor) -> list[Tensor | None]:
    """Gradients that are differentiable themselves."""
    index, *given = saved[:7]

    def results(inputs: list[Any]) -> list[Tensor]:
        x, weights, *parameters = inputs
        experts = parameters[0].shape[0]
        return [through_experts(x, index, weights, experts, lambda *sorted: net.in_steps(*sorted, *parameters))]

    return differentiated(given, wanted, results, [grad])


def _gradients(net: Network, saved: Any, grad: Tensor, wanted: Any) -> list[Tensor | None]:
    """The wanted first derivatives by x, the routing weights, up, down and the biases."""
    _, x, weights, up, down, up_bias, down_bias, preact, place, ends, order = saved
    weights, top_k = weights.detach().contiguous(), place.shape[1]
    grad_rows = rows_of_pairs(grad, place, len(order)) if wanted[3] or wanted[5] else None
    tokens = tokens_of_pairs(order, top_k) if preact is None or grad_rows is None else None
    if preact is None:
        preact = product(net, x, by_rows(up, net.stacked), ends, a_rows=tokens, bias=up_bias)
    of_hidden = by_rows(down, not net.stacked)
    if grad_rows is None:
        dh = product(net, grad, of_hidden, ends, a_rows=tokens)
    else:
        dh = product(net, grad_rows, of_hidden, ends)
    added = (grad, down_bias.detach()) if wanted[1] and down_bias is not None else None
    dpreact, weighted, dweights = gate_backward(net, preact, dh, order, weights, ends, added)
    del preact, dh
    found: list[Tensor | None] = [None, dweights if wanted[1] else None, None, None, None, None]
    if wanted[3]:
        assert grad_rows is not None
        found[3] = matrix_gradient(net, ends, grad_rows, weighted, turned=net.stacked)
    if wanted[5]:
        assert grad_rows is not None
        found[5] = sum_by_expert(grad_rows, ends, down_bias.dtype, order, weights)
    del grad_rows, weighted
    if wanted[0]:
        found[0] = product(net, dpreact, by_rows(up, not net.stacked), ends, combine=(place, None))
    if wanted[2]:
        rows = rows_of_pairs(x.detach(), place, len(order))
        found[2] = matrix_gradient(net, ends, rows, dpreact, turned=not net.stacked)
    if wanted[4]:
        found[4] = sum_by_expert(dpreact, ends, up_bias.dtype)
    return found


def matrix_gradient(net: Network, ends: Tensor, rows: Tensor, of_pairs: Tensor, turned: bool) -> Tensor:
    """The gradient of a weight: rows^T @ of_pairs for each expert, transposed if `turned`."""
    a, b = (of_pairs, rows) if turned else (rows, of_pairs)
    return product(net, a.t(), b, ends, jagged="k")


def gate_backward(
    net: Network, preact: Tensor, dh: Tensor, order: Tensor, weights: Tensor, ends: Tensor,
    added: tuple[Tensor, Tensor] | None = None, into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(gradient of preact, weight * h, gradient of the weights) of pairs; a weight of no expert here gets zero, the
    other two are anything there.

    preact [S, W], dh [S, I] without the weights [tokens, k], of which `order` [S] are the pairs'. `added`: the gradient
    [tokens, H] of the layer's result and down's bias [E, H]. `into`: memory for the first two, of more pairs, and [S]
    the row of each pair there; a pair of no expert may write to the last one, which is then nobody's.
    """
    kernels = None if net.gate is None or not ends.numel() else kernels_for(preact, gate_kernels)
    if kernels is not None:
        given = net.gate, preact, dh, order, weights, ends, added, into
        found: tuple[Tensor, Tensor, Tensor] = kernels.pair_backward(*given)
        return found
    wide = torch.promote_types(preact.dtype, torch.float32)
    expert = torch.searchsorted(ends, torch.arange(len(preact), device=ends.device, dtype=ends.dtype), right=True)
    there, pairs = (expert < ends.numel()).unsqueeze(1), order.long()
    with torch.enable_grad():
        x = torch.where(there, preact.detach(), 0).to(wide).requires_grad_()
        h = gate_by_torch(x, net.activation, net.gate)
    slope, weight = torch.where(there, dh, 0).to(wide), torch.where(there, weights.view(-1, 1)[pairs].to(wide), 0)
    (dpreact,) = torch.autograd.grad(h, x, slope * weight)
    h = h.detach()
    dots = (h * slope).sum(1)
    if added is not None and ends.numel():
        every = added[0].to(wide) @ added[1].to(wide).t()
        of_bias = every[pairs // weights.shape[1], expert.clamp(max=ends.numel() - 1)]
        dots = dots + torch.where(there.squeeze(1), of_bias, 0)
    dweights = torch.zeros_like(weights).view(-1).index_copy_(0, pairs, dots.to(weights.dtype)).view(weights.shape)
    dpreact, weighted = dpreact.to(preact.dtype), (h * weight).to(preact.dtype)
    if into is not None:
        whole, whole_weighted, rows = into[0], into[1], into[2].long().clamp(max=len(into[0]) - 1)
        dpreact, weighted = whole.index_copy_(0, rows, dpreact), whole_weighted.index_copy_(0, rows, weighted)
    return dpreact, weighted, dweights


# --- the layer as one operator, for graphs -------------------------------------------------------------

_library: Any = torch.library.Library("multigemm", "FRAGMENT")  # type: ignore[no-untyped-call]
_GIVEN = "Tensor x, Tensor index, Tensor weights, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias"
_NETWORK = (
    "str activation, str glu_layout, float glu_alpha, float glu_beta, float? glu_limit, bool stacked, bool recompute, "
    "str backend, bool? batch_invariant"
)
for schema in (
    f"experts({_GIVEN}, *, {_NETWORK}, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"experts_backward(Tensor grad, {_GIVEN}, Tensor preact, Tensor place, Tensor ends, Tensor order, bool[] wanted, "
    f"*, {_NETWORK}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
):
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
_WITH_GRADIENTS = (0, 2, 3, 4, 5, 6)
"""The operator's arguments that have gradients: x, weights, up, down and their biases."""


def _in_graph(net: Network, x: Tensor, index: Tensor, *given: Tensor | None) -> Tensor:
    """The layer in a compiled graph. `keep`: the operator also returns what the backward pass reads."""
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *given))
    keep = keep and not net.recompute
    result: Tensor = torch.ops.multigemm.experts(x, index, *given, **net._asdict(), keep=keep)[0]
    return result


def _network(options: dict[str, Any]) -> Network:
    return Network(**{name: options[name] for name in Network._fields})


def _experts(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None, *, keep: bool, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The operator on real tensors: the result, the input of the gate (if it is kept), and the pairs."""
    net = _network(options)
    given = (x, index, weights, up, down, up_bias, down_bias)
    with torch.no_grad(), without_autocast():  # an operator's kernel; without `keep` no gradients are wanted
        few = None if keep or net.recompute else result_of_few_tokens(net, *given)
    if few is not None:
        return few, *_experts_like(*given, keep=False, **options)[1:]
    pairs = _pairs_of(net, index, up, True)
    out, preact = _forward(net, pairs, x, weights, up, down, up_bias, down_bias, keep)
    return out, x.new_empty(0) if preact is None else preact, pairs.place, pairs.ends, pairs.order


def _experts_like(x: Tensor, index: Tensor, *given: Any, keep: bool, **options: Any) -> tuple[Tensor, ...]:
    up, count = given[1], index.shape[0] * index.shape[1]
    width = up.shape[2 if options["stacked"] else 1]
    numbers = {"dtype": torch.int32, "device": x.device}
    preact = x.new_empty((count, width)) if keep else x.new_empty(0)
    place, ends, order = (torch.empty(n, **numbers) for n in (index.shape, up.shape[0], count))  # type: ignore[call-overload]
    return x.new_empty(x.shape), preact, place, ends, order


def _experts_backward(grad: Tensor, x: Tensor, index: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
    *given, preact, place, ends, order, wanted = rest
    saved = (index, x, *given, preact if preact.numel() or not len(order) else None, place, ends, order)
    found = _gradients(_network(options), saved, grad.contiguous(), wanted)
    return tuple(grad.new_empty(0) if each is None else each for each in found)


def _experts_backward_like(grad: Tensor, x: Tensor, index: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
    given, wanted = (x, *rest[:5]), rest[-1]
    return tuple(t.new_empty(t.shape) if want else grad.new_empty(0) for t, want in zip(given, wanted, strict=True))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.options = {name: keyword_only_inputs[name] for name in Network._fields}
    ctx.mark_non_differentiable(*output[1:])


def _backward_of_experts(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    wanted = [bool(ctx.needs_input_grad[at]) for at in _WITH_GRADIENTS]
    found = torch.ops.multigemm.experts_backward(grad, *ctx.saved_tensors, wanted, **ctx.options)
    slots: list[Any] = [None] * 7
    for at, want, each in zip(_WITH_GRADIENTS, wanted, found, strict=True):
        slots[at] = each if want else None
    return tuple(slots)


for device in ("CPU", "CUDA"):
    _library.impl("experts", _experts, device)
    _library.impl("experts_backward", _experts_backward, device)
torch.library.register_fake("multigemm::experts", _experts_like, lib=_library)
torch.library.register_fake("multigemm::experts_backward", _experts_backward_like, lib=_library)
torch.library.register_autograd(
    "multigemm::experts", _backward_of_experts, setup_context=_keep_for_backward, lib=_library
)
