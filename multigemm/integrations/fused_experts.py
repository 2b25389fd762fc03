"""The experts of a layer as fused products, which pick, gate, weight and sum rows themselves.

Forward: a sort, h = gate(x[rows] @ up), out = the weighted sums of h @ down. For backward only g and u are kept (the
columns that the gate joins), besides the inputs and two numbers for each pair of token and expert:

    dh     rows of the gradient, picked by token, @ down^T
    dP     gate'(P) * weight * dh, and the gradient of a weight is <dh, h>, in one pass over P
    down   (weight * h)^T @ rows of the gradient
    x      sums of dP @ up^T
    up     rows of x ^T @ dP

With `recompute` not even P is kept: the first product runs once more. Second derivatives go through the same layer in
steps. Expert numbers outside of 0..E-1 contribute nothing, and get gradients of zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multigemm.api import grouped_gemm
from multigemm.integrations import torch_op
from multigemm.integrations.bound_layer import run_bound
from multigemm.integrations.expert_network import Network, by_rows
from multigemm.integrations.fused_gradients import differentiated, gate_by_torch
from multigemm.integrations.layer_ops import sort_pairs, triton_kernels
from multigemm.integrations.routing import check_routing, through_experts
from multigemm.torch_internals import any_requires_grad


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
            return _forward(net, pairs_of(net, index, up), x, weights, up, down, up_bias, down_bias, None)
    result: Tensor = _Experts.apply(net, index, x, weights, up, down, up_bias, down_bias)  # type: ignore[no-untyped-call]
    return result


def in_autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Casts the operands as torch.autocast demands, like those of the torch operator."""
    kind = next(x.device.type for x in tensors if x is not None)
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x is None or x.dtype is torch.float64 else x.to(dtype) for x in tensors)


# --- the fused way ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Pairs:
    """Pairs of token and expert, sorted by expert: their tokens [S], the position of each pair [T, k], the ends of
    experts [E]."""

    rows: Tensor
    place: Tensor
    ends: Tensor


def pairs_of(net: Network, index: Tensor, up: Tensor) -> Pairs:
    return Pairs(*sort_pairs(index, up.shape[0], up=up.detach(), stacked=net.stacked)[:3])


def product(net: Network, a: Tensor, b: Tensor, ends: Tensor | None, **keywords: Any) -> Tensor:
    """A grouped product without autograd. A call like an earlier one reuses its launch."""
    if torch.is_grad_enabled():
        a, b = a.detach(), b.detach()
        keywords = {name: x.detach() if isinstance(x, Tensor) else x for name, x in keywords.items()}
    found: Tensor = grouped_gemm(
        a, b, ends=ends, batch_invariant=net.batch_invariant, backend=torch_op.names(net.backend), **keywords
    )
    return found


def first_product(net: Network, x: Tensor, pairs: Pairs, up: Tensor, up_bias: Any, preact: Tensor | None) -> Tensor:
    return product(net, x, by_rows(up, net.stacked), pairs.ends, a_rows=pairs.rows, bias=up_bias, preact_out=preact,
                    **net.keywords)  # fmt: skip


def preact_for(net: Network, x: Tensor, pairs: Pairs, up: Tensor) -> Tensor:
    return x.new_empty((pairs.rows.shape[0], up.shape[2 if net.stacked else 1]))


def _summable(weights: Tensor, x: Tensor) -> Tensor:
    """Weights in a dtype that a sum takes."""
    return weights if weights.dtype in (torch.float32, x.dtype) else weights.float()


def _forward(
    net: Network, pairs: Pairs, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Any, down_bias: Any,
    preact: Tensor | None,
) -> Tensor:  # fmt: skip
    """Computes both products. `preact` receives the input of the gate."""
    hidden = first_product(net, x, pairs, up, up_bias, preact)
    sums = (pairs.place, _summable(weights, x).detach())
    return product(net, hidden, by_rows(down, net.stacked), pairs.ends, bias=down_bias, combine=sums)


class _Experts(torch.autograd.Function):
    """The autograd function of the layer. Tensors are separate arguments so that autograd sees them."""

    @staticmethod
    def forward(
        ctx: Any, net: Network, index: Tensor, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Any,
        down_bias: Any,
    ) -> Tensor:  # fmt: skip
        pairs = pairs_of(net, index, up)
        preact = None if net.recompute else preact_for(net, x, pairs, up)
        out = _forward(net, pairs, x, weights, up, down, up_bias, down_bias, preact)
        ctx.net = net
        ctx.save_for_backward(
            index, x, weights, up, down, up_bias, down_bias, preact, pairs.rows, pairs.place, pairs.ends
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        net, saved, wanted = ctx.net, ctx.saved_tensors, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return None, None, *_through_steps(net, saved, wanted, grads[0])
        found = _Backward(net, saved, grads[0].contiguous()).gradients(wanted)
        return None, None, *found


def _through_steps(net: Network, saved: Any, wanted: Any, grad: Tensor) -> list[Tensor | None]:
    """Gradients that are differentiable themselves."""
    index, *given = saved[:7]

    def results(inputs: list[Any]) -> list[Tensor]:
        x, weights, *parameters = inputs
        experts = parameters[0].shape[0]
        return [through_experts(x, index, weights, experts, lambda *sorted: net.in_steps(*sorted, *parameters))]

    return differentiated(given, wanted, results, [grad])


class _Backward:
    """The first derivatives of one layer."""

    def __init__(self, net: Network, saved: Any, grad: Tensor) -> None:
        self._net, self._grad = net, grad
        _, self._x, self._weights, self._up, self._down, self._up_bias, self._down_bias, preact, *pairs = saved
        self._pairs = Pairs(*pairs)
        if preact is None:
            preact = preact_for(net, self._x, self._pairs, self._up)
            first_product(net, self._x, self._pairs, self._up, self._up_bias, preact)
        self._preact = preact
        place, weights = self._pairs.place.view(-1).long(), _summable(self._weights, self._x)
        self._by_pair = torch.empty_like(weights.reshape(-1)).scatter_(0, place, weights.reshape(-1))

    def gradients(self, wanted: Any) -> list[Tensor | None]:
        """The wanted gradients of x, the routing weights, up, down and the biases."""
        net, x, pairs, grad = self._net, self._x, self._pairs, self._grad
        dh = product(net, grad, by_rows(self._down, not net.stacked), pairs.ends, a_rows=pairs.rows)
        dpreact, weighted, dweights = gate_backward(net, self._preact, dh, self._by_pair, pairs.ends)
        found: list[Tensor | None] = [None] * 6
        if wanted[0]:
            sums = (pairs.place, None)
            found[0] = product(net, dpreact, by_rows(self._up, not net.stacked), pairs.ends, combine=sums)
        if wanted[1]:
            found[1] = self._of_weights(dweights)
        if wanted[2]:
            found[2] = matrix_gradient(net, pairs, x, dpreact, turned=not net.stacked)
        if wanted[3]:
            found[3] = matrix_gradient(net, pairs, grad, weighted, turned=net.stacked)
        if wanted[4]:
            ones = torch.ones_like(self._by_pair)
            found[4] = summed_by_expert(net, pairs.ends, ones, dpreact, None, self._up_bias)
        if wanted[5]:
            found[5] = summed_by_expert(net, pairs.ends, self._by_pair, grad, pairs.rows, self._down_bias)
        return found

    def _of_weights(self, dots: Tensor) -> Tensor:
        """<gradient, row of down> for each pair; `dots` hold the part without bias."""
        place = self._pairs.place
        found = dots[place.long()]
        if self._down_bias is not None:
            numbers = torch.arange(place.numel(), device=place.device, dtype=self._pairs.ends.dtype)
            expert = torch.searchsorted(self._pairs.ends, numbers, right=True)[place.long()]
            there = expert < self._up.shape[0]
            every = self._grad.to(dots.dtype) @ self._down_bias.detach().to(dots.dtype).t()
            found = found + torch.where(there, every.gather(1, torch.where(there, expert, 0)), 0)
        return found.to(self._weights.dtype)


def matrix_gradient(net: Network, pairs: Pairs, tokens: Tensor, of_pairs: Tensor, turned: bool) -> Tensor:
    """The gradient of a weight: tokens[rows]^T @ of_pairs for each expert, transposed if `turned`."""
    if turned:
        return product(net, of_pairs.t(), tokens, pairs.ends, jagged="k", b_rows=pairs.rows)
    return product(net, tokens.t(), of_pairs, pairs.ends, jagged="k", a_rows=pairs.rows)


def summed_by_expert(
    net: Network, ends: Tensor, factors: Tensor, rows: Tensor, index: Tensor | None, like: Tensor
) -> Tensor:
    """The sum of factor * row for each expert. A factor is split into several numbers of the rows' dtype, which
    together keep all of its digits."""
    parts, rest = [], factors
    for _ in range(1 if factors.dtype is rows.dtype else 3):
        parts.append(rest.to(rows.dtype))
        rest = rest - parts[-1].to(rest.dtype)
    wide = torch.promote_types(rows.dtype, torch.float32)
    found = product(net, torch.stack(parts), rows, ends, jagged="k", b_rows=index, out_dtype=wide)
    return found.sum(1).to(like.dtype)


def gate_backward(
    net: Network,
    preact: Tensor,
    dh: Tensor,
    weights: Tensor,
    ends: Tensor,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of preact, weight * h, <dh, h>) of pairs; zeros for those that no expert has.

    preact [S, W], dh [S, I] without the weights [S] of the pairs; the dots are float32 (float64). `into`: memory for
    the first two, of more pairs, and [S] the row of each pair there; a pair of no expert may write to the last one,
    which is then nobody's.
    """
    kernels = triton_kernels() if preact.is_cuda else None
    if kernels is not None and net.gate is not None and ends.numel():
        found: tuple[Tensor, Tensor, Tensor] = kernels.pair_backward(net.gate, preact, dh, weights, ends, into)
        return found
    wide = torch.promote_types(preact.dtype, torch.float32)
    count = preact.shape[0]
    last = ends[-1] if ends.numel() else torch.zeros((), dtype=torch.int32, device=preact.device)
    there = (torch.arange(count, device=preact.device) < last).unsqueeze(1)
    with torch.enable_grad():
        x = torch.where(there, preact.detach(), 0).to(wide).requires_grad_()
        h = gate_by_torch(x, net.activation, net.gate)
    slope, weight = torch.where(there, dh, 0).to(wide), torch.where(there, weights.to(wide).unsqueeze(1), 0)
    (dpreact,) = torch.autograd.grad(h, x, slope * weight)
    h = h.detach()
    dpreact, weighted = dpreact.to(preact.dtype), (h * weight).to(preact.dtype)
    if into is not None:
        whole, whole_weighted, rows = into[0], into[1], into[2].long().clamp(max=len(into[0]) - 1)
        dpreact, weighted = whole.index_copy_(0, rows, dpreact), whole_weighted.index_copy_(0, rows, weighted)
    return dpreact, weighted, (h * slope).sum(1)


# --- the layer as one operator, for graphs -------------------------------------------------------------

_library: Any = torch.library.Library("multigemm", "FRAGMENT")  # type: ignore[no-untyped-call]
_GIVEN = "Tensor x, Tensor index, Tensor weights, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias"
_NETWORK = (
    "str activation, str glu_layout, float glu_alpha, float glu_beta, float? glu_limit, bool stacked, bool recompute, "
    "str backend, bool? batch_invariant"
)
for schema in (
    f"experts({_GIVEN}, *, {_NETWORK}, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"experts_backward(Tensor grad, {_GIVEN}, Tensor preact, Tensor rows, Tensor place, Tensor ends, bool[] wanted, *, "
    f"{_NETWORK}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
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
    pairs = pairs_of(net, index, up)
    preact = preact_for(net, x, pairs, up) if keep else None
    out = _forward(net, pairs, x, weights, up, down, up_bias, down_bias, preact)
    return out, x.new_empty(0) if preact is None else preact, pairs.rows, pairs.place, pairs.ends


def _experts_like(x: Tensor, index: Tensor, *given: Any, keep: bool, **options: Any) -> tuple[Tensor, ...]:
    up, count = given[1], index.shape[0] * index.shape[1]
    width = up.shape[2 if options["stacked"] else 1]
    numbers = {"dtype": torch.int32, "device": x.device}
    preact = x.new_empty((count, width)) if keep else x.new_empty(0)
    rows, place = torch.empty(count, **numbers), torch.empty(index.shape, **numbers)  # type: ignore[call-overload]
    return x.new_empty(x.shape), preact, rows, place, torch.empty(up.shape[0], **numbers)  # type: ignore[call-overload]


def _experts_backward(grad: Tensor, x: Tensor, index: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
    *given, preact, rows, place, ends, wanted = rest
    saved = (index, x, *given, preact if preact.numel() or not len(rows) else None, rows, place, ends)
    found = _Backward(_network(options), saved, grad.contiguous()).gradients(wanted)
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
