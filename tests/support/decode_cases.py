"""Layers for few tokens, and the loop over pairs that says what comes out of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multigemm.integrations.expert_network import Network
from multigemm.integrations.gradients import gate_by_torch

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def by_pairs(net: Network, x: Tensor, index: Tensor, weights: Tensor, *parameters: Any) -> Tensor:
    """The layer in float64, pair by pair."""
    up, down, up_bias, down_bias = (None if t is None else t.double() for t in parameters)
    assert up is not None and down is not None
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, row in enumerate(index.tolist()):
        for j, expert in enumerate(row):
            if not 0 <= expert < len(up):
                continue
            first, second = up[expert].t(), down[expert].t()
            h = x[token : token + 1].double() @ first
            h = gate_by_torch(h if up_bias is None else h + up_bias[expert], net.activation, net.gate)
            y = h @ second
            y = y if down_bias is None else y + down_bias[expert]
            out[token] += weights[token, j].double() * y[0]
    return out


LAYOUTS = ("halves", "interleaved", "halves_up_first")
KINDS = ("swiglu", "geglu", "geglu_tanh", "reglu", "glu")
NETWORKS = (
    *((Network(kind, LAYOUTS[number % 3]), number % 2 == 1) for number, kind in enumerate(KINDS)),
    (Network("swiglu", "interleaved", 1.702, 1.0, 0.7), True),
)
"""Every gate and every layout, and whether there are biases; the last one as GPT-OSS has it."""


def parameters_of(bias: bool, dtype: torch.dtype, device: str, sizes: tuple[int, int, int]) -> list[Any]:
    experts, hidden, inner = sizes
    made: list[Any] = []
    for out, deep in ((2 * inner, hidden), (hidden, inner)):
        made.append((torch.randn(experts, out, deep, device=device) / deep**0.5).to(dtype))
    return made + [torch.randn(experts, n, device=device).to(dtype) if bias else None for n in (2 * inner, hidden)]
