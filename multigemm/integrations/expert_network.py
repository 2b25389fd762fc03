"""What the networks of experts are (`Network`), with quantised weights too, and a layer of them in steps
(`through_experts`): tokens to experts, two products with a gate or an activation between them, and back. One token or
a few go through kernels of their own (`takes_few_tokens`).

Each token goes to k experts, which makes S = tokens * k pairs. A stable sort by expert puts the pairs of one expert
next to each other; the inverse permutation returns the results. Both directions, and their gradients, are gathers, so
the same call gives the same bits; there are no atomics, and nothing waits for the device. Expert numbers outside of
0..experts-1 mean "not on this rank": those pairs come after the last group, where a grouped GEMM reads nothing and
writes zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from multigemm.errors import InvalidProblem
from multigemm.integrations.gradients import gate_by_torch
from multigemm.integrations.layer_ops import decode_kernels, geglu, kernels_for, sort_by_expert, swiglu, weighted_sum
from multigemm.integrations.torch_op import grouped_gemm
from multigemm.planning.launch_key import PLAIN
from multigemm.problem.fused import Gate
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import FLOAT_DTYPES, GATES
from multigemm.quantize import Format, Quantized, quantize, turned
from multigemm.settings import settings
from multigemm.torch_internals import only_result_wanted


class Network(NamedTuple):
    """The activation and layout of an expert's two products, without their weights: `up` [E, W, H] and `down`
    [E, H, I], or `stacked` [E, H, W] and [E, I, H]. W is 2 I with a gate, else I."""

    activation: str = "swiglu"
    glu_layout: str = "halves"
    glu_alpha: float = 1.0
    glu_beta: float = 0.0
    glu_limit: float | None = None
    stacked: bool = False
    recompute: bool = False
    backend: str = "auto"
    batch_invariant: bool | None = None

    @property
    def gate(self) -> Gate | None:
        """The gate; None if the activation is no gate."""
        if self.activation not in GATES:
            return None
        kind: Any = self.activation
        layout: Any = self.glu_layout
        return Gate(kind, layout, self.glu_alpha, self.glu_beta, self.glu_limit)

    @property
    def invariant(self) -> bool:
        """Whether the bits of a row must not depend on the other rows."""
        return settings().batch_invariant if self.batch_invariant is None else self.batch_invariant

    @property
    def usual_gate(self) -> bool:
        """Whether the gate is SwiGLU or GEGLU of halves, for which a layer in steps has kernels."""
        return self.gate is not None and self.gate in (Gate("swiglu"), Gate("geglu"))

    def check(self) -> None:
        """Refuses gate numbers that no problem takes."""
        names = ("activation", "glu_layout", "glu_alpha", "glu_beta", "glu_limit")
        x, given = np.zeros((1, 2)), {name: getattr(self, name) for name in names}
        GroupedGemmProblem(x, x.repeat(2, 0), **given)

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of the first product, which has the gate inside."""
        if self.gate is None:
            return {"activation": self.activation}
        _, layout, alpha, beta, limit = self.gate
        numbers = {"glu_layout": layout, "glu_alpha": alpha, "glu_beta": beta, "glu_limit": limit}
        return {"activation": self.activation, **numbers}

    def activate(self, x: Tensor) -> Tensor:
        """Applies the activation or gate to results of the first product by torch functions; rounds once."""
        if self.usual_gate:
            return (swiglu if self.activation == "swiglu" else geglu)(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return gate_by_torch(wide, self.activation, self.gate).to(x.dtype)

    def in_steps(
        self, rows: Tensor, ends: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
        up_scales: dict[str, Any] | None = None, down_scales: dict[str, Any] | None = None,
    ) -> Tensor:  # fmt: skip
        """Runs the networks on rows [S, H] that are sorted by expert and cut by `ends` [E], by operators that have
        gradients of every order. `up_scales` and `down_scales`: the keywords of quantised weights."""
        gated = self.gate is not None
        hidden = self._linear(rows, ends, up, up_bias, None if gated else self.activation, up_scales)
        return self._linear(self.activate(hidden) if gated else hidden, ends, down, down_bias, None, down_scales)

    def _linear(
        self, rows: Tensor, ends: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, scales: Any
    ) -> Tensor:
        return grouped_gemm(
            rows, by_rows(weight, self.stacked), ends=ends, bias=bias, activation=activation, backend=self.backend,
            batch_invariant=self.batch_invariant, **(scales or {}),
        )  # fmt: skip


FUSING = frozenset(("auto", "cpu", "cupy", "triton"))
"""Backends with kernels of their own for the fused products of layers."""


def has_fast_fused_products(x: Tensor, backend: str) -> bool:
    """Whether fused products were measured for these tokens: 16 bits, compute capability 9.0, a backend that has
    them."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or not FUSING.issuperset(backend.split(",")):
        return False
    return _capability(x.get_device()) == (9, 0)


def fuses_unless_told(net: Network, own_gate: bool, x: Tensor, gradients: bool) -> bool:
    """Whether a layer that is not told how to run takes fused products. They keep less memory for backward.

    On a CPU it does. In 16 bits on Hopper GPUs, where both ways were measured, it does if steps have no kernel for its
    gate (`own_gate`); otherwise on a GPU if `gradients` are wanted. On a GPU batch-invariant layers, whose bits must
    not depend on wanted gradients, compiled graphs and layers in float64 or under autocast run in steps.
    """
    if not FUSING.issuperset(net.backend.split(",")):
        return False
    if x.is_cpu:
        return True
    if not x.is_cuda or not (own_gate or gradients) or torch.compiler.is_compiling() or net.invariant:
        return False
    if has_fast_fused_products(x, net.backend):
        return own_gate
    return gradients and x.dtype is not torch.float64 and not torch.is_autocast_enabled("cuda")


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def by_rows(weight: Tensor, stacked: bool) -> Tensor:
    """The weights as the second operand of rows @ weight."""
    return weight if stacked else weight.transpose(1, 2)


# --- one token or a few ---------------------------------------------------------------------------------

# decode_kernels.py reads an expert's weights once for each of its pairs of token and expert, and checks nothing: what
# it takes is decided here, and everything else is left to products, which refuse what has no meaning.

EXPERTS_FOR_PAIR = 4
"""Experts for each pair from which on few pairs share one. Time over that of products, H200, 2026-11-23: Qwen3-30B (128
experts) with 2 and 4 tokens 0.87 and 0.90, DeepSeek-V3 (256) with 8 tokens 0.97; Mixtral (8) with 2 tokens 1.00, with 4
tokens 1.3."""
MOST_EACH = 1024
"""The most pairs of a token: a program holds their experts and weights, and where hidden numbers lie has 31 bits."""
MOST_WIDTH = 1 << 16
"""The largest extent of weights: a grid has 65535 blocks of at least two columns."""


@lru_cache(maxsize=256)
def _has_kernels(net: Network) -> bool:
    """Whether there are such kernels for a network; looks at the numbers of its gate if so."""
    found = net.backend in ("auto", "triton") and net.gate is not None and not net.stacked
    if found:
        net.check()
    return found


def may_take_few_tokens(net: Network, index: Tensor, up: Tensor) -> bool:
    """Whether the kernels for few tokens serve a network, and the pairs of index [tokens, k] are of one token, or few
    of them share an expert of up [E, W, H]. A quick test; `takes_few_tokens` tests everything.

    The backends "auto" and "triton" have the kernels. Batch-invariant layers do not use them, nor those with stacked
    weights.

    Raises:
        InvalidProblem: a number of the gate has no meaning.
    """
    if index.dim() != 2 or up.dim() != 3:
        return False
    tokens, pairs = len(index), index.numel()
    few = 0 < pairs <= MOST_EACH * tokens and (tokens == 1 or pairs * EXPERTS_FOR_PAIR <= len(up))
    return few and _has_kernels(net) and not net.invariant


def takes_few_tokens(
    net: Network, x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> bool:  # fmt: skip
    """Whether a layer whose result alone is wanted runs by the kernels for few tokens.

    Raises:
        InvalidProblem: a number of the gate has no meaning.
    """
    given = (x, index, weights, up, down, up_bias, down_bias)
    if not may_take_few_tokens(net, index, up) or not only_result_wanted(*given):
        return False
    if kernels_for(x, decode_kernels) is None or index.dtype not in (torch.int64, torch.int32):
        return False
    if not all(t is None or (type(t) in PLAIN and not t.is_neg() and t.device == x.device) for t in given):
        return False
    if x.dtype not in FLOAT_DTYPES or weights.dtype not in (torch.float32, x.dtype):
        return False
    biases = [bias for bias in (up_bias, down_bias) if bias is not None]
    if any(t.dtype is not x.dtype for t in (up, down, *biases)) or not all(t.is_contiguous() for t in biases):
        return False
    return _have_shapes(*given) and up.stride(2) == down.stride(2) == 1


def _have_shapes(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> bool:  # fmt: skip
    """Whether all shapes are those of one layer with a gate, and no extent is 0 or too large."""
    experts, both, width = up.shape
    inner = both // 2
    if not (inner > 0 and both == 2 * inner <= MOST_WIDTH and 0 < width <= MOST_WIDTH):
        return False
    wanted = ((down, (experts, width, inner)), (up_bias, (experts, both)), (down_bias, (experts, width)),
              (x, (len(index), width)), (weights, index.shape))  # fmt: skip
    return all(t is None or t.shape == shape for t, shape in wanted)


def result_of_few_tokens(
    net: Network, x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """The layer's result [tokens, H]; None if gradients are wanted, or products have to compute it."""
    given = (x, index, weights, up, down, up_bias, down_bias)
    found: Tensor | None = decode_kernels().decode(net, *given) if takes_few_tokens(net, *given) else None
    return found


# --- quantised weights: stacks [E, out, in], with scales [E, out or blocks, blocks of in] ---------------


QUANTISED_AT_ONCE = 4
"""Experts quantised at a time, because some formats need memory for float32 numbers."""


def quantize_stack(weight: Tensor, format: Format, scale: str, scale_dtype: torch.dtype) -> Quantized:
    """Quantises a stack [E, out, in] as b of the product x @ weight[e].T. Grids are transposed like the weight, and as
    contiguous along `in` as those of checkpoints."""
    few = max(1, len(weight)) if scale == "tensor" else QUANTISED_AT_ONCE
    found = [
        quantize(part.mT, format, scale, side="b", scale_dtype=scale_dtype, zero=format == "uint4")
        for part in torch.split(weight, few)
    ]
    data = _joined([part.data.mT for part in found])
    scales = _joined([turned(part.scale) for part in found])
    return Quantized(data, scales, None if found[0].zero is None else _joined([turned(part.zero) for part in found]))


def _joined(parts: list[Tensor]) -> Tensor:
    """One stack, without gaps; through bytes, since a GPU joins no float8_e8m0fnu."""
    if len(parts) == 1:
        return parts[0].contiguous()
    if parts[0].dtype.itemsize > 1:
        return torch.cat(parts)
    return torch.cat([x.view(torch.uint8) for x in parts]).view(parts[0].dtype)


def scale_keywords(format: Format, scale: Tensor, zero: Tensor | None = None) -> dict[str, Any]:
    """The keywords of `grouped_gemm` that go with the transposed stack."""
    packed = format if format in ("int4", "uint4", "e2m1") else None
    return {"scale_b": turned(scale), "zero_b": None if zero is None else turned(zero), "b_format": packed}


def hold(module: nn.Module, name: str, held: Quantized) -> None:
    """Makes a quantised stack the weight `name` of a module, with its scales in a buffer `<name>_scale` and its zero
    points, if there are any, in `<name>_zero`."""
    module.register_parameter(name, nn.Parameter(held.data, requires_grad=False))
    module.register_buffer(f"{name}_scale", held.scale)
    if held.zero is not None:
        module.register_buffer(f"{name}_zero", held.zero)


# --- tokens to experts and back ------------------------------------------------------------------------

Compute = Callable[[Tensor, Tensor], Tensor]
"""(rows [S, H] sorted by expert, ends [experts]) -> rows [S, H']."""


def through_experts(x: Tensor, index: Tensor, weights: Tensor, experts: int, compute: Compute) -> Tensor:
    """Runs a layer in steps: the weighted sum of the rows that `compute` makes for each token.

    x [tokens, H], index and weights [tokens, k] -> [tokens, H'].
    """
    check_routing(x, index, weights)
    routing = route(index, experts)
    return combine(compute(dispatch(x, routing), routing.ends), weights, routing)


def check_routing(x: Tensor, index: Tensor, weights: Tensor) -> None:
    """Refuses an index or weights that are not [tokens, k] for tokens x [tokens, H]."""
    if x.dim() != 2 or index.dim() != 2 or index.shape != weights.shape or index.shape[0] != x.shape[0]:
        raise InvalidProblem(
            f"x {tuple(x.shape)}, index {tuple(index.shape)}, weights {tuple(weights.shape)}: index and weights must "
            "be [tokens, k] for x [tokens, H]"
        )
    if index.dtype is torch.bool or index.dtype.is_floating_point or index.dtype.is_complex:
        raise InvalidProblem(f"top_k_index has dtype {index.dtype}; expert numbers are integers: call .long()")


@dataclass(frozen=True, slots=True)
class Routing:
    """`order` [S] lists the pairs by expert, `inverse` undoes it, `ends` [experts] cuts the sorted pairs."""

    order: Tensor
    inverse: Tensor
    ends: Tensor
    top_k: int


def route(top_k_index: Tensor, experts: int) -> Routing:
    """The routing of `top_k_index` [tokens, k]."""
    order, inverse, ends = sort_by_expert(top_k_index.reshape(-1), experts)
    return Routing(order, inverse, ends, top_k_index.shape[-1])


class _Dispatch(torch.autograd.Function):
    """Autograd function: row order[s] // k of x for every pair s. The gradient of a token is the sum over its k
    pairs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x.index_select(0, order if top_k == 1 else order // top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return weighted_sum(grad, ctx.saved_tensors[0], None, ctx.top_k), None, None, None


def dispatch(x: Tensor, routing: Routing) -> Tensor:
    """[tokens, H] -> [S, H], sorted by expert."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x.index_select(0, routing.order // routing.top_k)
    rows: Tensor = _Dispatch.apply(x, routing.order, routing.inverse, routing.top_k)  # type: ignore[no-untyped-call]
    return rows


def combine(y: Tensor, weights: Tensor, routing: Routing) -> Tensor:
    """[S, H] sorted by expert, and weights [tokens, k] -> the weighted sum of each token [tokens, H]."""
    return weighted_sum(y, routing.inverse, weights, routing.top_k)


def permute(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """The rows of x in another order; `inverse` is the inverse permutation."""
    rows: Tensor = _Dispatch.apply(x, order, inverse, 1)  # type: ignore[no-untyped-call]
    return rows
