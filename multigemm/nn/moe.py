"""Mixture of experts: router, sort by expert, two grouped GEMMs, weighted sum. No token is dropped.

Names and shapes of the weights are those of the MoE blocks of Hugging Face transformers
(`gate.weight`, `experts.gate_up_proj`, `experts.down_proj`), so their state dicts load as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from multigemm.errors import InvalidProblem
from multigemm.integrations.bound_layer import run_bound
from multigemm.integrations.expert_network import (
    Network,
    fuses_unless_told,
    hold,
    quantize_stack,
    scale_keywords,
    through_experts,
)
from multigemm.integrations.fused_experts import run_experts, run_few_tokens
from multigemm.integrations.torch_op import grouped_gemm
from multigemm.nn.linear import check_layer, init_linear_
from multigemm.planning.launch_key import PLAIN as PLAIN_TENSORS
from multigemm.problem import epilogue
from multigemm.problem.spec import GATES, GLU_LAYOUTS
from multigemm.quantize import Format
from multigemm.settings import settings
from multigemm.torch_internals import any_requires_grad, in_transform, run_while_tracing

GATED = GATES
PLAIN = ("relu", "gelu", "gelu_tanh", "silu")


@run_while_tracing
def _invariant_unless_told() -> bool:
    """The value of MULTIGEMM_BATCH_INVARIANT; a compiled graph keeps the value of the first call."""
    return settings().batch_invariant


class Experts(nn.Module):
    """E feed-forward networks. Each token passes through k of them and gets their weighted sum.

    Gated ("swiglu", "geglu", "geglu_tanh", "reglu", "glu"): `gate_up_proj` [E, 2*I, H] holds the gate in its first I
    rows, or where `glu_layout` says. Plain ("gelu", "gelu_tanh", "relu", "silu"): `up_proj` [E, I, H], the activation
    fused into its GEMM. `down_proj` is [E, H, I]. With `bias`, each has a partner `<name>_bias`.

    Args:
        num_experts, hidden_size, intermediate_size: E, H and I.
        activation: a gated or a plain one.
        bias: whether the networks have biases.
        backend: a name, names joined by commas, or "auto".
        batch_invariant: as in a problem: a token's result has the same bits in any batch.
        glu_layout, glu_alpha, glu_beta, glu_limit: of a gate, as in a problem (docs/how-to/moe-keywords.md).
        stacked: weights are [E, in, out], as those of gpt-oss.
        fused: rows are picked, gated and summed inside the products, by a backend that takes these keywords; for
            backward the layer keeps the products before the gate, 2 I numbers for each pair of token and expert, and
            no rows. One operator in a compiled graph. Over a mesh a token travels once to
            each rank that has experts of it, and second derivatives are refused. None: on a CPU; on a GPU if gradients
            are wanted, but in 16 bits on Hopper GPUs only where steps have no kernel for the gate; and for few tokens
            without gradients (`docs/how-to/moe-layer.md`).
        recompute: the layer is fused, keeps not even those, and forms the first products once more.
        device, dtype: of the weights.

    Raises:
        InvalidProblem: an extent or a name has no meaning.

    Example:
        >>> import torch
        >>> experts = Experts(num_experts=4, hidden_size=8, intermediate_size=6)
        >>> index = torch.tensor([[0, 3], [3, 1], [2, 0]])
        >>> experts(torch.ones(3, 8), index, torch.full((3, 2), 0.5)).shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        backend: str = "auto",
        batch_invariant: bool | None = None,
        glu_layout: str = "halves",
        glu_alpha: float = 1.0,
        glu_beta: float = 0.0,
        glu_limit: float | None = None,
        stacked: bool = False,
        fused: bool | None = None,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        epilogue.one_of(activation, "activation", (*GATED, *PLAIN))
        epilogue.one_of(glu_layout, "glu_layout", GLU_LAYOUTS)
        self.network = Network(
            activation, glu_layout, glu_alpha, glu_beta, glu_limit, stacked, recompute, backend, batch_invariant
        )
        self.network.check()
        self._own_gate = activation in GATED and not self.network.usual_gate
        """Whether the gate is one that layers in steps have no kernel for."""
        if recompute and fused is False:
            raise InvalidProblem("recompute=True with fused=False: only fused experts recompute: leave fused out")
        self.fused = True if recompute else fused
        extents = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
        check_layer(backend, dtype, num_experts=num_experts, **extents)
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.activation, self.backend, self.batch_invariant = activation, backend, batch_invariant
        self.weight_format: Format | None = None
        self.mesh: Any = None
        self.chunks = 1
        self.first = "gate_up_proj" if activation in GATED else "up_proj"
        self._names = self.first, "down_proj", f"{self.first}_bias", "down_proj_bias"
        self._register_weights(stacked, bias, device, dtype)
        self.reset_parameters()

    def _register_weights(
        self, stacked: bool, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        hidden, inner = self.hidden_size, self.intermediate_size
        width = 2 * inner if self.activation in GATED else inner
        for name, out, given in ((self.first, width, hidden), ("down_proj", hidden, inner)):
            shape = (given, out) if stacked else (out, given)
            weight = torch.empty(self.num_experts, *shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(weight))
            vector = nn.Parameter(torch.empty(self.num_experts, out, device=device, dtype=dtype)) if bias else None
            self.register_parameter(f"{name}_bias", vector)

    def reset_parameters(self) -> None:
        """Fresh weights, distributed like those of torch.nn.Linear."""
        for name in (self.first, "down_proj"):
            weight = getattr(self, name)
            init_linear_(weight.transpose(1, 2) if self.network.stacked else weight, getattr(self, f"{name}_bias"))

    def quantize_(self, format: Format, scale: str, *, scale_dtype: torch.dtype = torch.float32) -> Experts:
        """Quantises the weights in place, for inference: activations stay in bfloat16 or float16.

        Each weight becomes codes [E, out, in] (two in a byte of "int4", "uint4" and "e2m1"; also where the weights were
        `stacked`), beside a buffer `<name>_scale` and, of "uint4", `<name>_zero`. Such a state dict loads into a layer
        that was quantised alike.

        Args:
            format: "e4m3", "e5m2", "int8", "int4", "uint4" or "e2m1".
            scale: what one number covers, as in `multigemm.quantize.quantize`: "row", "1x32", "128x128", ... mxfp4 is
                "e2m1" with "1x32" and float8_e8m0fnu.
            scale_dtype: float32, float8_e8m0fnu or the dtype of activations.

        Returns:
            The layer.

        Raises:
            InvalidProblem: a word has no meaning; the layer is quantised already, spread over a mesh, or was made with
                fused=True or recompute=True.
        """
        if self.mesh is not None:
            raise InvalidProblem("these experts are spread over a mesh: quantise them before")
        if self.weight_format is not None:
            raise InvalidProblem(f"these experts hold {self.weight_format} already: quantise fresh ones")
        if self.fused:
            given = "recompute=True" if self.network.recompute else "fused=True"
            raise InvalidProblem(f"{given} takes no quantised weights yet: make the experts without it")
        for name in (self.first, "down_proj"):
            weight = getattr(self, name).detach()
            stack = weight.mT if self.network.stacked else weight
            hold(self, name, quantize_stack(stack, format, scale, scale_dtype))
        self.weight_format, self.network = format, self.network._replace(stacked=False)
        return self

    def forward(
        self,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        beside: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """The weighted sum of each token's experts; over a mesh, every rank calls it.

        Args:
            x: [tokens, H].
            top_k_index: [tokens, k], which experts.
            top_k_weights: [tokens, k], their weights.
            beside: gives [tokens, H] that is added, as of shared experts; over a mesh it is called while rows travel.

        Returns:
            [tokens, H].

        Raises:
            InvalidProblem: this is no routing; over a mesh, that of any rank is none.
            LibraryError: a rank of the mesh does not answer within the timeout of its process group.
        """
        if self.mesh is not None:
            return self._spread(x, top_k_index, top_k_weights, beside)
        y = self._here(x, top_k_index, top_k_weights)
        return y if beside is None else y + beside()

    def _here(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The layer without a mesh."""
        if self.weight_format is None:
            given = (x, top_k_index, top_k_weights, *self._weights())
            if self.fused or (self.fused is None and self._fuses(*given)):
                return run_experts(self.network, *given)
            if not self._own_gate:
                y = None if self.fused is False else run_few_tokens(self.network, *given)
                y = run_bound(self.network, False, *given) if y is None else y
                if y is not None:
                    return y
        return through_experts(x, top_k_index, top_k_weights, self.num_experts, self.apply_sorted)

    def apply_sorted(self, rows: Tensor, ends: Tensor) -> Tensor:
        """The networks alone, on rows [S, H] that are sorted by expert and cut by `ends` [E]."""
        return self.network.in_steps(rows, ends, *self._weights(), *map(self._scales, (self.first, "down_proj")))

    def _fuses(self, x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, *biases: Any) -> bool:
        """Whether a layer with fused=None runs fused. The number of tokens does not decide."""
        compiling = torch.compiler.is_compiling()
        gradients = not compiling and torch.is_grad_enabled() and any_requires_grad(x, weights, up, down, *biases)
        if not fuses_unless_told(self.network, self._own_gate, x, gradients):
            return False
        for t in (x, up, down):
            if type(t) not in PLAIN_TENSORS or t.dtype is not x.dtype:
                return False  # a DTensor, say
        return compiling or not in_transform()

    def _spread(self, x: Tensor, index: Tensor, weights: Tensor, beside: Callable[[], Tensor] | None) -> Tensor:
        from multigemm.integrations import expert_parallel, fused_parallel  # torch.distributed is optional in torch

        if not self.fused:
            return expert_parallel.run_experts(
                x, index, weights, self.num_experts, self.apply_sorted, self.mesh, self.chunks, beside
            )
        held = fused_parallel.Held(*self._weights(), self.num_experts)
        return fused_parallel.run_fused(x, index, weights, held, self.network, self.mesh, self.chunks, beside)

    def _weights(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The weights and biases, or over a mesh, where all of them are DTensors, this rank's part."""
        held: Any = self._parameters  # an attribute of a module takes as long as a launch
        found: list[Any] = [held[name] if name in held else getattr(self, name) for name in self._names]
        if self.mesh is None:
            return found[0], found[1], found[2], found[3]
        from multigemm.integrations.expert_parallel import groups_of, share

        found = [x if x is None else x.to_local() for x in found]
        slices = groups_of(self.mesh)[1]
        if found[3] is not None and slices is not None:
            found[3] = share(found[3], slices.size())
        return found[0], found[1], found[2], found[3]

    def _scales(self, name: str) -> dict[str, Any]:
        """The keywords of a quantised weight."""
        if self.weight_format is None:
            return {}
        held: Any = self._buffers
        return scale_keywords(self.weight_format, held[f"{name}_scale"], held.get(f"{name}_zero"))

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, activation={self.activation!r}, "
            f"bias={self.down_proj_bias is not None}"
            + (f", weight_format={self.weight_format!r}" if self.weight_format else "")
        )


class MoE(nn.Module):
    """A mixture-of-experts layer: x [..., H] -> [..., H].

    The router takes a softmax over all experts in float32, keeps the best `top_k`, and, with
    `normalize`, scales their weights to a sum of one. No token is dropped and no expert has a
    capacity. `router_logits` of the last call are returned too if `forward(x, return_logits=True)`,
    for load-balancing losses.

    Args:
        hidden_size, intermediate_size, num_experts: H, I and E.
        top_k: experts of each token.
        activation: "swiglu", "geglu", "geglu_tanh", "reglu", "glu", or the plain "gelu", "gelu_tanh", "relu", "silu".
        normalize: whether the weights of a token's experts sum to one.
        bias: whether the experts have biases.
        backend: a name, names joined by commas, or "auto".
        batch_invariant: the router is a grouped GEMM too, and a token's experts and its result do not depend on the
            batch.
        glu_layout, glu_alpha, glu_beta, glu_limit, stacked, fused, recompute: as `Experts` has them.
        shared_experts: a module [tokens, H] -> [tokens, H] that every token passes through as well; over a mesh it runs
            while rows travel.
        device, dtype: of the weights.

    Raises:
        InvalidProblem: an extent or a name has no meaning.

    Example:
        >>> import torch
        >>> moe = MoE(hidden_size=8, intermediate_size=6, num_experts=4, top_k=2)
        >>> moe(torch.ones(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int = 2,
        *,
        activation: str = "swiglu",
        normalize: bool = True,
        bias: bool = False,
        backend: str = "auto",
        batch_invariant: bool | None = None,
        glu_layout: str = "halves",
        glu_alpha: float = 1.0,
        glu_beta: float = 0.0,
        glu_limit: float | None = None,
        stacked: bool = False,
        fused: bool | None = None,
        recompute: bool = False,
        shared_experts: nn.Module | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_layer(backend, dtype, num_experts=num_experts, top_k=top_k, hidden_size=hidden_size)
        if num_experts < 1:
            raise InvalidProblem(f"num_experts={num_experts}; it must be 1 or more")
        if not 1 <= top_k <= num_experts:
            raise InvalidProblem(f"top_k={top_k} must lie in 1..{num_experts}, the number of experts")
        self.top_k, self.normalize = top_k, normalize
        self.gate = nn.Linear(hidden_size, num_experts, bias=False, device=device, dtype=dtype)
        self.experts = Experts(
            num_experts, hidden_size, intermediate_size,
            activation=activation, bias=bias, backend=backend, batch_invariant=batch_invariant, glu_layout=glu_layout,
            glu_alpha=glu_alpha, glu_beta=glu_beta, glu_limit=glu_limit, stacked=stacked, fused=fused,
            recompute=recompute, device=device, dtype=dtype,
        )  # fmt: skip
        self.shared_experts = shared_experts

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logits [tokens, E], index [tokens, k], weights [tokens, k]) of x [tokens, H]."""
        logits = self._logits(x)
        weights, index = torch.topk(logits.softmax(dim=-1, dtype=torch.float32), self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, index, weights

    def _logits(self, x: Tensor) -> Tensor:
        """The router's logits. With batch invariance by a grouped GEMM, because torch chooses a kernel by the number of
        tokens."""
        experts = self.experts
        asked = experts.batch_invariant
        if not (_invariant_unless_told() if asked is None else asked):
            return self.gate(x)  # type: ignore[no-any-return]
        return grouped_gemm(x, self.gate.weight.T, backend=experts.backend, batch_invariant=True)

    def forward(self, x: Tensor, return_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The layer.

        Args:
            x: [..., H].
            return_logits: whether the router's logits [tokens, E] are returned as well.

        Returns:
            [..., H], or that and the logits.
        """
        rows = x.reshape(-1, x.shape[-1])
        logits, index, weights = self.route(rows)
        shared = self.shared_experts
        beside = None if shared is None else lambda: shared(rows)
        y = self.experts(rows, index, weights, beside).view(x.shape)
        return (y, logits) if return_logits else y

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, normalize={self.normalize}"
