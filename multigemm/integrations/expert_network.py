"""What the networks of experts are (`Network`), with quantised weights too, and a layer of them in steps
(`through_experts`): tokens to experts, two products with a gate or an activation between them, and back.

Each token goes to k experts, which makes S = tokens * k pairs. A stable sort by expert puts the pairs of one expert
next to each other; the inverse permutation returns the results. Both directions, and their gradients, are gathers, so
the same call gives the same bits; there are no atomics, and nothing waits for the device. Expert numbers outside of
0..experts-1 mean "not on this rank": those pairs come after the last group, where a grouped GEMM reads nothing and
writes zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from multigemm.errors import InvalidProblem
from multigemm.integrations.gradients import gate_by_torch
from multigemm.integrations.layer_ops import geglu, sort_by_expert, swiglu, weighted_sum
from multigemm.integrations.torch_op import grouped_gemm
from multigemm.problem.fused import Gate
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import GATES
from multigemm.quantize import Format, Quantized, quantize, turned
from multigemm.settings import settings


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


# --- quantised weights: stacks [E, out, in], with scales [E, out or blocks, blocks of in] ---------------


def quantize_stack(weight: Tensor, format: Format, scale: str, scale_dtype: torch.dtype) -> Quantized:
    """Quantises a stack [E, out, in] as b of the product x @ weight[e].T. Grids are transposed like the weight."""
    found = quantize(weight.mT, format, scale, side="b", scale_dtype=scale_dtype, zero=format == "uint4")
    return Quantized(found.data.mT, *(None if t is None else turned(t) for t in (found.scale, found.zero)))


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
