"""Hugging Face transformers: `experts_implementation="multigemm"` for every MoE model of its 5.x line.

    import multigemm.integrations.transformers  # registers the name
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="multigemm")
    model.set_experts_implementation("multigemm")  # or: on a model that exists

The models keep their weights, routers and gates; what is replaced is the forward pass of their
experts. Compared with transformers' own "grouped_mm": every dtype, no alignment rule, the bias fused
into the GEMM, and zeros, not stale memory, behind the last group.

Experts with quantised weights run as well: those that `quantize_experts_` makes of a model, those of gpt-oss's
checkpoints in mxfp4 (`load_mxfp4_experts_`), and transformers' own `FP8Experts` (DeepSeek-V3's blocks of 128 x 128).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from multigemm.errors import InvalidProblem
from multigemm.integrations.bound_layer import run_bound
from multigemm.integrations.expert_network import Network, hold, quantize_stack, scale_keywords, through_experts
from multigemm.integrations.fused_experts import run_experts, run_few_tokens
from multigemm.integrations.gradients import gate_by_torch
from multigemm.integrations.layer_ops import swiglu
from multigemm.integrations.torch_op import grouped_gemm
from multigemm.problem.spec import GATES, GLU_LAYOUTS, HALVES
from multigemm.quantize import Format, Quantized, quantize, turned

NAME = "multigemm"
SILU = (type(ACT2FN["silu"]),)
FORMAT = "_multigemm_weight_format"
"""The attribute of an experts module that holds the format of quantised weights. Their scales are buffers
`<name>_scale` and `<name>_zero`."""
SWIGLU, STACKED_SWIGLU = Network(), Network(stacked=True)
GATE = "_multigemm_gate"
"""The attribute of a module that holds its gate as one of this package's gates, or None."""
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
BLOCK = 128
"""The number of K, and of columns, that one scale of `FP8Experts` covers."""


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward pass of any module that transformers decorates with `use_experts_implementation`."""
    own = _own_gate(experts)
    if own is not None:
        x = hidden_states.to(experts.down_proj.dtype)
        rows = run_experts(own, x, top_k_index, top_k_weights, *_parameters(experts))
        return rows.to(hidden_states.dtype)
    if _is_plain(experts) and _is_swiglu(experts):
        net = STACKED_SWIGLU if experts.is_transposed else SWIGLU
        given = (hidden_states, top_k_index, top_k_weights, *_parameters(experts))
        y = run_few_tokens(net, *given)
        y = run_bound(net, False, *given) if y is None else y
        if y is not None:
            return y
    return _in_steps(experts, hidden_states, top_k_index, top_k_weights, _linear, _activated)


def _in_steps(
    experts: Any, x: Tensor, index: Tensor, weights: Tensor, linear: Callable[..., Tensor],
    activate: Callable[[Any, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """The layer by `linear(experts, name of the weight, rows, ends)` and `activate(experts, rows)`."""

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        hidden = activate(experts, linear(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, ends))
        rows = linear(experts, "down_proj", hidden, ends)
        return experts.post_expert_norm(rows) if getattr(experts, "has_post_expert_norm", False) else rows

    if getattr(experts, "_is_expert_parallel", False):  # pairs that another rank computes
        weights = weights.masked_fill(index >= experts.num_experts, 0)
    return through_experts(x, index, weights, experts.num_experts, compute).to(x.dtype)


def _parameters(experts: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    biases = (experts.gate_up_proj_bias, experts.down_proj_bias) if experts.has_bias else (None, None)
    return experts.gate_up_proj, experts.down_proj, *biases


def _is_plain(experts: Any) -> bool:
    """Whether the layer has no part of its own beside a gate, and weights that are not quantised."""
    own = getattr(experts, "has_post_expert_norm", False) or getattr(experts, "_is_expert_parallel", False)
    return not own and not hasattr(experts, FORMAT)


def _is_swiglu(experts: Any) -> bool:
    """Whether the gate is SwiGLU in transformers' default layout."""
    return experts.has_gate and type(experts)._apply_gate is _default_apply_gate and type(experts.act_fn) in SILU


def _own_gate(experts: Any) -> Network | None:
    """The gate of a model's own experts (gpt-oss), if it is one of this package's gates and the model changes nothing
    else; else None."""
    known: Network | None = experts.__dict__.get(GATE, None)
    if known is not None:
        return None if hasattr(experts, FORMAT) else known
    if GATE in experts.__dict__ or torch.compiler.is_compiling():
        return None
    plain = experts.has_gate and not _is_swiglu(experts) and not hasattr(experts, FORMAT)
    if plain and not getattr(experts, "has_post_expert_norm", False):
        known = gate_of(experts)
    experts.__dict__[GATE] = known
    return known


def gate_of(experts: Any) -> Network | None:
    """The gate of a module as one of this package's gates; None for any other.

    The module's `_apply_gate` is called on probe values of all sizes and signs, below and above the limits that the
    module names. It has to agree with a gate of this package to seven digits on all of them; a gate that does not is
    used as it is.
    """
    width = experts.down_proj.shape[1 if experts.is_transposed else 2] * 2
    draw = torch.Generator().manual_seed(0)
    x = (
        torch.randn(64, width, generator=draw, dtype=torch.float64)
        * torch.logspace(-3, 2, 64, dtype=torch.float64)[:, None]
    )
    try:
        with torch.no_grad():
            want = experts._apply_gate(x)
    except Exception:  # it reads what lies elsewhere, say
        return None
    if not isinstance(want, Tensor) or want.shape != (64, width // 2):
        return None
    stacked = bool(experts.is_transposed)
    for net in _candidates(experts):
        gate = net.gate
        got = gate_by_torch(x, net.activation, gate)
        if bool(((got - want).abs() <= 1e-7 * (1 + want.abs())).all()):
            return net._replace(stacked=stacked)
    return None


def _candidates(experts: Any) -> Iterator[Network]:
    """This package's gates with the numbers that a module names."""
    held = [experts, getattr(experts, "config", None)]

    def numbers(*names: str) -> list[float]:
        found = (getattr(x, name, None) for x in held for name in names)
        return list(dict.fromkeys(float(x) for x in found if isinstance(x, int | float) and not isinstance(x, bool)))

    limits: list[float | None] = [None, *numbers("limit", "swiglu_limit", "gate_limit")]
    alphas = [1.0, *numbers("alpha", "swiglu_alpha", "gate_alpha")]
    for kind, layout, limit, beta in itertools.product(GATES, GLU_LAYOUTS, limits, (0.0, 1.0)):
        for alpha in alphas if kind == "swiglu" else [1.0]:
            yield Network(kind, layout, alpha, beta, limit)


def _activated(experts: Any, hidden: Tensor) -> Tensor:
    """Applies the model's own gate, or for SwiGLU this package's kernel: one pass, one rounding."""
    return swiglu(hidden) if _is_swiglu(experts) else _gated_or_activated(experts, hidden)


def _linear(experts: Any, name: str, rows: Tensor, ends: Tensor) -> Tensor:
    weight = getattr(experts, name)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    if hasattr(experts, FORMAT):
        scale, zero = getattr(experts, f"{name}_scale"), getattr(experts, f"{name}_zero", None)
        half = rows if rows.dtype in HALVES else rows.to(torch.bfloat16)
        keywords = scale_keywords(getattr(experts, FORMAT), scale, zero)
        return grouped_gemm(half, weight.mT, ends=ends, bias=bias, out_dtype=rows.dtype, **keywords)
    stacked = weight if experts.is_transposed else weight.transpose(1, 2)
    return grouped_gemm(rows.to(weight.dtype), stacked, ends=ends, bias=bias)


# --- quantised weights ------------------------------------------------------------------------------


def quantize_experts_(
    model: nn.Module, format: Format, scale: str, *, scale_dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Quantises the experts of a model in place, for inference with `experts_implementation="multigemm"`.

    Args:
        model: a MoE model of transformers.
        format: "e4m3", "e5m2", "int8", "int4", "uint4" or "e2m1".
        scale: what one number covers, as in `multigemm.quantize.quantize`: "row", "1x32", "128x128", ...
        scale_dtype: float32, float8_e8m0fnu or the dtype of activations.

    Returns:
        The model; it runs with this implementation alone.

    Raises:
        InvalidProblem: the model has no experts that can be quantised, or their K does not fit the format.
    """
    found = _experts_of(model)
    if any(hasattr(module, FORMAT) or getattr(module, "_is_expert_parallel", False) for _, module in found):
        raise InvalidProblem(
            "the experts are quantised or spread over ranks already: quantise a fresh model before that"
        )
    for _, experts in found:
        for name, weight in _projections(experts):
            stack = weight.mT if experts.is_transposed else weight
            hold(experts, name, quantize_stack(stack, format, scale, scale_dtype))
        setattr(experts, FORMAT, format)
    return model


def load_mxfp4_experts_(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Gives a gpt-oss model the experts of a checkpoint in mxfp4, as they are: nothing is dequantised.

    Args:
        model: made from the checkpoint's config, its other weights loaded.
        state: the checkpoint's tensors by name, of which `<name>_blocks` [E, out, in / 32, 16] and `<name>_scales`
            [E, out, in / 32] of every layer's experts are read.

    Returns:
        The model; it runs with `experts_implementation="multigemm"` alone.

    Raises:
        InvalidProblem: blocks or scales are missing, or have other shapes than the model's experts.
    """
    for prefix, experts in _experts_of(model):
        for name, weight in _projections(experts):
            parts = [state.get(f"{prefix}.{name}_{part}") for part in ("blocks", "scales")]
            if parts[0] is None or parts[1] is None:
                raise InvalidProblem(
                    f"{prefix}.{name}: the checkpoint has no {name}_blocks or no {name}_scales: pass all "
                    "tensors of a checkpoint in mxfp4"
                )
            out, inner = (weight.shape[2], weight.shape[1]) if experts.is_transposed else weight.shape[1:]
            codes, scales = parts[0].flatten(-2), parts[1]
            wanted = (weight.shape[0], out, inner // 2), (weight.shape[0], out, -(-inner // 32))
            if (tuple(codes.shape), tuple(scales.shape)) != wanted:
                raise InvalidProblem(
                    f"{prefix}.{name}: blocks {tuple(parts[0].shape)} and scales {tuple(scales.shape)} do not fit "
                    f"{out} x {inner}: make the model from the checkpoint's own config"
                )
            where = weight.device if weight.device.type != "meta" else codes.device
            scale = scales.to(where).view(torch.float8_e8m0fnu)
            hold(experts, name, Quantized(codes.to(where, torch.uint8).contiguous(), scale))
        setattr(experts, FORMAT, "e2m1")
    return model


def _experts_of(model: nn.Module) -> list[tuple[str, Any]]:
    """The modules, by name, whose class transformers decorates with `use_experts_implementation`."""
    marks = ("is_transposed", "has_gate", "num_experts", "down_proj")
    found = [(name, x) for name, x in model.named_modules() if all(hasattr(x, mark) for mark in marks)]
    if not found:
        raise InvalidProblem(
            "the model has no experts that transformers can switch: pass a MoE model of transformers 5"
        )
    return found


def _projections(experts: Any) -> list[tuple[str, Tensor]]:
    """The weights of an experts module, by name."""
    held = ((name, getattr(experts, name, None)) for name in PROJECTIONS)
    return [(name, weight.detach()) for name, weight in held if weight is not None]


# --- transformers' own float8 experts ---------------------------------------------------------------


def fp8_experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward pass of `FP8Experts`: activations are quantised for each product, as in its other implementations.

    Scales of activations cover 128 of K if those of the weights are blocks, else a row. Weights of four bits multiply
    bfloat16.
    """
    if experts.activation_scheme != "dynamic":
        raise InvalidProblem(
            f"activation_scheme={experts.activation_scheme!r}: quantise activations dynamically, or use another "
            "experts_implementation"
        )
    return _in_steps(experts, hidden_states, top_k_index, top_k_weights, _float8_linear, _gated_or_activated)


def _gated_or_activated(experts: Any, hidden: Tensor) -> Tensor:
    """The model's own gate, or its activation."""
    found: Tensor = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    return found


def _float8_linear(experts: Any, name: str, rows: Tensor, ends: Tensor) -> Tensor:
    weight, scale = getattr(experts, name).detach(), getattr(experts, f"{name}_scale_inv").detach()
    if weight.dtype is torch.int8:
        half = rows if rows.dtype in HALVES else rows.to(torch.bfloat16)
        return grouped_gemm(half, weight.mT, ends=ends, out_dtype=rows.dtype, **scale_keywords("e2m1", scale))
    out = weight.shape[1]
    if scale.shape[1] == 2 and out <= BLOCK:  # a number for the gate and one for what it lets through
        scale = scale.repeat_interleave(-(-out // 2), dim=1)[:, :out]
    q = quantize(rows.detach(), "e4m3", "1x128" if scale.shape[2] > 1 else "row")
    return grouped_gemm(q.data, weight.mT, ends=ends, scale_a=q.scale, scale_b=turned(scale), out_dtype=rows.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, fp8_experts_forward)
