"""Hugging Face transformers: `experts_implementation="multigemm"` for every MoE model of its 5.x line.

    import multigemm.integrations.transformers  # registers the name
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="multigemm")
    model.set_experts_implementation("multigemm")  # or: on a model that exists

The models keep their weights, routers and gates; what is replaced is the forward pass of their
experts. Compared with transformers' own "grouped_mm": every dtype, no alignment rule, the bias fused
into the GEMM, and zeros, not stale memory, behind the last group.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from multigemm.integrations import layer_call
from multigemm.integrations.layer_ops import swiglu
from multigemm.integrations.routing import combine, dispatch, route
from multigemm.integrations.torch_op import grouped_gemm

NAME = "multigemm"
SILU = (type(ACT2FN["silu"]),)


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward pass of any module that transformers decorates with `use_experts_implementation`."""
    networks = _networks(experts)
    if networks is not None:
        y = layer_call.call(hidden_states, top_k_index, top_k_weights, networks)
        if y is not None:
            return y
    routing = route(top_k_index, experts.num_experts)
    rows = dispatch(hidden_states, routing)
    hidden = _linear(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, routing.ends)
    hidden = _activated(experts, hidden)
    rows = _linear(experts, "down_proj", hidden, routing.ends)
    if getattr(experts, "has_post_expert_norm", False):
        rows = experts.post_expert_norm(rows)
    if getattr(experts, "_is_expert_parallel", False):  # pairs that another rank computes
        top_k_weights = top_k_weights.masked_fill(top_k_index >= experts.num_experts, 0)
    return combine(rows, top_k_weights, routing).to(hidden_states.dtype)


def _is_swiglu(experts: Any) -> bool:
    """Whether the gate is SwiGLU in transformers' default layout."""
    return experts.has_gate and type(experts)._apply_gate is _default_apply_gate and type(experts.act_fn) in SILU


def _networks(experts: Any) -> layer_call.Networks | None:
    """The layer as one that may be bound; None for what has parts of its own."""
    if getattr(experts, "has_post_expert_norm", False) or getattr(experts, "_is_expert_parallel", False):
        return None
    if not _is_swiglu(experts):
        return None
    up_bias, down_bias = (experts.gate_up_proj_bias, experts.down_proj_bias) if experts.has_bias else (None, None)
    stacked = bool(experts.is_transposed)
    return layer_call.Networks(experts.gate_up_proj, experts.down_proj, up_bias, down_bias, stacked, gelu=False)


def _activated(experts: Any, hidden: Tensor) -> Tensor:
    """The model's own gate, or, where that is SwiGLU, ours: one pass, one rounding."""
    if _is_swiglu(experts):
        return swiglu(hidden)
    if not experts.has_gate:
        return experts.act_fn(hidden)  # type: ignore[no-any-return]
    return experts._apply_gate(hidden)  # type: ignore[no-any-return]


def _linear(experts: Any, name: str, rows: Tensor, ends: Tensor) -> Tensor:
    weight = getattr(experts, name)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    stacked = weight if experts.is_transposed else weight.transpose(1, 2)
    return grouped_gemm(rows.to(weight.dtype), stacked, ends=ends, bias=bias)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
